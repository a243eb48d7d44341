"""The smallest case that still shows a finding, and the law of lengths around it."""
