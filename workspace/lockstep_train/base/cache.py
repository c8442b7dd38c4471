"""The workspace's cache folder, and the hashes of files that are known in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path

from lockstep_spec.files import make_directory, write_durably
from lockstep_train.base.errors import ConfigError

SETTLED_SECONDS = 2.0
"""A file that changed this recently may change once more without another time of change: file systems count in ticks, some in whole
seconds.
"""


def cache_folder(run_dir: Path) -> Path:
    """The workspace's cache, shared by all runs beside each other in `runs`; else one in the run's own folder. The data's own
    folder may be read-only."""
    return run_dir.parent.parent / "cache" if run_dir.parent.name == "runs" else run_dir / "cache"


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp(path: Path) -> list[int]:
    """Stamp of a file's content, which no other content leaves as it is: size, inode, and both times of change in nanoseconds.

    Whoever writes can put mtime back (`cp -p`, `touch -r`), but not ctime. Raises OSError.
    """
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def file_hash(path: Path, cache: Path | None) -> str:
    """SHA-256 of all of a file. Raises OSError.

    A file that was hashed before isn't read again while its `stamp` is the same: a note in `cache` says so. Nodes that have a file of their
    own at the same path have a note each. Without a cache, or where it can't be written, every file is read.
    """
    identity = [str(path), *stamp(path)]
    note = cache / "files" / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.json" if cache is not None else None
    recorded = read_note(note) if note is not None else None
    if recorded is not None and recorded.get("seen") == identity:
        return str(recorded["sha256"])
    digest = file_digest(path)
    if note is not None and [str(path), *stamp(path)] == identity and time.time() - path.stat().st_ctime > SETTLED_SECONDS:
        with contextlib.suppress(OSError):
            make_directory(note.parent)
            write_durably(note, json.dumps({"seen": identity, "sha256": digest}).encode())
    return digest


def read_note(path: Path) -> dict[str, object] | None:
    """None when it isn't there or is damaged: then the file is hashed anew."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and "sha256" in value else None


LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of what git leaves in place of a large file where Git LFS isn't installed."""
NO_POINTER = "is a Git LFS pointer and not the file itself: run `git lfs pull` in the clone, and copy it again"


def refuse_pointers(folder: Path) -> None:
    """Raise ConfigError for a model's folder in which a file is a pointer of Git LFS."""
    for path in sorted(folder.glob("*")):
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(LFS_POINTER):
            raise ConfigError(f"training.model.name {folder}: {path.name} {NO_POINTER}")
