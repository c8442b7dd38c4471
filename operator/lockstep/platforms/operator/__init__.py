"""The operator's process."""
