"""The self-test: every known defect is put back into real engines, and must be caught for the right reason."""
