"""Where fetched files lie on a volume, what is known of them, and who may write them.

cache/models/org--model/<commit>/                       whole and checked; .lockstep-fetched.json says what it is
cache/models/org--model/.<commit>.partial/              while it is fetched; a file without `.part` is whole and checked
cache/models/org--model/revisions/main.json             the commit of `main` when it was last fetched
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lockstep_sizes.modelnames import FETCHED, fetched_folder, folder_name
from lockstep_train.checkpoint.durable import make_directory, sync_directory, write_durably
from lockstep_train.errors import ConfigError

PART = ".part"
POLL_SECONDS = 0.5
WAITING_EVERY_SECONDS = 30.0
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


@dataclass(frozen=True)
class Target:
    """The folder that is to become whole."""

    folder: Path

    @property
    def partial(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.partial")

    @property
    def lock(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.lock")


def target_in(cache: Path, kind: str, name: str, pin: str, part: str = "") -> Target:
    """`part`: what stands for a choice of files that is not the usual one."""
    return Target(Path(fetched_folder(str(cache), name, pin + part, kind)))


def whole_record(folder: Path) -> dict[str, Any] | None:
    """What a folder of fetched files is; None where it isn't whole: no record, or a file that is not there with its size."""
    try:
        record = json.loads((folder / FETCHED).read_bytes())
        sizes: dict[str, int] = record["files"]
        whole = all((folder / path).stat().st_size == size for path, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if whole else None


def commit_folder(target: Target, record: dict[str, Any]) -> None:
    """Give the partial folder its name, durably: the record is the last that is written into it."""
    for folder in sorted({path.parent for path in target.partial.rglob("*")} | {target.partial}):
        sync_directory(folder)
    write_durably(target.partial / FETCHED, json.dumps(record, indent=1).encode())
    target.partial.rename(target.folder)
    sync_directory(target.folder.parent)


def prepare_partial(target: Target) -> None:
    """The folder to fetch into: what an earlier fetch has left, or a folder that was whole and no longer is. Raises ConfigError, OSError."""
    make_directory(target.folder.parent)
    if target.folder.exists() and not target.partial.exists():
        if not (target.folder / FETCHED).exists() and any(target.folder.iterdir()):
            raise ConfigError(f"{target.folder} holds files that were not fetched by Lockstep; name another folder, or remove it")
        target.folder.rename(target.partial)
        (target.partial / FETCHED).unlink(missing_ok=True)
    make_directory(target.partial)
    if target.folder.exists():
        raise ConfigError(f"both {target.folder} and {target.partial} are there, and the first is not whole; remove it")


@contextlib.contextmanager
def one_at_a_time(target: Target, say: Callable[[str], None]) -> Iterator[None]:
    """Wait while another process fetches the same. Volumes without locks do without: two that write one file end with a wrong digest, which is seen."""
    make_directory(target.lock.parent)
    descriptor = os.open(target.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    said = 0.0
    try:
        while not _locked(descriptor):
            if time.monotonic() - said >= WAITING_EVERY_SECONDS or not said:
                said = time.monotonic()
                say(f"Another process fetches {target.folder}; waiting for it")
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _revision_file(cache: Path, kind: str, name: str, revision: str | None) -> Path:
    return cache / kind / folder_name(name) / "revisions" / f"{quote(revision or 'HEAD', safe='')}.json"


def remember_revision(cache: Path, kind: str, name: str, revision: str | None, pin: str) -> None:
    """So that a start without a network can take the commit that a branch had when it was fetched."""
    path = _revision_file(cache, kind, name, revision)
    make_directory(path.parent)
    write_durably(path, json.dumps({"revision": revision, "pin": pin, "time": time.time()}).encode())


def remembered_revision(cache: Path, kind: str, name: str, revision: str | None) -> str | None:
    try:
        return str(json.loads(_revision_file(cache, kind, name, revision).read_bytes())["pin"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
