"""Where the damage is: which blocks of a prompt's KV, since which step, and for which prompt lengths.

Everything here is taken from the observations. Where an output does not repeat its prompt, the same fields are filled
as far as the evidence goes, and say so.
"""
