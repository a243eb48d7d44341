"""``harness export``: write a case as one file that runs without this project, and the text of an upstream issue.

* ``finding``: from a finding or a prompt to the file and the issue;
* ``case``: the contents of an exported file;
* ``standalone``: the program in that file.
"""
