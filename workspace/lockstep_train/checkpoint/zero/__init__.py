"""DeepSpeed's own state, read and written."""
