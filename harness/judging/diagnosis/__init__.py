"""Diagnosis: which blocks of a prompt's KV are damaged, since which step, and for which prompt lengths.

Everything is derived from the observations. If an output does not repeat its prompt, the location is as precise as the
evidence allows and says so.
"""
