"""``harness attach``: a profile for servers that run already, made of what they tell."""
