"""What tries the harness itself on real engines: the self-test and A/A. The core must not import it."""
