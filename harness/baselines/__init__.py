"""Baselines: recorded per-prompt references of single engines, with identity and provenance.

For other packages:

* ``build``: record baselines from a run (``record_from``), or use a run as reference unrecorded (``references_in``);
* ``diff``: describe in words what changed between two baselines;
* ``index``: ``BaselineIndex``, the baselines stored in a folder;
* ``lookup``: find the baseline of an identity (``look_up``), or the reason why there is none;
* ``model``: the data model, ``Baseline`` and ``Row``;
* ``published``: acceptance figures published elsewhere, for display only;
* ``store``: read and write baseline files (``load_baseline``, ``write_baseline``);
* ``summary``: headline figures of a baseline.
"""
