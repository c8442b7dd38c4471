"""The pod's end of `lockstep sync`.

One line of JSON in says what the sender has, one line out what is wanted; then, unless it is done, the size of a tar and the tar come in,
and one line goes out. So again, until nothing more comes. What an earlier sync put here is remembered, so that only that is ever deleted,
and what was changed here meanwhile is never written over unasked. What another folder sent isn't written over either: then nothing is
written at all.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from lockstep_spec.senders import Senders, read_json, write_json

OWN_UMASK = "own-umask"
"""Argument on a person's own machine, where their umask says who else may read and write."""
RECORD = ".lockstep/sync.json"
SEEN = ".lockstep/sync-seen.json"
SETTLED_SECONDS = 2.0
"""Seconds in which a young file may change again without another time: file systems count in steps."""
Files = dict[str, dict[str, Any]]


class Digests:
    """SHA-256 of files below a folder. A file is read again only if its size or times have changed, as git does it."""

    def __init__(self, target: Path) -> None:
        self._root, self._file = str(target), f"{target}/{SEEN}"
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


def compare(
    digests: Digests, files: Files, record: dict[str, str], others_of: Callable[[str], list[str]], force: bool
) -> dict[str, list[str]]:
    """Files to send, files to remove, those that were changed here since the last sync, those that another folder sent and that this one
    doesn't have, and those that another folder sent and that are different here (`theirs`).

    The last three stay unless forced. `others_of`: the other folders that sent a file.
    """
    changes: dict[str, list[str]] = {"wanted": [], "removed": [], "changed": [], "others": [], "theirs": []}
    for name, file in files.items():
        here, executable = digests.of(name)
        if here == file["sha256"] and (file["link"] or executable == file["executable"]):
            continue
        touched = not force and here is not None and here != file["sha256"]
        known = "theirs" if touched and others_of(name) else "changed" if touched and here != record.get(name) else "wanted"
        changes[known].append(name)
    for name, before in record.items():
        if name not in files and (here := digests.of(name)[0]) is not None:
            known = "removed" if force else "others" if others_of(name) else "removed" if here == before else "changed"
            changes[known].append(name)
    return changes


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


def receive_all(source: BinaryIO, say: BinaryIO) -> None:
    while line := source.readline():
        sync(json.loads(line), source, say)


def sync(request: dict[str, Any], source: BinaryIO, say: BinaryIO) -> None:
    target, files, sender = Path(request["target"]), request["files"], request["source"]
    root, senders = os.path.realpath(target), Senders()
    record: dict[str, str] = read_json(f"{target}/{RECORD}")
    digests = Digests(target)

    def others_of(name: str) -> list[str]:
        return senders.others(f"{root}/{name}", sender, f"{sender}/{name}")

    changes = compare(digests, files, record, others_of, request["force"])
    senders_of = {name: others_of(name) for name in changes["theirs"]}
    if request.get("alone") and target.is_dir() and any(target.iterdir()):
        here = senders.sent_to(root)
        if not any(f"{each}/".startswith(f"{sender}/") for each in here):
            senders_of = {"": sorted(here)}
    if senders_of:
        tell(say, {**changes, "theirs": senders_of, "done": True})
        return
    untouched = {name: record[name] for name in changes["changed"] + changes["others"] if name in record}
    record_now = {**{name: file["sha256"] for name, file in files.items() if name not in changes["changed"]}, **untouched}
    wanted = set(changes["wanted"])
    for name in files.keys() - set(changes["changed"]):
        replaces = name in wanted and digests.of(name)[0] != files[name]["sha256"]
        senders.add(f"{root}/{name}", sender, root, alone=request["force"] or replaces)
    for name in changes["others"]:
        senders.drop(f"{root}/{name}", sender)
    done = record_now == record and not changes["wanted"] and not changes["removed"] and not senders.changed
    tell(say, {**changes, "theirs": {}, "done": done})
    if not done:
        header = json.loads(source.readline())
        if header["stop"]:  # (another node has files of another folder)
            return
        archive = source.read(header["size"])
        if len(archive) != header["size"]:
            raise EOFError(f"received {len(archive)} of {header['size']} bytes")
        kept = {name: record[name] for name in header["keep"] if name in record}
        target.mkdir(parents=True, exist_ok=True)
        senders.write()  # (first: what a broken connection leaves is this folder's, too)
        unpack(target, archive)
        remove(target, [name for name in changes["removed"] if name not in kept])
        for name in record.keys() - files.keys() - kept.keys() - set(changes["changed"] + changes["others"]):
            senders.drop(f"{root}/{name}")
        write_json(f"{target}/{RECORD}", {**record_now, **kept})
        senders.write()
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
