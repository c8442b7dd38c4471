"""Lines that the agent prints where it is asked to measure a cluster: a rank of an all-reduce sweep, and a probe of a node. The command line reads it in logs."""

from __future__ import annotations

SWEEP = "sweep"
"""The agent's first argument."""
SWEEP_POINT = "sweep point: "
"""Begins the line that has one size as JSON: bytes, microseconds, ranks."""
SWEEP_DONE = "sweep done"
PROBE = "probe"
"""The agent's first argument for a look at a node."""
PROBED = "probed: "
"""Begins the line that has what was seen, as JSON."""
