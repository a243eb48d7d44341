"""What was recorded: one observation per request, the record of the run, its checksum and earlier formats."""
