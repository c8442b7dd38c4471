"""Packages that were carried to a machine without network: see scripts/gpu_carry.py."""

from __future__ import annotations

import sys
from pathlib import Path

CARRIED = Path(__file__).resolve().parents[2] / ".gpu-carry"


def append_carried() -> None:
    """Let Python find them, after all that the machine has itself: its own versions win."""
    if CARRIED.is_dir() and str(CARRIED) not in sys.path:
        sys.path.append(str(CARRIED))
