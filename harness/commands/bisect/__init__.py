"""``harness bisect``: find the first vLLM version that shows a finding, by binary search with a repro as the test."""
