"""Pages about a job for people: why, top, logs, stacks."""
