"""Files and folders: names that outlive a power loss, and files where user code writes, too, such as on a volume, or in a folder that ranks
know.

Whatever stands there is read and written as a regular file or not at all. A FIFO would hold its reader up for ever, a link would lead the
agent's hand elsewhere, and a device or a file of many gigabytes would fill its memory.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import re
import secrets
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from lockstep_spec.words import binary_size

CHUNK_BYTES = 1024 * 1024
SOURCE_BYTES_MAX = 256 * 1024
"""Size above which a file is no program that a person wrote."""
WRITE_BYTES = 8 << 20
"""Size of the parts in which pages are written."""
SHARED = 0o664
"""Mode of new files: writable for the group, as far as the umask allows, since on a cluster another pod that goes on here may have another
user.
"""
ENLARGE = "make room there, or enlarge it"


def expanded(path: str | Path) -> Path:
    """Return a path with the user's home for a ~ in front; a user without a home has the path as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (whose twin raises RuntimeError)


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
        chunk = file.read(min(CHUNK_BYTES, most + 1))  # (which takes that much memory at once)
        while chunk:
            data += chunk
            chunk = file.read(min(CHUNK_BYTES, most + 1 - len(data)))
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return bytes(data)


def write_new(path: Path, data: bytes) -> None:
    """A new file with `data` in the place of whatever has the name; a link is removed, not followed. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with path.open("xb") as file:
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


def write_durably(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write beside the name, fsync, rename onto it, fsync the folder. Raises OSError, and then leaves nothing behind."""
    with durable_file(path, mode) as file:
        file.write(content)


@contextlib.contextmanager
def durable_file(path: Path, mode: int | None = None) -> Iterator[IO[bytes]]:
    """Open a file that gets its name only once it is whole and synced; after an error nothing is left.

    `mode`: the file's, whatever the umask; nobody else can open what is to be private before it has it.
    """
    with _renamed(path) as temporary, open(temporary, "wb", opener=_private if mode else None) as file:
        if mode:
            os.fchmod(file.fileno(), mode)
        yield file
        file.flush()
        os.fsync(file.fileno())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


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
            done += os.write(descriptor, pages[done : done + WRITE_BYTES])
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


class Signs:
    """Signs of life on a volume that any number of machines share: files that count up while their writers live.

    A watcher takes a writer for dead when its file has not changed for long on the watcher's own monotonic `clock`, and opens it anew at
    each look. So neither trusts the other's clock, a file's mtime, a lock that a network file system might not pass on, or what that keeps
    of an open file.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[str, tuple[bytes, float]] = {}  # file → what it said, and since when

    def unchanged_seconds(self, contents: Mapping[str, bytes]) -> dict[str, float]:
        """Seconds for which each of the files that are there has said the same, as far as this watcher has seen."""
        now, before = self._clock(), self._since
        self._since = {
            name: before[name] if name in before and before[name][0] == content else (content, now) for name, content in contents.items()
        }
        return {name: now - since for name, (_, since) in self._since.items()}


def shebang(file: Path) -> tuple[str, str]:
    """Return the path that the first line names, and the name of the interpreter, which `env` looks up; empty where there is no such
    line.
    """
    line = _head(file).partition(b"\n")[0]
    words = re.split(r"[ \t]+", line[2:].decode(errors="replace").strip(" \t")) if line.startswith(b"#!") else []
    names = [word for word in words if word and not word.startswith("-") and "=" not in word and Path(word.strip("\r")).name != "env"]
    return (words[0], names[0].rpartition("/")[2]) if names else ("", "")


def other_interpreter(file: Path) -> str:
    """Return the interpreter that the file's first line names, where that isn't Python and Python can't read the file; '' otherwise."""
    name = shebang(file)[1].strip("\r")
    return name if name and "py" not in name and parsed(file) is None else ""


def runs_with(interpreter: str, path: str) -> str:
    """Return what to write in a job for a program that Python can't run."""
    return f"write script.command: [{interpreter}, {path}] instead of script.path"


def module_files(module: str) -> tuple[str, str]:
    """Return the files of a Python module of which `python3 -m` runs the one that is there."""
    path = module.replace(".", "/")
    return f"{path}.py", f"{path}/__main__.py"


def parsed(file: Path) -> ast.Module | None:
    """Return a Python file's syntax; None where it can't be read as Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(read_source(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _head(file: Path) -> bytes:
    """Return as much of a file as the kernel reads for its first line; b'' where it can't be read."""
    try:
        with os.fdopen(open_regular(file, follow=True), "rb") as opened:
            return opened.read(256)
    except OSError:
        return b""


def read_source(file: Path) -> bytes:
    """Return a file's content; b'' where it can't be read, or is larger than any that people write."""
    try:
        return read_regular(file, SOURCE_BYTES_MAX, follow=True)
    except OSError:
        return b""
