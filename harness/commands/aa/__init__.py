"""``harness aa``: repeat the same cells; every finding is a false alarm.

* ``run``: record and judge the repetitions;
* ``report``: terminal, aa.json and aa.md.
"""
