"""Checks: pure functions of one cell's evidence. ``registry`` is the entry point.

For other packages:

* ``registry``: which checks apply to which cell, and ``judge``, which judges a run;
* ``aggregation``: limit how many findings of a check are listed;
* ``hypothesis_tests``: the registered tests of the normal tier;
* ``model``: value types of the registered tests.

The checks, called through ``registry``:

* ``drafting``: drafts happened, and each step accepted as many as in the reference;
* ``logprobs``: log-probs equal those of a single engine and of the baseline;
* ``preconditions``: the state that a scenario is about really occurred;
* ``rescored``: the plain engine, given prompt and output, prefers the same tokens;
* ``responses``: all responses are present and self-consistent, for the prompts that were sent;
* ``statistical``: verdicts of the registered tests;
* ``tokens``: output tokens equal those of the plain engine and of the baseline;
* ``transfer``: KV moved from P to D.
"""
