"""Commits made without a model, for tests of what reads them."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import torch

from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.identity import Identity
from lockstep_train.checkpoint.format.layout import MANIFEST, parse_commit, shard_file
from lockstep_train.checkpoint.format.manifest import FragmentRecord, Manifest, ShardRecord, encode
from lockstep_train.checkpoint.format.volume import Claim

CLAIM = Claim(None, None)
RANKS = 2
ELEMENTS = 100


def lone_rank(store: Any) -> Ranks:
    return Ranks(0, 1, 0, 1, 0, 1, torch.device("cpu"), store)


def write_commit(checkpoints: Path, name: str) -> None:
    """A commit of two ranks with one parameter; its shards hold any bytes, since only checksums are looked at."""
    commit = parse_commit(name)
    folder = checkpoints / name
    folder.mkdir()
    shards = []
    for rank in range(RANKS):
        content = random.Random(f"{name} {rank}").randbytes(1200)  # noqa: S311 (sample bytes)
        (folder / shard_file(rank, RANKS)).write_bytes(content)
        record = FragmentRecord("weight", (RANKS * ELEMENTS,), rank * ELEMENTS, ELEMENTS)
        shards.append(ShardRecord(shard_file(rank, RANKS), len(content), hashlib.sha256(content).hexdigest(), (record,), (0,)))
    manifest = Manifest(
        step=commit.step,
        attempt=commit.attempt,
        job="mutated",
        job_uid=None,
        world_size=RANKS,
        zero_stage="Stage2",
        precision="FP32",
        base_model="base",
        identity=Identity(base="", parameters="", dataset="", seed=1, global_batch_size=1),
        samples_consumed=commit.step,
        optimizer_step=commit.step,
        eval_loss_before=None,
        adapter={"config": {}, "names": {}},
        shards=tuple(shards),
    )
    (folder / MANIFEST).write_bytes(encode(manifest))
