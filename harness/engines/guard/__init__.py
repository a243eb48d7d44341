"""Modules on the Python path of engines and routers; they use the standard library only."""
