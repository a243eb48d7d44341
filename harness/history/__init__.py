"""What was recorded: one observation per request, the record of the run, its checksum and earlier formats.

* ``acceptance``: ``real_steps``, ``request_counts``, ``pool``: acceptance of drafts from per-step counts;
* ``checksum``: ``Seal``, ``check_observations``: detection of changes to a finished run;
* ``folder``: ``HistoryWriter``, ``write_run``, ``load_history``: the folder of a run, on disk;
* ``identity``: ``Identity``, ``identity_of``: what a recording belongs to, by hash;
* ``index``: ``RecordedCells``: observations of large runs, parsed on demand;
* ``layout``: names of the files in the folder of a run;
* ``migrations``: ``SCHEMA``, ``migrate``: records of earlier versions;
* ``plan``: ``plan_key``, ``matched``: the answers of a cell against the requests that were planned;
* ``records``: ``Observation``, ``RunRecord``: what is recorded;
* ``run_kind``: ``require_plain``: refusal of soaks and of runs with injected faults;
* ``surfaces``: ``WITHOUT``: engine features that some versions lack, and what each costs;
* ``token_ids``: ``compare``, ``common_prefix``, ``output_key``: sequences of token ids;
* ``verdict``: ``Verdict``, ``worst``: the verdicts and their order.
"""
