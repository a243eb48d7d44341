"""Statistics of paired runs: pure functions of counts, with no knowledge of engines, cells or files."""
