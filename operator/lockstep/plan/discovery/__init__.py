"""A cluster file from what a cluster shows: each value with where it came from, each unknown with why (pure)."""
