"""``harness repro --shrink``: find the smallest case that still shows a finding, and the law of lengths around it.

* ``search``: generic searches for small failing cases; pure;
* ``variant``: a case that can be shrunk;
* ``oracle``: what is wrong with an answer;
* ``run``: shrink a finding on running engines;
* ``export``: write the smallest case as a file or as the text of an issue.
"""
