"""``harness ci``: split a profile into parts for several machines, as data for CI systems."""
