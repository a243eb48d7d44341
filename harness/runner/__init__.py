"""Run plans on real engines and record the responses, without judging them.

For other packages:

* ``run``: ``record``, which records a run, and the creation of run folders;
* ``groups``: ``Runner``, which runs groups of engines;
* ``record_cells``: send the requests of cells to running engines, and record the answers;
* ``recorder``: ``Recorder``, which writes the run folder as responses arrive;
* ``play``: run the script of a scenario on engines;
* ``repetitions``: run the same cells repeatedly on the same engines;
* ``rescore``: re-score outputs with the plain single engine;
* ``kv_scrub``: overwrite KV blocks left by earlier requests.

Within this package:

* ``perform``: send a cell's requests to its engines;
* ``timeouts``: time limits of cells and runs.
"""
