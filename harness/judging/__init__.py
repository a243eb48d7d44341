"""Judging: pure functions from recorded runs and baselines to findings and a verdict. Knows no engines."""
