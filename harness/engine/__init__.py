"""Real engines as child processes: environment, command line, process, HTTP client, counters, topology."""
