"""First process on every node: starts the ranks, watches them, stops them, and says how they ended."""
