"""Files that are either wholly there after a power loss, or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def sync_directory(folder: Path) -> None:
    """Make the names in a folder durable: fsync of a file doesn't cover its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(folder: Path) -> None:
    """Create a folder and its parents, each name durable."""
    missing = [folder, *folder.parents]
    for path in reversed([path for path in missing if not path.exists()]):
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write beside the name, fsync, rename onto it, fsync the folder.

    The temporary name is drawn at random: pods that share a volume have the same process ids.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)
