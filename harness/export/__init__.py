"""A case as one file that runs without this project, and the text of an upstream issue about it."""
