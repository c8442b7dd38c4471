"""What rank 0 of an all-reduce sweep prints: `lockstep cluster calibrate` reads it in the log of node 0."""

from __future__ import annotations

SWEEP = "sweep"
"""The agent's first argument."""
SWEEP_POINT = "sweep point: "
"""Begins the line that has one size as JSON: bytes, microseconds, ranks."""
SWEEP_DONE = "sweep done"
