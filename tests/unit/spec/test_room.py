"""What a file system lacks when it takes no more: bytes, inodes, or the rest of a quota."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep_spec.files import why_unwritten

GIB = 1 << 30


@pytest.mark.parametrize(
    ("number", "free", "inodes", "says"),
    [
        (errno.ENOSPC, 0, 5, "No space left on device: the file system / has 0 B of 4 GiB left: make room there, or enlarge it"),
        (errno.ENOSPC, 2, 0, "No space left on device: the file system / has no inodes left, of 100: remove files there, however small"),
        (errno.EDQUOT, 2, 5, "Disk quota exceeded: a quota of its user, group or project on the file system /: raise it, or remove files"),
        (errno.EROFS, 0, 0, "Read-only file system"),
    ],
)
def test_an_error_for_want_of_room_names_the_file_system_and_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, number: int, free: int, inodes: int, says: str
) -> None:
    room = SimpleNamespace(f_files=100, f_favail=inodes, f_bavail=free, f_blocks=4, f_frsize=GIB)
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == Path("/"))
    assert why_unwritten(OSError(number, os.strerror(number)), Path("/not/there")) == says
