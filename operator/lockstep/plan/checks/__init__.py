"""Findings about a cluster: `lockstep doctor` and `lockstep cluster lint`."""
