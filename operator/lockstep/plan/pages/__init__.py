"""What a person reads about a job: why, top, logs, stacks, diff-runs."""
