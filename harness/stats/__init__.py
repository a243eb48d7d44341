"""Statistics of paired runs: pure functions of counts, with no knowledge of engines, cells or files.

* ``multiplicity``: ``holm``, ``stage_alpha``: many tests in one run;
* ``paired``: ``by_unit``, ``differences``, ``label_swap``, ``ratio``: two arms on the same prompts;
* ``power``: ``detectable``, ``units_needed``, ``least_units``, ``share_hit``: what a comparison can show;
* ``quiet``: ``quiet_tries``, ``excluded_above``: which rates tries without a sign exclude;
* ``sequential``: ``interval_of``: an interval that stays valid however often it is looked at.
"""
