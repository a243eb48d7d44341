"""Correctness harness for speculative decoding and prefill/decode disaggregation."""

__version__ = "0.1.0"
