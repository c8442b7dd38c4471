"""From shards to a commit: every rank acknowledges its shard in the store, and the manifest makes it count.

No collective: a slow disk delays the commit, never a peer's step. Each node's first rank writes the same manifest to the
volume it sees, so shared volumes (the writes are identical) and a volume a node both work.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lockstep_train.checkpoint.durable import write_durably
from lockstep_train.checkpoint.layout import MANIFEST
from lockstep_train.checkpoint.manifest import ShardRecord
from lockstep_train.engine.ranks import Ranks

DEADLINE = timedelta(minutes=10)
"""For every rank's shard. Nobody but the background waits for it, so a slow volume may take its time."""


@dataclass(frozen=True)
class Outcome:
    """How a save ended: committed on all nodes' volumes, or why not."""

    committed: bool
    problem: str | None = None


def acknowledge(ranks: Ranks, tag: str, shard: ShardRecord | None, problem: str | None) -> None:
    """Tell rank 0 that this rank's shard is durable, or why it isn't."""
    answer = {"shard": shard.to_json()} if shard is not None else {"problem": problem}
    ranks.store.set(f"{tag}/shard/{ranks.rank}", json.dumps(answer))


def decide(ranks: Ranks, tag: str, manifest: Callable[[Sequence[ShardRecord]], bytes], deadline: timedelta = DEADLINE) -> None:
    """On rank 0: wait for every shard, then publish the manifest, or that there will be none."""
    answers: list[dict[str, object]] = []
    end = time.monotonic() + deadline.total_seconds()
    for rank in range(ranks.world_size):
        try:
            ranks.store.wait([f"{tag}/shard/{rank}"], timedelta(seconds=max(0.001, end - time.monotonic())))
        except dist.DistStoreError:
            answers.append({"problem": f"no shard within {deadline.total_seconds():.0f} s"})
            continue
        answers.append(json.loads(ranks.store.get(f"{tag}/shard/{rank}")))
    problems = [f"rank {rank}: {answer['problem']}" for rank, answer in enumerate(answers) if "shard" not in answer]
    if problems:
        ranks.store.set(f"{tag}/decision", json.dumps({"problem": "; ".join(problems)}))
        return
    shards = [ShardRecord.from_json(answer["shard"]) for answer in answers]  # type: ignore[arg-type]
    ranks.store.set(f"{tag}/decision", json.dumps({"manifest": manifest(shards).decode()}))


def finish(ranks: Ranks, tag: str, folder: Path) -> None:
    """On each node's first rank: write the manifest, once decided, to the volume this node sees."""
    decision = json.loads(_wait(ranks, f"{tag}/decision"))
    problem = decision.get("problem")
    if problem is None:
        try:
            write_durably(folder / MANIFEST, decision["manifest"].encode())
        except OSError as error:
            problem = f"node {ranks.node}: the manifest can't be written: {error}"
    ranks.store.set(f"{tag}/written/{ranks.node}", json.dumps({"problem": problem}))


def outcome(ranks: Ranks, tag: str) -> Outcome:
    """Wait until every node's volume has the manifest."""
    problems = [json.loads(_wait(ranks, f"{tag}/written/{node}"))["problem"] for node in range(ranks.nodes)]
    first = next((problem for problem in problems if problem is not None), None)
    return Outcome(committed=first is None, problem=first)


def forget(ranks: Ranks, tag: str) -> None:
    """On rank 0, after the outcome: free the store of the records that nobody reads any more."""
    for key in [f"{tag}/decision", *[f"{tag}/shard/{rank}" for rank in range(ranks.world_size)]]:
        ranks.store.delete_key(key)


def _wait(ranks: Ranks, key: str) -> bytes:
    ranks.store.wait([key], 2 * DEADLINE)
    return ranks.store.get(key)
