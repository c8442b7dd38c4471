"""Jobs and short runs in one namespace, without the operator."""
