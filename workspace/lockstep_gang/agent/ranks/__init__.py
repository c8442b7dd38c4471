"""The ranks of one attempt on this node."""
