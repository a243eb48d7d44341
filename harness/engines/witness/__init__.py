"""Modules on the Python path of engines whose KV caches are watched; they use the standard library and torch alone."""
