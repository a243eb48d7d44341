"""Run plans on real engines and record the responses, without judging them.

Public modules:

* ``run``: ``record``, which records a run, and the creation of run folders;
* ``groups``: ``Runner``, which runs groups of engines;
* ``record_cells``: asks cells on running engines and records the answers;
* ``recorder``: ``Recorder``, which writes the run folder as responses arrive;
* ``play``: runs the script of a scenario on engines;
* ``repetitions``: runs the same cells repeatedly on the same engines;
* ``rescore``: re-scores outputs with the plain single engine;
* ``kv_scrub``: overwrites KV blocks left by earlier requests.

Internal modules:

* ``perform``: sends a cell's requests to its engines;
* ``timeouts``: time limits of cells and runs.
"""
