"""Packing of the jobs of a matrix onto GPUs, with no knowledge of engines or vLLM."""
