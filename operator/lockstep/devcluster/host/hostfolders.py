"""Folders of the host on which every node mounts one of its own: made when missing, removed when nobody needs them any more."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def is_mounted_anywhere(folder: Path) -> bool:
    """Whether some process, in whatever mount namespace, sees a mount on this folder."""
    seen: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            namespace = str((process / "ns" / "mnt").readlink())
            if namespace in seen:
                continue
            mounts = (process / "mountinfo").read_text().splitlines()
        except OSError:  # it ended
            continue
        seen.add(namespace)
        if any(line.split()[4] == str(folder) for line in mounts):
            return True
    return False


def remove_unused(folders: Iterable[Path]) -> None:
    """Remove those that are empty, unless a process has something mounted there.

    Removing a folder detaches what other mount namespaces have mounted on it, without a word: the nodes of another cluster
    would lose the state of their containers and could not end them any more.
    """
    for folder in folders:
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()) and not is_mounted_anywhere(folder):
            folder.rmdir()
