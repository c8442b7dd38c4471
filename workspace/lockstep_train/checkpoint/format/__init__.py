"""What a commit is on disk."""
