"""The commands behind ``harness``: one module or folder each, with the report of the command beside it.

* ``aa``: repeat the same cells; every finding is a false alarm;
* ``baseline``: record, accept, compare and list baselines;
* ``ab``: the same cells on two vLLMs, the second judged by the first;
* ``bisect``: find the first vLLM version that shows a finding;
* ``ci``: split a profile into jobs for CI systems;
* ``clean``: redact the logs of runs that were killed;
* ``doctor``: check what this machine can run;
* ``export``: write a case as a standalone program;
* ``fuzz``: random traces as a profile;
* ``init``: write a profile for a model and its drafter;
* ``merge``: join the parts of a run that several machines recorded;
* ``missing``: make what a profile lacks (``run --prepare``);
* ``plan``: print engines, prompts and what a run could detect;
* ``probe_quality``: measure the probe models;
* ``repro``: try a finding again;
* ``resume``: complete an interrupted run;
* ``run``: record and judge a run;
* ``selftest``: check that every mutant is caught for the right reason;
* ``serve``: keep one cell's engines up behind one address;
* ``shrink``: reduce a failing case;
* ``soak``: keep engines under load and watch for leaks.
"""
