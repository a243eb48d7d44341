"""``harness bisect``: find the first vLLM version that shows a finding, by binary search with a repro as the test.

* ``environments``: versions to try, found or installed;
* ``search``: which version to try next; pure;
* ``run``: try versions and keep the results;
* ``report``: the terminal report.
"""
