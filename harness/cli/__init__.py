"""The command line: options, help texts and exit codes. Only ``app.main`` is for other packages.

Heavy imports stand inside the functions that need them, so that help texts and usage errors come at once.
"""
