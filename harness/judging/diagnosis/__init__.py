"""Diagnosis: which blocks of a prompt's KV are damaged, since which step, and for which prompt lengths.

Everything is derived from the observations. If an output does not repeat its prompt, the location is as precise as the
evidence allows and says so.

* ``diagnose``: combine the findings of a cell into a diagnosis;
* ``law``: infer which prompt lengths fail (``law_of_lengths``);
* ``location``: locate the damage of one request (``locate``);
* ``sources``: find the prompt position that an output token was copied from.
"""
