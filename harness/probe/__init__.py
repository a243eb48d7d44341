"""Probe models: tiny trained checkpoints whose every output token depends on one known prompt position."""
