"""Decision of the operator about one job: what to write, and what its status says."""
