"""What the operator keeps in memory of the cluster, and which keys need work."""
