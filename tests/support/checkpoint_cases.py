"""Commits, manifests and records for tests, without a rank and without torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from lockstep_train.checkpoint.format.identity import Identity
from lockstep_train.checkpoint.format.layout import MANIFEST, CommitName, parse_commit, shard_file
from lockstep_train.checkpoint.format.manifest import FragmentRecord, Manifest, ShardRecord, encode
from lockstep_train.checkpoint.format.volume import Record

IDENTITY = Identity("base", "parameters", "data", 42, 32, {"lora.rank": 16, "lora.targetModules": ["k_proj", "q_proj"]})


def record(attempt: int, start: str | None = None, given: int | None = None, uid: str | None = None) -> Record:
    return Record(attempt, given, uid, start)


def commits(*names: str) -> list[CommitName]:
    return [name for name in map(parse_commit, names) if name is not None]


def names(found: list[CommitName]) -> list[str]:
    return [str(name) for name in found]


def manifest(*shards: ShardRecord) -> Manifest:
    return Manifest(
        step=100, attempt=2, job="x", job_uid=None, world_size=len(shards), zero_stage="Stage2", precision="BF16", base_model="/m",
        identity=IDENTITY, samples_consumed=3200, optimizer_step=100, eval_loss_before="2.0",
        adapter={"config": {"r": 16}, "names": {"w": "w"}}, shards=shards,
    )  # fmt: skip


def make_commit(checkpoints: Path, name: str, eval_loss: float | None = None, ranks: int = 1) -> Path:
    """A whole commit: each rank has an equal part of the one parameter `w`, in a file of bytes that no reader here looks into."""
    parsed = commits(name)[0]
    folder = checkpoints / name
    folder.mkdir(parents=True)
    shards = []
    for rank in range(ranks):
        content = json.dumps([name, rank]).encode()
        (folder / shard_file(rank, ranks)).write_bytes(content)
        fragments = (FragmentRecord("w", (ranks,), rank, 1),)
        shards.append(ShardRecord(shard_file(rank, ranks), len(content), hashlib.sha256(content).hexdigest(), fragments, (rank,)))
    whole = replace(manifest(*shards), step=parsed.step, attempt=parsed.attempt, eval_loss=eval_loss, eval_step=parsed.step)
    (folder / MANIFEST).write_bytes(encode(whole))
    return folder
