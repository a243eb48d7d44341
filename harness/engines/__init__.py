"""Real vLLM engines: how they are started, asked, counted, recorded and ended."""
