"""The way back from a commit."""
