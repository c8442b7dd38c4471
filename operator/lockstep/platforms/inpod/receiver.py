"""The pod's end of `lockstep sync`.

The sender says what it has, and hears what is wanted; then, unless it is done, that comes by the protocol of `lockstep cp`. So again, until
nothing more comes. What an earlier sync put here is remembered, so that only that is ever deleted, and what was changed here meanwhile is
never written over unasked. What another folder sent isn't written over either: then nothing is written at all.
"""

from __future__ import annotations

import hashlib
import os
import select
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.platforms.inpod.carry import failures_told, take
from lockstep_machine.wire import CarryError, Wire
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


def inside(target: Path, name: str) -> Path:
    """Path of `name` below `target`. Raises CarryError when it would lead outside, by .. or by a link on the way."""
    place = target / name
    root = target.resolve()
    if Path(name).is_absolute() or ".." in Path(name).parts or root not in (*place.parent.resolve().parents, place.parent.resolve()):
        raise CarryError(f"{name} would be outside of {target}")
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


def sync(wire: Wire) -> None:
    """Sync once, as the other end asks. Raises CarryError, Gone, OSError."""
    request = wire.hear()
    files: Files = {
        name: {"sha256": sha256, "link": link, "executable": executable} for name, sha256, link, executable in _all(wire, "files")
    }
    target, sender = Path(request["target"]), request["source"]
    root, senders = os.path.realpath(target), Senders()
    record: dict[str, str] = read_json(f"{target}/{RECORD}")
    digests = Digests(target)

    def others_of(name: str) -> list[str]:
        return senders.others(f"{root}/{name}", sender, f"{sender}/{name}")

    changes = compare(digests, files, record, others_of, request["force"])
    senders_of = {name: others_of(name) for name in changes["theirs"]}
    if request["alone"] and target.is_dir() and any(target.iterdir()):
        here = senders.sent_to(root)
        if not any(f"{each}/".startswith(f"{sender}/") for each in here):
            senders_of = {"": sorted(here)}
    if senders_of:
        _answer(wire, changes, senders_of, done=True)
        return
    untouched = {name: record[name] for name in changes["changed"] + changes["others"] if name in record}
    record_now = {**{name: file["sha256"] for name, file in files.items() if name not in changes["changed"]}, **untouched}
    wanted, same = set(changes["wanted"]), []
    for name in files.keys() - set(changes["changed"]):
        replaces = name in wanted and digests.of(name)[0] != files[name]["sha256"]
        if name in wanted and not replaces:
            same.append(name)
        senders.add(f"{root}/{name}", sender, root, alone=request["force"] or replaces)
    for name in changes["others"]:
        senders.drop(f"{root}/{name}", sender)
    done = record_now == record and not changes["wanted"] and not changes["removed"] and not senders.changed
    _answer(wire, changes, {}, done=done)
    if not done:
        if wire.hear()["stop"]:  # (another node has files of another folder)
            return
        kept = {name: record[name] for name in _all(wire, "keep") if name in record}
        removed = [name for name in changes["removed"] if name not in kept]
        senders.write()  # (first: what a broken connection leaves is this folder's, too)
        first = _in_the_way(removed, wanted)
        remove(target, [*same, *first])  # (a file that only becomes a program comes anew)
        take(wire, str(target), widen=0)
        remove(target, [name for name in removed if name not in first])
        for name in record.keys() - files.keys() - kept.keys() - set(changes["changed"] + changes["others"]):
            senders.drop(f"{root}/{name}")
        write_json(f"{target}/{RECORD}", {**record_now, **kept})
        senders.write()
        wire.say({"done": True})
    with suppress(OSError):  # (it only saves time)
        digests.remember()


def _all(wire: Wire, key: str) -> list[Any]:
    return [item for item, _ in wire.hear_all(key)]


def _answer(wire: Wire, changes: dict[str, list[str]], theirs: dict[str, list[str]], *, done: bool) -> None:
    wire.say({"done": done})
    wire.say_all("changes", ([kind, name] for kind, names in changes.items() if kind != "theirs" for name in names))
    wire.say_all("theirs", theirs.items())


def _in_the_way(removed: list[str], wanted: set[str]) -> set[str]:
    """Files to remove that have the place of a folder that comes, or are in a folder where a file comes."""
    folders = {str(folder) for name in wanted for folder in PurePosixPath(name).parents}
    return {name for name in removed if name in folders or any(str(folder) in wanted for folder in PurePosixPath(name).parents)}


if __name__ == "__main__":
    if sys.argv[1:] != [OWN_UMASK]:
        os.umask(0o002)  # pods of another transport have another user, and the same group
    own = Wire(0, 1)
    with failures_told(own):
        while select.select([0], [], []):  # (however long that takes)
            sync(own)
