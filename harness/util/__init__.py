"""Files, paths, locks, text and time: helpers that know nothing of engines, prompts or verdicts."""
