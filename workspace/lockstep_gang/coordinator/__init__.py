"""The coordinator, which decides what happens next: beside the agent of node 0, on every platform."""
