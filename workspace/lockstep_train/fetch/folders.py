"""Folders of fetched files on a volume, what is known of them, and who may write them.

cache/models/org--model/<commit>/                       whole and checked; .lockstep-fetched.json says what it is
cache/models/org--model/.<commit>.partial/              while it is fetched; a file without `.part` is whole and checked
cache/models/org--model/revisions/main.json             the commit of `main` when it was last fetched
models/mine/, models/.mine.<commit>.partial/            a folder that `--to` names: no two commits share a partial folder
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lockstep_spec.files import make_directory, sync_directory, write_durably
from lockstep_spec.modelnames import FETCHED, fetched_folder, folder_name
from lockstep_train.base.errors import ConfigError, TrainerError
from lockstep_train.base.limits import Say

PART = ".part"
_OWNED = re.compile(r"(\.[0-9a-f]{16})?\.part$")
ABANDONED_SECONDS = 600.0
"""Seconds without a write after which a file is abandoned: longer than any wait between two writes."""
MOUNTS = Path("/proc/self/mountinfo")
_LOCAL_LOCKS = re.compile(r"\b(nolock|local_lock=(flock|all)|localflock)\b")
"""Options of NFS and Lustre with which a lock holds on one node only."""
POLL_SECONDS = 0.5
WAITING_EVERY_SECONDS = 30.0
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


@dataclass(frozen=True)
class Target:
    """The folder that is to become whole."""

    folder: Path
    pin: str = ""
    """Pin of a folder whose own path doesn't name it."""

    @property
    def partial(self) -> Path:
        pin = f".{self.pin}" if self.pin else ""
        return self.folder.with_name(f".{self.folder.name}{pin}.partial")

    @property
    def lock(self) -> Path:
        return self.folder.with_name(f".{self.folder.name}.lock")


def target_in(cache: Path, kind: str, name: str, pin: str, part: str = "") -> Target:
    """Target in the cache. `part`: what stands for a choice of files that is not the usual one."""
    return Target(Path(fetched_folder(str(cache), name, pin + part, kind)))


def whole_record(folder: Path) -> dict[str, Any] | None:
    """Record of a folder of fetched files; None where it isn't whole: no record, or a file that is not there with its size."""
    try:
        record = json.loads((folder / FETCHED).read_bytes())
        whole = _first_changed(folder, record["files"]) is None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if whole else None


def _first_changed(folder: Path, sizes: dict[str, int]) -> str | None:
    """First file that doesn't have its size. Raises OSError for one that isn't there."""
    return next((path for path, size in sizes.items() if (folder / path).stat().st_size != size), None)


def commit_folder(target: Target, record: dict[str, Any]) -> None:
    """Give the partial folder its name, durably: the record is the last that is written into it. Raises TrainerError, OSError."""
    changed = _first_changed(target.partial, record["files"])
    if changed is not None:
        raise TrainerError(
            f"{target.partial / changed} was changed by another process after it was checked; the next attempt fetches it anew: see that"
            " only one process fetches into a volume whose locks don't work"
        )
    for folder in sorted({path.parent for path in target.partial.rglob("*")} | {target.partial}):
        sync_directory(folder)
    write_durably(target.partial / FETCHED, json.dumps(record, indent=1).encode())
    target.partial.rename(target.folder)
    sync_directory(target.folder.parent)
    for part in target.folder.rglob(f"*{PART}"):
        part.unlink(missing_ok=True)


def prepare_partial(target: Target, name: str, suffix: str) -> None:
    """Prepare the folder to fetch into: what an earlier fetch of `name` at this pin has left, or a folder that was whole and no longer is.

    `suffix`: of this process' unfinished files. Raises ConfigError, OSError; FileExistsError where the folder has become whole.
    """
    make_directory(target.folder.parent)
    if target.folder.exists():
        if whole_record(target.folder) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target.folder))
        _take_back(target, name)
    make_directory(target.partial)
    if suffix == PART:
        _remove_other_pins(target)
    else:
        _adopt_abandoned(target, suffix)


