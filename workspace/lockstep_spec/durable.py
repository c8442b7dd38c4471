"""Names in folders that outlive a power loss."""

from __future__ import annotations

import os
from pathlib import Path


def sync_directory(folder: Path) -> None:
    """Make the names in a folder durable: fsync of a file doesn't cover its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
