"""Baselines: recorded references of single engines, per prompt, with identity and provenance."""
