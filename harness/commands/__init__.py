"""The commands behind ``harness``: one module or folder each, with the report of the command beside it."""
