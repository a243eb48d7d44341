"""Reports of judged runs: terminal, HTML, JUnit XML and Markdown, all from one summary."""
