"""Files that are either wholly there after a power loss, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lockstep_spec.files import sync_directory

CHUNK_BYTES = 8 << 20
SHARED = 0o664
"""Mode of new files: writable for the group, as far as the umask allows, since on a cluster another pod that goes on here may have another user."""


def make_directory(folder: Path) -> None:
    """Create a folder and its parents, each name durable."""
    for path in create_directories(folder):
        sync_directory(path.parent)


def create_directories(folder: Path) -> list[Path]:
    """Create a folder and its parents where they are missing. Returns those created: their names are not durable yet."""
    try:
        folder.mkdir()
    except FileExistsError:
        return []
    except FileNotFoundError:
        created = create_directories(folder.parent)
        folder.mkdir(exist_ok=True)
        return [*created, folder]
    return [folder]


def write_durably(path: Path, content: bytes) -> None:
    """Write beside the name, fsync, rename onto it, fsync the folder. Raises OSError, and then leaves nothing behind."""
    with durable_file(path) as file:
        file.write(content)


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name only once it is whole and synced; after an error nothing is left."""
    with _renamed(path) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_pages_durably(path: Path, pages: memoryview, size: int) -> None:
    """Write durably, as `write_durably` does, the first `size` bytes of whole pages, past the page cache where the volume allows it.

    Direct writes spare the processor a copy of everything, and the training's files their place in the cache.
    """
    with _renamed(path) as temporary:
        direct = os.O_DIRECT
        try:
            _write(temporary, pages, size, direct)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP}:
                raise
            _write(temporary, pages, size, 0)  # no direct writes on this volume, or from this memory


def _write(path: Path, pages: memoryview, size: int, flags: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | flags, SHARED)
    try:
        done = 0
        while done < size:
            done += os.write(descriptor, pages[done : done + CHUNK_BYTES])
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path`, durably, or is removed.

    Its name is drawn at random: pods that share a volume have the same process ids.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)
