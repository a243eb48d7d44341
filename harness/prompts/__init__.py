"""Prompt sets as data: how they are built, read and checked, and where their lengths lie relative to a block."""
