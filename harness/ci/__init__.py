"""Pipelines for CI systems, generated from a profile."""
