"""The first version in which a finding shows, by binary search with a repro as the test."""
