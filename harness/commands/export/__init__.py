"""``harness export``: write a case as one file that runs without this project, and the text of an upstream issue."""
