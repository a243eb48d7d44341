"""Process trees that cannot outlive their owner. ``supervisor`` runs with the standard library alone."""
