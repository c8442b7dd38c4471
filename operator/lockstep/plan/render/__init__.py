"""A resolved job and its Kubernetes objects."""
