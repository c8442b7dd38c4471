"""What a node says: to the coordinator, to its log, and at its end."""
