"""Folders of arrays on disk: larger than memory while they are written, mapped and not read while they are used.

Each array is a raw little-endian file; index.json, written last, holds types, lengths, SHA-256 sums and facts about the whole. A
folder gets its name only when all of it is on the disk, so it is whole or not there; bits that rot later are found by the sums.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from lockstep_spec.files import make_directory, sync_directory, write_durably
from lockstep_train.base.cache import file_digest

Array = numpy.ndarray[Any, Any]
FORMAT = "lockstep-arrays/1"
INDEX = "index.json"
ABANDONED_SECONDS = 3600


class Damaged(Exception):
    """Folder that is not what its index says, or has none."""


@dataclass(frozen=True)
class Arrays:
    """The mapped arrays of a folder."""

    folder: Path
    facts: dict[str, Any]
    """Facts that the writer stated about the whole."""
    sums: dict[str, str]
    arrays: dict[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def digest(self, *names: str) -> str:
        """One sum over these arrays."""
        return hashlib.sha256("".join(f"{name}:{self.sums[name]}\n" for name in names).encode()).hexdigest()


class ArrayWriter:
    """Arrays that grow by appending. Nothing is visible under the folder's name before `commit`."""

    def __init__(self, folder: Path, types: Mapping[str, str]) -> None:
        """`types`: name → numpy's code of the type, for example "<i4"."""
        make_directory(folder.parent)
        remove_abandoned(folder)
        self._folder = folder
        self._types = dict(types)
        self._temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
        self._temporary.mkdir()
        self._files = {name: (self._temporary / name).open("wb") for name in types}
        self._sums = {name: hashlib.sha256() for name in types}
        self._lengths = dict.fromkeys(types, 0)

    def append(self, name: str, values: Array) -> None:
        content = numpy.ascontiguousarray(values, dtype=self._types[name]).data
        self._files[name].write(content)
        self._sums[name].update(content)
        self._lengths[name] += len(values)

    def commit(self, facts: Mapping[str, Any]) -> None:
        """Make the folder durable and visible. When someone else made the same one meanwhile, theirs stays."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        arrays = {
            name: {"type": self._types[name], "length": self._lengths[name], "sha256": self._sums[name].hexdigest()} for name in self._types
        }
        write_durably(self._temporary / INDEX, json.dumps({"format": FORMAT, "facts": dict(facts), "arrays": arrays}, indent=1).encode())
        try:
            self._temporary.rename(self._folder)
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            shutil.rmtree(self._temporary)
        sync_directory(self._folder.parent)

    def discard(self) -> None:
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


def open_arrays(folder: Path, verify: bool) -> Arrays:
    """Map the arrays of a folder; with `verify`, compare the sums of all their bytes first. Raises Damaged."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
        if index["format"] != FORMAT:
            raise Damaged(f"{folder} has the format {index['format']}, not {FORMAT}")
        entries: dict[str, dict[str, Any]] = index["arrays"]
        arrays = {name: map_array(folder / name, entry["type"], entry["length"]) for name, entry in entries.items()}
        sums = {name: str(entry["sha256"]) for name, entry in entries.items()}
        facts: dict[str, Any] = index["facts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{folder} can't be read: {error}") from error
    for name, expected in sums.items() if verify else ():
        if file_digest(folder / name) != expected:
            raise Damaged(f"{folder / name} is damaged: its SHA-256 is not the one in {INDEX}")
    return Arrays(folder, facts, sums, arrays)


def whole_arrays(folder: Path, tell: Callable[[Damaged], None]) -> Arrays | None:
    """The arrays of a folder, all their bytes compared with their sums; None where there are none, and where a damaged folder was removed.

    `tell` is called before a folder is removed. One that another process has put there since the look stays.
    """
    before = _seen(folder)
    try:
        return open_arrays(folder, verify=True)
    except Damaged as problem:
        if before is not None and _seen(folder) == before:
            tell(problem)
            remove(folder)
        return None


def _seen(folder: Path) -> tuple[int, int] | None:
    """Identity of a folder, which tells it from another one of its name; None where there is none."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns


def map_array(path: Path, code: str, length: int) -> Array:
    """Map one array. Raises Damaged when the file has another size."""
    expected = length * numpy.dtype(code).itemsize
    if path.stat().st_size != expected:
        raise Damaged(f"{path} has {path.stat().st_size} bytes, not {expected}")
    return numpy.memmap(path, dtype=code, mode="r") if length else numpy.empty(0, dtype=code)  # an empty file can't be mapped


def remove(folder: Path) -> None:
    """Take a damaged folder away; renamed first, so that nobody sees half of it."""
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Remove what builders of this folder left that were killed: temporary folders nobody wrote to for an hour."""
    for path in folder.parent.glob(f".{folder.name}.*.tmp"):
        with contextlib.suppress(OSError):
            newest = max(entry.stat().st_mtime for entry in [path, *path.rglob("*")])
            if time.time() - newest > ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
