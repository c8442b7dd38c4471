"""What is derived from the data and kept on disk."""
