"""Judging: pure functions from recorded runs and baselines to findings and a verdict. Knows no engines.

For other packages:

* ``checks``: the checks; ``checks.registry.judge`` judges a run;
* ``decision``: the single table that turns facts into a verdict;
* ``diagnosis``: where the damage is, and which prompt lengths fail;
* ``exposure``: how many answers were checked token by token, and which intermittent defect that excludes;
* ``evidence``: the input of checks, ``Evidence`` and ``CellView``;
* ``figures``: the typed figures of findings and check results;
* ``findings``: the output, ``Finding``, ``CheckResult`` and ``Judgement``;
* ``known_defects``: mark expected failures as KNOWN (``apply_known``);
* ``near_ties``: what rounding alone can change in an output;
* ``power``: which effects a run will be able to detect, before it starts;
* ``recorded_cell``: a view of one recorded cell, without baselines;
* ``references``: which baselines, known defects and second stage apply to a run.
"""
