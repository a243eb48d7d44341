"""``harness selftest``: put every known defect into real engines, and check that it is caught for the right reason.

* ``trials``: the workload and the expectation of each mutant;
* ``run``: run the trials;
* ``outcome``: whether a mutant was caught for the right reason;
* ``report``: terminal, JSON, HTML and Markdown reports.
"""
