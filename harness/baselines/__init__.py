"""Baselines: recorded per-prompt references of single engines, with identity and provenance."""
