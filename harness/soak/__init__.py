"""One cell for a long time: right answers all along, and nothing that grows (docs/soak.md)."""
