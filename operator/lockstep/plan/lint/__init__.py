"""What a cluster file says that can't be right: by itself, and held against the cluster (pure)."""
