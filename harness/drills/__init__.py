"""Fault drills: real engines, links and processes are broken on purpose; no run may be green, hang or leave things."""
