"""Checks: pure functions of the recorded history and the baselines. See ``harness.checks.registry``."""
