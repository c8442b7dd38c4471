"""The pod's end of `lockstep sync`: run there by its own Python (3.10 or newer), as text; so nothing is imported but the standard library.

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

RECORD = ".lockstep/sync.json"
SOURCES = ".lockstep/sync-sources.json"
"""Which folder each file was sent from: what one folder's sync put here isn't another one's to remove."""
SEEN = ".lockstep/sync-seen.json"
SETTLED_SECONDS = 2.0
"""A file as young as that may change once more within what its file system takes for one moment."""
Files = dict[str, dict[str, Any]]


class Digests:
    """SHA-256 of files below a folder. What was read once isn't read again while its size and times are the same: with git's reasons and care."""

    def __init__(self, target: Path) -> None:
        self._root, self._file = str(target), target / SEEN
        self._before: dict[str, list[Any]] = read_json(self._file)
        self._now: dict[str, list[Any]] = {}

    def of(self, name: str) -> tuple[str | None, bool]:
        """Its digest and whether it can be executed. None: it isn't there."""
        path = f"{self._root}/{name}"
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None, False
        stamp = [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        known = self._before.get(name)
        content = known[0] if known is not None and known[1:] == stamp else digest(path)
        if content is not None and time.time() - max(found.st_mtime, found.st_ctime) > SETTLED_SECONDS:
            self._now[name] = [content, *stamp]
        return content, bool(found.st_mode & 0o111) and not stat.S_ISLNK(found.st_mode)

    def remember(self) -> None:
        if self._now != self._before:
            write_json(self._file, self._now)


def digest(path: str | Path) -> str | None:
    """SHA-256 of a file's bytes, or of a link's target; None: it isn't there."""
    try:
        if os.path.islink(path):  # noqa: PTH114 (a thousand of them: a Path costs more than the question)
            return hashlib.sha256(os.readlink(path).encode()).hexdigest()  # noqa: PTH115 (what is written in it, not a Path)
        with open(path, "rb") as file:  # noqa: PTH123
            return hashlib.sha256(file.read()).hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def compare(digests: Digests, files: Files, record: dict[str, str], foreign: set[str], force: bool) -> dict[str, list[str]]:
    """What to send, what to remove, what was changed here since the last sync, and what another folder sent: these two stay unless forced."""
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
    """Each file under another name first: who reads it meanwhile sees the old or the new one, never half."""
    import tarfile  # (its import takes as long as all the rest where nothing has changed)

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
                draft.chmod(0o775 if member.mode & 0o100 else 0o664)
            draft.replace(place)


def inside(target: Path, name: str) -> Path:
    """`name` below `target`. Raises ValueError when it would lead outside, by .. or by a link on the way."""
    place = target / name
    root = target.resolve()
    if Path(name).is_absolute() or ".." in Path(name).parts or root not in (*place.parent.resolve().parents, place.parent.resolve()):
        raise ValueError(f"{name} would be outside of {target}")
    return place


def remove(target: Path, names: list[str]) -> None:
    """Files, and folders that are empty then."""
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


def serve(source: BinaryIO, say: BinaryIO) -> None:
    while line := source.readline():
        sync(json.loads(line), source, say)


def sync(request: dict[str, Any], source: BinaryIO, say: BinaryIO) -> None:
    target, files = Path(request["target"]), request["files"]
    target.mkdir(parents=True, exist_ok=True)
    record: dict[str, str] = read_json(target / RECORD)
    digests = Digests(target)
    sources: dict[str, str] = read_json(target / SOURCES)
    foreign = {name for name in record if sources.get(name, request["source"]) != request["source"]}
    found = compare(digests, files, record, foreign, request["force"])
    kept = {name: record[name] for name in found["changed"] + found["others"] if name in record}
    held = {**{name: file["sha256"] for name, file in files.items() if name not in found["changed"]}, **kept}
    done = held == record and not found["wanted"] and not found["removed"]
    tell(say, {**found, "done": done})
    if not done:
        size = int(source.readline())
        archive = source.read(size)
        if len(archive) != size:
            raise EOFError(f"received {len(archive)} of {size} bytes")
        unpack(target, archive)
        remove(target, found["removed"])
        write_json(target / RECORD, held)
        write_json(target / SOURCES, {name: sources.get(name, request["source"]) if name in kept else request["source"] for name in held})
        tell(say, {"done": True})
    with suppress(OSError):  # (it only saves time)
        digests.remember()


def tell(say: BinaryIO, value: object) -> None:
    say.write(json.dumps(value).encode() + b"\n")
    say.flush()


if __name__ == "__main__":
    os.umask(0o002)  # pods of another transport have another user, and the same group
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except (OSError, ValueError, EOFError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
