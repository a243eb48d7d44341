"""Walks the recipes of CONTRIBUTING and counts what an addition costs.

``walk`` puts the places of a recipe one by one into a copy of the checkout, and runs mypy, ruff and tests after each:
what they complain of names the next place, or nobody does. ``scenario``, ``check`` and ``mutant`` are the smallest
additions of their kinds; ``places`` is what they are made of.
"""
