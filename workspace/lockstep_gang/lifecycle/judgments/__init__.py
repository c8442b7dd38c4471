"""What is wrong with what nodes found (pure). Every judgment yields findings that name the node, what was seen and what to do."""
