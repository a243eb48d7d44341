"""Long experiments on top of the commands: the self-test and A/A, which try the harness itself, and soak.

The core must not import it.
"""
