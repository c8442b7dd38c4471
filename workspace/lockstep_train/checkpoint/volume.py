"""What is on the volume this node sees: commits, chain records, shards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from pathlib import Path

from lockstep_train.checkpoint.chain import Record, candidates
from lockstep_train.checkpoint.durable import make_directory, sync_directory, write_durably
from lockstep_train.checkpoint.layout import CHAIN, MANIFEST, CommitName, parse_commit, parse_record, record_file
from lockstep_train.checkpoint.manifest import ShardRecord

NEVER_ROTATED = 2


def list_commits(checkpoints: Path) -> list[CommitName]:
    """Folders that hold a manifest."""
    if not checkpoints.is_dir():
        return []
    names = [parse_commit(entry.name) for entry in checkpoints.iterdir() if (entry / MANIFEST).is_file()]
    return [name for name in names if name is not None]


def read_records(checkpoints: Path) -> list[Record]:
    """The chain's records; a damaged one is left out, which makes the chain shorter, never wrong."""
    folder = checkpoints / CHAIN
    records: list[Record] = []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if parse_record(entry.name) is not None:
            with contextlib.suppress(OSError, ValueError):
                records.append(Record.from_json(json.loads(entry.read_text())))
    return records


def write_record(checkpoints: Path, record: Record) -> None:
    """Durable before this returns: no commit of the attempt may exist without it."""
    make_directory(checkpoints / CHAIN)
    write_durably(checkpoints / CHAIN / record_file(record.attempt), json.dumps(record.to_json()).encode())


def shard_problem(folder: Path, shard: ShardRecord) -> str | None:
    """Why the shard can't be used, or None: its size and checksum are what the manifest says."""
    path = folder / shard.file
    try:
        size = path.stat().st_size
        if size != shard.bytes:
            return f"{path} has {size} bytes, not {shard.bytes}"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} can't be read: {error.strerror}"
    return None if digest == shard.sha256 else f"{path} is damaged: its checksum is not the manifest's"


def rotate(checkpoints: Path, keep: int) -> list[CommitName]:
    """Delete the oldest commits of the chain beyond `keep`, never one of the newest two; returns what was deleted.

    Several nodes may do this at once on a shared volume, so a folder that is already gone is no error.
    """
    chain = candidates(list_commits(checkpoints), read_records(checkpoints))
    doomed = chain[max(keep, NEVER_ROTATED) :]
    for name in doomed:
        trash = checkpoints / f".trash-{name}"
        with contextlib.suppress(FileNotFoundError):
            (checkpoints / str(name)).rename(trash)  # first the name: a half-deleted folder must not look like a commit
            sync_directory(checkpoints)
        shutil.rmtree(trash, ignore_errors=True)
    return doomed


def sweep(checkpoints: Path) -> None:
    """Remove what an earlier attempt left half-written or half-deleted. Only before any rank writes."""
    for entry in checkpoints.iterdir() if checkpoints.is_dir() else []:
        unfinished = parse_commit(entry.name) is not None and not (entry / MANIFEST).exists()
        if unfinished or entry.name.startswith(".trash-"):
            shutil.rmtree(entry, ignore_errors=True)
