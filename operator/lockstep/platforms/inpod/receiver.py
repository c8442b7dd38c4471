"""The pod's end of `lockstep sync`.

One line of JSON in says what the sender has, one line out what is wanted; then, unless it is done, the size of a tar and the tar come in, and one
line goes out. So again, until nothing more comes.
What an earlier sync put here is remembered, so that only that is ever deleted, and what was changed here meanwhile is never written over unasked.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

OWN_UMASK = "own-umask"
"""Argument on a person's own machine, where their umask says who else may read and write."""
RECORD = ".lockstep/sync.json"
SOURCES = ".lockstep/sync-sources.json"
"""File that tells from which folder each file was sent: the sync of one folder removes nothing that another one sent."""
SEEN = ".lockstep/sync-seen.json"
SETTLED_SECONDS = 2.0
"""Seconds in which a young file may change again without another time: file systems count in steps."""
Files = dict[str, dict[str, Any]]


class Digests:
    """SHA-256 of files below a folder. A file is read again only if its size or times have changed, as git does it."""

    def __init__(self, target: Path) -> None:
        self._root, self._file = str(target), target / SEEN
        self._before: dict[str, list[Any]] = read_json(self._file)
        self._now: dict[str, list[Any]] = {}

    def of(self, name: str) -> tuple[str | None, bool]:
        """Digest of a file, and whether it can be executed; None if it doesn't exist."""
        path = f"{self._root}/{name}"
        try:
            state = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None, False
        stamp = [state.st_size, state.st_mtime_ns, state.st_ctime_ns]
        previous = self._before.get(name)
        content = previous[0] if previous is not None and previous[1:] == stamp else digest(path)
        if content is not None and time.time() - max(state.st_mtime, state.st_ctime) > SETTLED_SECONDS:
            self._now[name] = [content, *stamp]
        return content, bool(state.st_mode & 0o111) and not stat.S_ISLNK(state.st_mode)

    def remember(self) -> None:
        if self._now != self._before:
            write_json(self._file, self._now)


def digest(path: str | Path) -> str | None:
    """SHA-256 of a file's bytes, or of a link's target; None if it doesn't exist."""
    try:
        if os.path.islink(path):  # noqa: PTH114 (a thousand of them: a Path costs more than the question)
            return hashlib.sha256(os.readlink(path).encode()).hexdigest()  # noqa: PTH115 (what is written in it, not a Path)
        with open(path, "rb") as file:  # noqa: PTH123
            return hashlib.sha256(file.read()).hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def compare(digests: Digests, files: Files, record: dict[str, str], foreign: set[str], force: bool) -> dict[str, list[str]]:
    """Files to send, files to remove, those that were changed here since the last sync, and those that another folder sent.

    The last two stay unless forced.
    """
    wanted: list[str] = []
    removed: list[str] = []
    changed: list[str] = []
    others: list[str] = []
    for name, file in files.items():
        here, executable = digests.of(name)
        if here == file["sha256"] and (file["link"] or executable == file["executable"]):
            continue
        touched = here is not None and here not in (record.get(name), file["sha256"])
        (changed if touched and not force else wanted).append(name)
    for name, before in record.items():
        if name not in files and (here := digests.of(name)[0]) is not None:
            (removed if force else others if name in foreign else removed if here == before else changed).append(name)
    return {"wanted": wanted, "removed": removed, "changed": changed, "others": others}


def unpack(target: Path, archive: bytes) -> None:
    """Unpack each file under another name first: a reader sees the old or the new one, never half."""
    import tarfile  # (its import takes as long as all the rest where nothing has changed)

    mask = os.umask(0o077)
    os.umask(mask)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            place = inside(target, member.name)
            place.parent.mkdir(parents=True, exist_ok=True)
            draft = place.with_name(f".{place.name}.sync-{os.getpid()}")
            if member.issym():
                inside(target, os.path.normpath(str(Path(member.name).parent / member.linkname)))
                draft.symlink_to(member.linkname)
            else:
                content = tar.extractfile(member)
                draft.write_bytes(content.read() if content is not None else b"")
                draft.chmod((0o777 if member.mode & 0o100 else 0o666) & ~mask)
            draft.replace(place)


def inside(target: Path, name: str) -> Path:
    """Path of `name` below `target`. Raises ValueError when it would lead outside, by .. or by a link on the way."""
    place = target / name
    root = target.resolve()
    if Path(name).is_absolute() or ".." in Path(name).parts or root not in (*place.parent.resolve().parents, place.parent.resolve()):
        raise ValueError(f"{name} would be outside of {target}")
    return place


def remove(target: Path, names: list[str]) -> None:
    """Remove files, and folders that are empty then."""
    for name in names:
        place = inside(target, name)
        place.unlink(missing_ok=True)
        for folder in place.parents:
            if folder == target or any(folder.iterdir()):
                break
            folder.rmdir()


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value))
    draft.replace(path)


def receive_all(source: BinaryIO, say: BinaryIO) -> None:
    while line := source.readline():
        sync(json.loads(line), source, say)


def sync(request: dict[str, Any], source: BinaryIO, say: BinaryIO) -> None:
    target, files = Path(request["target"]), request["files"]
    target.mkdir(parents=True, exist_ok=True)
    record: dict[str, str] = read_json(target / RECORD)
    digests = Digests(target)
    sources: dict[str, str] = read_json(target / SOURCES)
    foreign = {name for name in record if sources.get(name, request["source"]) != request["source"]}
    changes = compare(digests, files, record, foreign, request["force"])
    untouched = {name: record[name] for name in changes["changed"] + changes["others"] if name in record}
    record_now = {**{name: file["sha256"] for name, file in files.items() if name not in changes["changed"]}, **untouched}
    done = record_now == record and not changes["wanted"] and not changes["removed"]
    tell(say, {**changes, "done": done})
    if not done:
        size = int(source.readline())
        archive = source.read(size)
        if len(archive) != size:
            raise EOFError(f"received {len(archive)} of {size} bytes")
        unpack(target, archive)
        remove(target, changes["removed"])
        write_json(target / RECORD, record_now)
        write_json(
            target / SOURCES,
            {name: sources.get(name, request["source"]) if name in untouched else request["source"] for name in record_now},
        )
        tell(say, {"done": True})
    with suppress(OSError):  # (it only saves time)
        digests.remember()


def tell(say: BinaryIO, value: object) -> None:
    say.write(json.dumps(value).encode() + b"\n")
    say.flush()


if __name__ == "__main__":
    if sys.argv[1:] != [OWN_UMASK]:
        os.umask(0o002)  # pods of another transport have another user, and the same group
    try:
        receive_all(sys.stdin.buffer, sys.stdout.buffer)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except (ValueError, EOFError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
