"""Format of a commit on disk."""
