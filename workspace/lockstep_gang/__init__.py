"""Start, failure and restart of a job's ranks, together. Standard library only, Python 3.10 or newer."""
