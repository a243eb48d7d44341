"""``harness repro --shrink``: find the smallest case that still shows a finding, and the law of lengths around it."""
