"""Commits, the chain of those that a reader may choose from, and shards on the volume that this node sees.

An attempt durably records the commit it starts from before it writes any. Readers walk those records backwards; so a late
commit of a frozen rank of an older attempt, which later attempts did not start from, is never chosen.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep_spec.codec import from_json, to_json
from lockstep_spec.files import make_directory, write_durably
from lockstep_train.base.cache import file_digest
from lockstep_train.base.errors import ConfigError, may_pass
from lockstep_train.checkpoint.format.layout import CHAIN, MANIFEST, TRASH, CommitName, parse_commit, parse_record, record_file
from lockstep_train.checkpoint.format.manifest import ShardRecord, seal, unseal


@dataclass(frozen=True)
class Claim:
    """The attempt that wants to start."""

    given: int | None
    """The attempt's number from the coordinator, or None for a run by hand."""
    job_uid: str | None


@dataclass(frozen=True)
class Record:
    """The start of one attempt."""

    attempt: int
    """Number in this folder: above every one before it."""
    given: int | None = None
    """The attempt's number from the coordinator, as in its Claim."""
    job_uid: str | None = None
    start: str | None = None
    """Name of the commit in this folder, the path of one elsewhere, or None for a fresh start."""


def candidates(commits: Iterable[CommitName], records: Iterable[Record]) -> list[CommitName]:
    """Commits on the chain of the newest attempt, newest first."""
    every = set(commits)
    by_attempt = {record.attempt: record for record in records}
    order: list[CommitName] = []
    attempt, limit = max(by_attempt, default=None), None
    while attempt is not None:
        own = [commit for commit in every if commit.attempt == attempt and (limit is None or commit.step <= limit)]
        order += sorted(own, key=lambda commit: commit.step, reverse=True)
        record = by_attempt.get(attempt)
        start = parse_commit(record.start) if record and record.start else None
        # An attempt can only have started from an older one; anything else would be a forged or damaged record.
        attempt, limit = (start.attempt, start.step) if start and start.attempt < attempt else (None, None)
    return order


def next_attempt(records: Iterable[Record], claim: Claim, used: Iterable[int] = ()) -> int:
    """This attempt's number in the folder, above every record's and every one in `used` (those of commits and of damaged records).

    Raises ConfigError for an attempt of this job that is not newer than one that already ran."""
    every = list(records)
    if claim.given is not None and claim.job_uid is not None:
        latest = max((record.given or 0 for record in every if record.job_uid == claim.job_uid), default=0)
        if claim.given <= latest:
            raise ConfigError(
                f"attempt {claim.given} of this job is not newer than attempt {latest}, which already ran here; a newer attempt must be the"
                " one to go on"
            )
    return max(claim.given or 1, 1 + max([*(record.attempt for record in every), *used], default=0))


def follows_chain(records: Iterable[Record], resume_from: str, claim: Claim) -> bool:
    """Return True if the run goes on from this folder's chain: always with `Auto`; with `None` or a path only after the job's first
    attempt.
    """
    return resume_from == "Auto" or (claim.job_uid is not None and any(record.job_uid == claim.job_uid for record in records))


MISSING = "is missing"


class Unreadable(NamedTuple):
    """Record of an attempt that can't be read now, and why."""

    attempt: int
    problem: str


@dataclass(frozen=True)
class VolumeView:
    """Commits and chain records of one volume."""

    commits: tuple[CommitName, ...] = ()
    records: tuple[Record, ...] = ()
    damaged: tuple[int, ...] = ()
    """Attempts whose record can't be read: their commits don't count, and their number is taken."""
    unreadable: tuple[Unreadable, ...] = ()
    """Those among them that may be read at another attempt."""

    @property
    def unrecorded(self) -> list[CommitName]:
        """Commits of attempts above every record: of a record that is lost."""
        newest = max((record.attempt for record in self.records), default=0)
        return [name for name in self.commits if name.attempt > newest and name.attempt not in self.damaged]


def merge_views(views: Iterable[VolumeView]) -> VolumeView:
    """Merge what is on at least one volume."""
    every = list(views)
    records = {record.attempt: record for view in every for record in view.records}
    commits = {name for view in every for name in view.commits}
    damaged = {attempt for view in every for attempt in view.damaged} - records.keys()
    unreadable = {record.attempt: record for view in every for record in view.unreadable if record.attempt not in records}
    return VolumeView(
        tuple(sorted(commits)), tuple(records[attempt] for attempt in sorted(records)), tuple(sorted(damaged)), tuple(unreadable.values())
    )


def read_view(checkpoints: Path) -> VolumeView:
    records: list[Record] = []
    damaged: list[int] = []
    unreadable: list[Unreadable] = []
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
                unreadable.append(Unreadable(attempt, f"{entry} can't be read: {getattr(error, 'strerror', None) or error}"))
    return VolumeView(tuple(commit_names(checkpoints)), tuple(records), tuple(damaged), tuple(unreadable))


def commit_names(checkpoints: Path) -> list[CommitName]:
    """Folders that hold a manifest."""
    if not checkpoints.is_dir():
        return []
    names = [parse_commit(entry.name) for entry in checkpoints.iterdir() if (entry / MANIFEST).is_file()]
    return [name for name in names if name is not None]


def read_chain(checkpoints: Path) -> list[CommitName]:
    """Commits on the chain, newest first; a damaged record is left out, which makes the chain shorter, never wrong."""
    view = read_view(checkpoints)
    return candidates(view.commits, view.records)


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
        digest = file_digest(path)
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
