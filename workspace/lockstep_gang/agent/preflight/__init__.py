"""Facts that a node finds before an attempt."""
