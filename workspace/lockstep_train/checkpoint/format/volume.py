"""Commits, chain records and shards on the volume that this node sees."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep_spec.codec import from_json, to_json
from lockstep_train.base.durable import make_directory, write_durably
from lockstep_train.base.errors import may_pass
from lockstep_train.checkpoint.format.chain import Record
from lockstep_train.checkpoint.format.layout import CHAIN, MANIFEST, TRASH, CommitName, parse_commit, parse_record, record_file
from lockstep_train.checkpoint.format.manifest import ShardRecord
from lockstep_train.checkpoint.format.seal import seal, unseal

MISSING = "is missing"


@dataclass(frozen=True)
class VolumeView:
    """Commits and chain records of one volume."""

    commits: list[CommitName]
    records: list[Record]
    damaged: list[int]
    """Attempts whose record can't be read: their commits don't count, and their number is taken."""
    unreadable: Mapping[int, str] = field(default_factory=dict)
    """Attempts among them whose record may be read at another attempt, and why it can't be now."""

    @property
    def unrecorded(self) -> list[CommitName]:
        """Commits of attempts above every record: of a record that is lost."""
        newest = max((record.attempt for record in self.records), default=0)
        return [name for name in self.commits if name.attempt > newest and name.attempt not in self.damaged]

    def to_json(self) -> dict[str, Any]:
        records = [to_json(record) for record in self.records]
        unreadable = [[attempt, problem] for attempt, problem in self.unreadable.items()]
        return {"commits": [str(name) for name in self.commits], "records": records, "damaged": self.damaged, "unreadable": unreadable}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> VolumeView:
        commits = [name for name in map(parse_commit, value["commits"]) if name is not None]
        return VolumeView(
            commits, [from_json(Record, record, "record") for record in value["records"]], list(value["damaged"]), dict(value["unreadable"])
        )


def merge_views(views: Iterable[VolumeView]) -> VolumeView:
    """Merge what is on at least one volume."""
    every = list(views)
    records = {record.attempt: record for view in every for record in view.records}
    commits = {name for view in every for name in view.commits}
    damaged = {attempt for view in every for attempt in view.damaged}
    unreadable = {attempt: problem for view in every for attempt, problem in view.unreadable.items() if attempt not in records}
    return VolumeView(sorted(commits), [records[attempt] for attempt in sorted(records)], sorted(damaged - records.keys()), unreadable)


def read_view(checkpoints: Path) -> VolumeView:
    records: list[Record] = []
    damaged: list[int] = []
    unreadable: dict[int, str] = {}
    folder = checkpoints / CHAIN
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        attempt = parse_record(entry.name)
        if attempt is None:
            continue
        try:
            record = from_json(Record, unseal(entry.read_bytes()), "record")
            if record.attempt != attempt:
                raise ValueError("it is another attempt's")
            records.append(record)
        except (OSError, ValueError) as error:
            damaged.append(attempt)
            if may_pass(error):
                unreadable[attempt] = f"{entry} can't be read: {getattr(error, 'strerror', None) or error}"
    return VolumeView(commit_names(checkpoints), records, damaged, unreadable)


def commit_names(checkpoints: Path) -> list[CommitName]:
    """Folders that hold a manifest."""
    if not checkpoints.is_dir():
        return []
    names = [parse_commit(entry.name) for entry in checkpoints.iterdir() if (entry / MANIFEST).is_file()]
    return [name for name in names if name is not None]


def read_records(checkpoints: Path) -> list[Record]:
    """The chain's records; a damaged one is left out, which makes the chain shorter, never wrong."""
    return read_view(checkpoints).records


def write_record(checkpoints: Path, record: Record) -> None:
    """Write the record durably: no commit of the attempt may exist without it."""
    make_directory(checkpoints / CHAIN)
    write_durably(checkpoints / CHAIN / record_file(record.attempt), seal(to_json(record)))


def size_problem(folder: Path, shard: ShardRecord) -> str | None:
    """Problem of a shard by its file's name and size alone; else as `shard_problem`."""
    path = folder / shard.file
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} {MISSING}"
    except OSError as error:
        return f"{path} can't be read: {error.strerror or error}"
    return None if size == shard.bytes else f"{path} has {size} bytes, not {shard.bytes}"


def shard_problem(folder: Path, shard: ShardRecord) -> str | None:
    """Problem for which a shard can't be used; None when its size and checksum are what the manifest says."""
    path = folder / shard.file
    problem = size_problem(folder, shard)
    if problem is not None:
        return problem
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{path} {MISSING}"
    except OSError as error:
        return f"{path} can't be read: {error.strerror or error}"
    return None if digest == shard.sha256 else f"{path} is damaged: its checksum is not the manifest's"


def sweep(checkpoints: Path, committed: Collection[CommitName]) -> None:
    """Remove what an earlier attempt left half-written or half-deleted. Only before any rank writes.

    `committed`: commits on any node's volume. Where a manifest couldn't be written, the shards beside it may still be needed.
    """
    for entry in checkpoints.iterdir() if checkpoints.is_dir() else []:
        name = parse_commit(entry.name)
        unfinished = name is not None and name not in committed and not (entry / MANIFEST).exists()
        if unfinished or entry.name.startswith(TRASH):
            shutil.rmtree(entry, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove a folder that is no commit. The name goes first, so that whoever comes late finds no place to write to."""
    trash = folder.with_name(f"{TRASH}{folder.name}")
    with contextlib.suppress(OSError):
        folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)
