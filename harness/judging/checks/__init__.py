"""Checks: pure functions of one cell's evidence. ``registry`` is the entry point."""
