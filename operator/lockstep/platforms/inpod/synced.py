"""Folders that `lockstep sync` sends to, and what is remembered in each.

A sync is a copy by the protocol of `lockstep cp`, of which the taker says first what differs. What an earlier sync put here is remembered,
so that only that is ever deleted, and what was changed here meanwhile is never written over unasked. What another folder sent isn't written
over either: then nothing is written at all.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.platforms.inpod.destination import Destination
from lockstep.platforms.inpod.entries import Entry, is_plain
from lockstep_machine.wire import CarryError, Wire, no_protocol
from lockstep_spec.senders import Senders, read_json, write_json

RECORD = ".lockstep/sync.json"
SEEN = ".lockstep/sync-seen.json"
SETTLED_SECONDS = 2.0
"""Seconds in which a young file may change again without another time: file systems count in steps."""


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
            is_link = stat.S_ISLNK(state.st_mode)
            stamp = [state.st_size, state.st_mtime_ns, state.st_ctime_ns]
            previous = self._before.get(name)
            content = previous[0] if previous is not None and previous[1:] == stamp else digest(path, is_link)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None, False
        if time.time() - max(state.st_mtime, state.st_ctime) > SETTLED_SECONDS:
            self._now[name] = [content, *stamp]
        return content, bool(state.st_mode & 0o111) and not is_link

    def remember(self) -> None:
        if self._now != self._before:
            write_json(self._file, self._now)


def digest(path: str, is_link: bool) -> str:
    """SHA-256 of a file's bytes, or of a link's target. Raises OSError."""
    if is_link:
        return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()  # noqa: PTH115 (what is written in it, not a Path)
    with open(path, "rb") as file:  # noqa: PTH123 (a thousand of them: a Path costs more than the question)
        return hashlib.sha256(file.read()).hexdigest()


def compare(
    digests: Digests, files: dict[str, tuple[str, bool]], record: dict[str, str], others_of: Callable[[str], list[str]], force: bool
) -> dict[str, list[str]]:
    """Return files to send, and which of these have their content already (`same`), files to remove, those that were changed here since the
    last sync, those that another folder sent and that this one doesn't have, and those that another folder sent and that are different here
    (`theirs`).

    The last three stay unless forced. `files`: SHA-256 of each, and whether it can be executed. `others_of`: the other folders that sent a
    file.
    """
    changes: dict[str, list[str]] = {"wanted": [], "same": [], "removed": [], "changed": [], "others": [], "theirs": []}
    for name, offered in files.items():
        here = digests.of(name)
        if here == offered:
            continue
        touched = not force and here[0] not in (None, offered[0])
        known = "theirs" if touched and others_of(name) else "changed" if touched and here[0] != record.get(name) else "wanted"
        changes[known].append(name)
        if here[0] == offered[0]:  # (only whether it can be executed differs, so that nothing of it was touched)
            changes["same"].append(name)
    for name in (each for each in record if each not in files):
        content = digests.of(name)[0]
        if content is not None:
            known = "removed" if force else "others" if others_of(name) else "removed" if content == record[name] else "changed"
            changes[known].append(name)
    return changes


def remove(target: Destination, names: Iterable[str]) -> None:
    """Remove files, and folders that are empty then. Raises CarryError when a name would lead outside, by .. or by a link on the way."""
    for name in names:
        if not is_plain(name):
            raise CarryError(f"{name} would be outside of {target.base}")
        with suppress(FileNotFoundError):
            target.remove(name, os.unlink)
        with suppress(OSError):  # (one that isn't empty)
            for folder in list(PurePosixPath(name).parents)[:-1]:
                target.remove(str(folder), os.rmdir)


@contextmanager
def synced(wire: Wire, target: Destination, entries: list[Entry], request: Entry | None) -> Iterator[list[Entry]]:
    """Say how these entries differ from what is here, and give those to take: none if there is nothing to do. At the end, remove what the
    sender hasn't any more, and record what it has.

    `request`: its folder ("source"), and "force" and "alone"; None: this is no sync, and all of them are to be taken. Raises CarryError,
    Gone, OSError.
    """
    if request is None:
        yield entries
        return
    if "dir" not in entries[0]:
        raise no_protocol("it syncs no folder")
    base, sender, force = target.base, request["source"], request["force"]
    root, senders, digests = os.path.realpath(base), Senders(), Digests(base)
    record: dict[str, str] = read_json(f"{base}/{RECORD}")
    files = {entry["name"]: _content_of(entry) for entry in entries if "dir" not in entry}

    def others_of(name: str) -> list[str]:
        return senders.others(f"{root}/{name}", sender, f"{sender}/{name}")

    changes = compare(digests, files, record, others_of, force)
    theirs, same = {name: others_of(name) for name in changes.pop("theirs")}, {*changes.pop("same")}
    if request["alone"] and base.is_dir() and any(base.iterdir()):
        here = senders.sent_to(root)
        if not any(f"{each}/".startswith(f"{sender}/") for each in here):
            theirs = {"": sorted(here)}
    left, wanted = {*changes["changed"], *changes["others"]}, {*changes["wanted"]}
    contents = {name: content for name, (content, _) in files.items() if name not in left}
    contents.update((name, record[name]) for name in left if name in record)
    for name in files.keys() - left:
        senders.add(f"{root}/{name}", sender, root, alone=force or (name in wanted and name not in same))
    for name in changes["others"]:
        senders.drop(f"{root}/{name}", sender)
    done = bool(theirs) or not (wanted or changes["removed"] or senders.changed or contents != record)
    wire.say({"done": done})
    wire.say_all("changes", ([kind, name] for kind, names in changes.items() for name in names))
    wire.say_all("theirs", theirs.items())
    if done:
        yield []
    else:
        names = {str(name) for name, _ in wire.hear_all("keep")}
        kept = {name: content for name, content in record.items() if name in names}
        removed = [name for name in changes["removed"] if name not in kept]
        first = _in_the_way(removed, wanted)
        senders.write()  # (first: what a broken connection leaves is this folder's, too)
        remove(target, [*same, *first])  # (a file that only becomes a program comes anew)
        yield [entry for entry in entries if "dir" in entry or entry["name"] in wanted]
        remove(target, [name for name in removed if name not in first])
        for name in record.keys() - files.keys() - kept.keys() - left:
            senders.drop(f"{root}/{name}")
        write_json(f"{base}/{RECORD}", {**contents, **kept})
        senders.write()
    if not theirs:
        with suppress(OSError):  # (it only saves time)
            digests.remember()


def _content_of(entry: Entry) -> tuple[str, bool]:
    """SHA-256 of a file or of a link's target, and whether it can be executed."""
    if "link" in entry:
        return hashlib.sha256(os.fsencode(entry["link"])).hexdigest(), False
    return entry["sha256"], bool(entry["mode"] & 0o111)


def _in_the_way(removed: list[str], wanted: set[str]) -> set[str]:
    """Files to remove that have the place of a folder that comes, or are in a folder where a file comes."""
    folders = {str(folder) for name in wanted for folder in PurePosixPath(name).parents}
    return {name for name in removed if name in folders or any(str(folder) in wanted for folder in PurePosixPath(name).parents)}
