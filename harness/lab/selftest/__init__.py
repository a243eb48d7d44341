"""``harness selftest``: put every known defect into real engines, and check that it is caught for the right reason."""
