"""Packs the jobs of a matrix onto GPUs: pure functions of jobs and devices, with no knowledge of engines or vLLM."""
