"""Commit of a save: every rank acknowledges its shard in the store, and the manifest makes it count.

No collective: a slow disk delays the commit, never a peer's step. Each node's first rank writes the same manifest to the
volume it sees, so shared volumes (the writes are identical) and a volume a node both work. A wait in the store may cost a turn of
the scheduler and of the GIL beside a training that fills the processor: so all keys are waited for at once, and what a rank knows it does
not ask for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep_spec.codec import from_json, to_json
from lockstep_spec.files import why_unwritten, write_durably
from lockstep_spec.words import clauses
from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.layout import MANIFEST
from lockstep_train.checkpoint.format.manifest import ShardRecord

DEADLINE = timedelta(minutes=10)
"""Time limit for every rank's shard. Nobody but the background waits for it, so a slow volume may take its time."""


@dataclass(frozen=True)
class Outcome:
    """End of a save: committed on all nodes' volumes, or why not."""

    committed: bool
    problem: str | None = None


@dataclass(frozen=True)
class Decision:
    """Decision of rank 0 once it has heard of all shards: the manifest to write, or why there is none."""

    manifest: str | None = None
    problem: str | None = None
    answered: bool = True
    """True if every rank has said how its writing ended. A rank writes one save at a time, so none is at work in this folder or an earlier
    one.
    """


def acknowledge(ranks: Ranks, tag: str, shard: ShardRecord | None, problem: str | None) -> None:
    """Tell rank 0 that this rank's shard is durable, or why it isn't."""
    answer = {"shard": to_json(shard)} if shard is not None else {"problem": problem, "node": ranks.node}
    ranks.store.set(f"{tag}/shard/{ranks.rank}", json.dumps(answer))


def decide(ranks: Ranks, tag: str, manifest: Callable[[Sequence[ShardRecord]], bytes], deadline: timedelta = DEADLINE) -> Decision:
    """Wait, on rank 0, for every shard, then publish the manifest, or that there will be none."""
    keys = [f"{tag}/shard/{rank}" for rank in range(ranks.world_size)]
    answered = True
    try:
        ranks.store.wait(keys, deadline)
    except dist.DistStoreError:
        answered = ranks.store.check(keys)
        late = {"problem": f"no shard within {deadline.total_seconds():.0f} s, or its word was deleted from rank 0's store"}
        answers: list[dict[str, Any]] = [json.loads(ranks.store.get(key)) if ranks.store.check([key]) else late for key in keys]
    else:
        answers = [json.loads(answer) for answer in ranks.store.multi_get(keys)]
    problems = [_problem(rank, answer) for rank, answer in enumerate(answers) if "shard" not in answer]
    if problems:
        decision = Decision(problem=clauses(problems), answered=answered)
    else:
        decision = Decision(manifest(tuple(from_json(ShardRecord, answer["shard"], "shard") for answer in answers)).decode())
    if ranks.nodes > 1:
        ranks.store.set(f"{tag}/decision", json.dumps(asdict(decision)))
    return decision


def _problem(rank: int, answer: dict[str, Any]) -> str:
    """Describe a rank's problem; one that never answered has no node."""
    where = f" on node {answer['node']}" if "node" in answer else ""
    return f"rank {rank}{where}: {answer['problem']}"


def await_decision(ranks: Ranks, tag: str) -> Decision:
    """Wait, on the other nodes' first ranks, for what rank 0 has decided."""
    return Decision(**json.loads(_wait(ranks, [f"{tag}/decision"])[0]))


def write_manifest(ranks: Ranks, tag: str, folder: Path, decision: Decision) -> Outcome:
    """Write the manifest, once decided, on each node's first rank, to the volume this node sees."""
    problem = decision.problem
    if decision.manifest is not None:
        try:
            write_durably(folder / MANIFEST, decision.manifest.encode())
        except OSError as error:
            problem = f"node {ranks.node}: the manifest can't be written: {why_unwritten(error, folder)}"
    ranks.store.set(f"{tag}/written/{ranks.node}", json.dumps(problem))
    return Outcome(committed=problem is None, problem=problem)


def await_outcome(ranks: Ranks, tag: str, here: Outcome | None) -> Outcome:
    """Wait until every node's volume has the manifest. `here`: how it ended on this rank's node, where this rank has written it."""
    others = [f"{tag}/written/{node}" for node in range(ranks.nodes) if here is None or node != ranks.node]
    problems = [json.loads(answer) for answer in _wait(ranks, others)] if others else []
    every = [here.problem if here is not None else None, *problems]
    first = next((problem for problem in every if problem is not None), None)
    return Outcome(committed=first is None, problem=first)


def written_nowhere(ranks: Ranks, tag: str) -> bool:
    """Return True if every node has said that it has no manifest of this save. Waits for none of them."""
    keys = [f"{tag}/written/{node}" for node in range(ranks.nodes)]
    return ranks.store.check(keys) and all(json.loads(answer) is not None for answer in ranks.store.multi_get(keys))


def forget(ranks: Ranks, tag: str) -> None:
    """Free the store, on rank 0 and after the outcome, of the records that nobody reads any more."""
    for key in [f"{tag}/decision", *[f"{tag}/shard/{rank}" for rank in range(ranks.world_size)]]:
        ranks.store.delete_key(key)


def _wait(ranks: Ranks, keys: list[str]) -> list[bytes]:
    ranks.store.wait(keys, 2 * DEADLINE)
    return ranks.store.multi_get(keys)
