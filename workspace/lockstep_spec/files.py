"""Files and folders: names that outlive a power loss, and files where user code writes, too, such as on a volume, or in a folder that ranks know.

Whatever stands there is read and written as a regular file or not at all. A FIFO would hold its reader up for ever, a link would lead the agent's
hand elsewhere, and a device or a file of many gigabytes would fill its memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from lockstep_spec.words import binary_size

CHUNK_BYTES = 1024 * 1024
ENLARGE = "make room there, or enlarge it"


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """A descriptor of the regular file `path`, without ever waiting for anybody. `follow`: a link is followed. Raises OSError."""
    never = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags | never, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def read_regular(path: Path, most: int, *, follow: bool = False) -> bytes:
    """All of a regular file. Raises OSError, for one of more than `most` bytes, too."""
    data = bytearray()
    with os.fdopen(open_regular(path, follow=follow), "rb", buffering=0) as file:
        while len(data) <= most and (chunk := file.read(min(CHUNK_BYTES, most + 1 - len(data)))):  # (which takes that much memory at once)
            data += chunk
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return bytes(data)


def open_new(path: Path) -> int:
    """A descriptor of a new, empty file in the place of whatever has the name; a link is removed, not followed. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def write_new(path: Path, data: bytes) -> None:
    """A new file with `data` in the place of whatever has the name. Raises OSError."""
    with os.fdopen(open_new(path), "wb") as file:
        file.write(data)


def sync_directory(folder: Path) -> None:
    """Make the names in a folder durable: fsync of a file doesn't cover its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def why_unwritten(error: OSError, path: Path) -> str:
    """Return the system's words, and for a lack of room which file system lacks bytes or inodes, or that a quota is used up."""
    words = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return words
    try:
        return f"{words}: {room_words(mount_of(path), quota=error.errno == errno.EDQUOT)}"
    except OSError:
        return words


def mount_of(path: Path) -> Path:
    """Return where the file system is mounted on which `path` is, or would be. Raises OSError."""
    while not path.exists():
        path = path.parent
    while not path.is_mount():
        path = path.parent
    return path


def room_words(mount: Path, *, quota: bool = False, more: str = ENLARGE) -> str:
    """Return what a file system lacks that takes no more, and what helps; `more`: that for a lack of bytes. Raises OSError."""
    if quota:
        return f"a quota of its user, group or project on the file system {mount}: raise it, or remove files"
    room = os.statvfs(mount)
    if room.f_files and not room.f_favail:
        return f"the file system {mount} has no inodes left, of {room.f_files}: remove files there, however small"
    free = f"{binary_size(room.f_bavail * room.f_frsize)} of {binary_size(room.f_blocks * room.f_frsize)}"
    return f"the file system {mount} has {free} left: {more}"


def lacks_room(path: Path) -> bool:
    """Return True if less than a twentieth of its file system's bytes or inodes is left."""
    try:
        room = os.statvfs(path)
    except OSError:
        return False
    return room.f_bavail * 20 < room.f_blocks or room.f_favail * 20 < room.f_files
