"""The agent, the first process on every node: starts the ranks, watches them, stops them, and reports how they ended."""
