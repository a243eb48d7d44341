"""``harness aa``: repeat the same cells; every finding is a false alarm."""
