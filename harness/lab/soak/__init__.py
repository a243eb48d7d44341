"""``harness soak``: keep engines under load and watch them for leaks and for answers that change."""
