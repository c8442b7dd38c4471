"""Senders of the files of a volume, as `lockstep sync` and `lockstep cp` record them there: whose a file is, before it is written over or
run again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep_spec.files import read_regular, write_durably

SOURCES = ".lockstep/sync-sources.json"
"""Record below a folder: for each file that was sent, by its path there, the folder that sent it, as HOST:PATH, or a list of such folders.
"""
SHOWN = 3
RECORD_BYTES_MAX = 64 << 20


class Senders:
    """Records of all folders from the root of the file system down to a file. A record is read once."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, Any]] = {}
        self.changed: set[str] = set()
        """Folders whose records aren't written yet."""

    def of(self, path: str) -> list[str]:
        """Return the folders that sent the file, sorted."""
        return sorted({sender for _, _, senders in self._entries(path) for sender in senders})

    def others(self, path: str, sender: str, origin: str) -> list[str]:
        """Return the folders that sent the file, without `sender`, which now sends its file `origin`: those of other files."""
        own = (sender, folder_of(origin))
        entries = [(each, f"{each}/{name}") for _, name, senders in self._entries(path) for each in senders]
        return sorted({each for each, file in entries if each not in own and file != origin})

    def refusal(self, files: Iterable[tuple[str, str]]) -> str:
        """Return why these files, which differ from those that are there, must not replace them; '' if they may. `files`: (path, origin) of
        each.
        """
        there = ((path, self.others(path, folder_of(origin), origin)) for path, origin in files if os.path.lexists(path))
        theirs = {path: others for path, others in there if others}
        more = f" and {len(theirs) - 1} more" if len(theirs) > 1 else ""
        who = ", ".join(sorted({sender for others in theirs.values() for sender in others})[:SHOWN])
        return f"{min(theirs)}{more} was sent from {who}, and would be another file" if theirs else ""

    def note(self, files: Mapping[int, tuple[str, str]], new: Container[int], roots: Sequence[str]) -> None:
        """Record who sent these files, in the highest folder of their volume that may be written to. `new`: those that weren't there like
        this.
        """
        common = os.path.commonpath([folder_of(path) for path, _ in files.values()]) if files else "/"
        within = [folder for folder in (common, *_above(common)) if any(f"{folder}/".startswith(f"{root}/") for root in roots)]
        holder = next((folder for folder in reversed(within) if _may_record(folder)), common)
        for number, (path, origin) in files.items():
            self.add(path, folder_of(origin), holder, alone=number in new)
        self.write()

    def add(self, path: str, sender: str, folder: str, *, alone: bool) -> None:
        """Note in the record of `folder` that `sender` sent the file. `alone`: in place of what others had sent."""
        if alone and self.of(path) != [sender]:
            self.drop(path)
        name, record = _name_below(path, folder), self._record(folder)
        senders = _senders_in(record.get(name))
        if sender not in senders:
            record[name] = [*senders, sender] if senders else sender
            self.changed.add(folder)

    def drop(self, path: str, sender: str | None = None) -> None:
        """Forget that `sender` sent the file; None: that anybody did."""
        for folder, name, senders in [*self._entries(path)]:
            left = [each for each in senders if sender not in (None, each)]
            if left != senders:
                self._record(folder).update({name: left})
                self.changed.add(folder)

    def write(self) -> None:
        """Write the records that have changed. Raises OSError."""
        for folder in self.changed:
            write_json(f"{folder}/{SOURCES}", {name: senders for name, senders in self._records[folder].items() if senders})
        self.changed.clear()

    def sent_to(self, folder: str) -> set[str]:
        """Return who has sent files to this folder."""
        below = [(f"{_name_below(folder, above)}/".lstrip("/"), self._record(above)) for above in (folder, *_above(folder))]
        return {sender for start, record in below for name in record if name.startswith(start) for sender in _senders_in(record[name])}

    def _entries(self, path: str) -> Iterator[tuple[str, str, list[str]]]:
        """Folder of each record above the file that has it, its name there, and who sent it."""
        for folder in _above(path):
            name = _name_below(path, folder)
            senders = _senders_in(self._record(folder).get(name))
            if senders:
                yield folder, name, senders

    def _record(self, folder: str) -> dict[str, Any]:
        if folder not in self._records:
            self._records[folder] = read_json(f"{folder}/{SOURCES}")
        return self._records[folder]


def folder_of(origin: str) -> str:
    """Return the folder of a file, which may be named as HOST:PATH."""
    return origin.rpartition("/")[0]


def _above(path: str) -> Iterator[str]:
    while os.path.dirname(path) != path:  # noqa: PTH120 (thousands of them)
        path = os.path.dirname(path)  # noqa: PTH120
        yield path


def _may_record(folder: str) -> bool:
    own = os.path.dirname(f"{folder}/{SOURCES}")  # noqa: PTH120
    return os.access(own if os.path.isdir(own) else folder, os.W_OK)  # noqa: PTH112


def _name_below(path: str, folder: str) -> str:
    return path[len(folder.rstrip("/")) + 1 :]


def _senders_in(senders: Any) -> list[str]:
    return [sender for sender in (senders if isinstance(senders, list) else [senders]) if isinstance(sender, str)]


def read_json(path: str) -> dict[str, Any]:
    try:
        return dict(json.loads(read_regular(Path(path), RECORD_BYTES_MAX, follow=True)))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def write_json(path: str, value: dict[str, Any]) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    write_durably(Path(path), json.dumps(value).encode())