def _take_back(target: Target, name: str) -> None:
    """Make the folder, which isn't whole, the partial one. Raises ConfigError for what isn't ours, or is something else's."""
    if not any(target.folder.iterdir()):
        if target.partial.exists():
            return  # renaming onto an empty folder is allowed
    elif not (target.folder / FETCHED).exists():
        raise ConfigError(f"{target.folder} holds files that were not fetched by Lockstep; name another folder, or remove it")
    elif target.pin and (holds := _recorded(target.folder)) != (name, target.pin):
        raise ConfigError(
            f"{target.folder} holds {holds[0]} at {holds[1]}, not {name} at {target.pin}, and files of it are missing; name another folder,"
            " or remove it"
        )
    elif target.partial.exists():
        raise ConfigError(f"both {target.folder} and {target.partial} are there, and the first is not whole; remove it")
    target.folder.rename(target.partial)
    (target.partial / FETCHED).unlink(missing_ok=True)


def _recorded(folder: Path) -> tuple[Any, Any]:
    try:
        record = json.loads((folder / FETCHED).read_bytes())
        return record["name"], record["pin"]
    except (ValueError, KeyError, TypeError):
        return "something", "an unknown commit"


def _remove_other_pins(target: Target) -> None:
    """Remove what was begun of other commits for the same folder: nobody goes on with it."""
    if target.pin:
        other = re.compile(rf"\.{re.escape(target.folder.name)}\.[0-9a-f]{{40}}\.partial")
        for folder in target.folder.parent.iterdir():
            if other.fullmatch(folder.name) and folder != target.partial:
                shutil.rmtree(folder, ignore_errors=True)


def _adopt_abandoned(target: Target, suffix: str) -> None:
    """Take over unfinished files that nobody has written to for a while, by the clock of the volume."""
    target.lock.touch()
    before = target.lock.stat().st_mtime - ABANDONED_SECONDS
    for part in list(target.partial.rglob(f"*{PART}")):
        with contextlib.suppress(FileNotFoundError):  # somebody else was faster
            if part.stat().st_mtime < before:
                part.rename(part.with_name(_OWNED.sub("", part.name) + suffix))


@contextlib.contextmanager
def one_at_a_time(target: Target, say: Say) -> Iterator[str]:
    """Wait while another process fetches the same. The suffix of this process' unfinished files: on a volume without locks one of its own,
    so that no two processes ever write one file.
    """
    make_directory(target.lock.parent)
    descriptor = os.open(target.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    last = 0.0
    try:
        while not _locked(descriptor):
            if time.monotonic() - last >= WAITING_EVERY_SECONDS or not last:
                last = time.monotonic()
                say(f"Another process fetches {target.folder}; waiting for it")
            time.sleep(POLL_SECONDS)
        yield PART if _locks_hold(descriptor) else f".{secrets.token_hex(8)}{PART}"
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


def _locks_hold(descriptor: int) -> bool:
    """Return True if a lock that is held keeps other nodes out, too."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    device = os.fstat(descriptor).st_dev
    mark = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        return not any(line.split()[2] == mark and _LOCAL_LOCKS.search(line) for line in MOUNTS.read_text().splitlines())
    return True


def _revision_file(cache: Path, kind: str, name: str, revision: str | None) -> Path:
    return cache / kind / folder_name(name) / "revisions" / f"{quote(revision or 'HEAD', safe='')}.json"


def remember_revision(cache: Path, kind: str, name: str, revision: str | None, pin: str) -> None:
    """Remember a branch's commit, so that a start without a network can take it."""
    path = _revision_file(cache, kind, name, revision)
    make_directory(path.parent)
    write_durably(path, json.dumps({"revision": revision, "pin": pin, "time": time.time()}).encode())


def remembered_revision(cache: Path, kind: str, name: str, revision: str | None) -> str | None:
    try:
        return str(json.loads(_revision_file(cache, kind, name, revision).read_bytes())["pin"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def free_bytes(folder: Path) -> int | None:
    """Free bytes of a volume; None where it doesn't say, as some in user space don't."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize if status.f_blocks else None
