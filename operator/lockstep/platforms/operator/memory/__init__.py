"""Memory of the operator: the cluster as it was seen, and the keys that need work."""
