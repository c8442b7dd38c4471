"""Host memory for the copy that saves are written from, taken before the first step.

Where a node has too little, the kernel would end a rank at its first save, before anything is committed, and so in every attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep_spec.words import decimal_size
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.ranks import Ranks, refused_together
from lockstep_train.checkpoint.save.save import Saver
from lockstep_train.memory.capacity import host_bytes, own_bytes

REMEDY = "raise the pods' resources.limits.memory, put fewer ranks on a node, or set training.checkpoint.content to Lite"


@dataclass(frozen=True)
class MemoryNeed:
    """Memory that one rank holds and needs."""

    node: int
    limit_bytes: int | None
    """Limit of its node's ranks together; None: not known."""
    held_bytes: int
    copy_bytes: int


def reserve_copy(saver: Saver, engine: Any, ranks: Ranks) -> None:
    """Take the copy's memory, on every rank. A collective through the store. Raises ConfigError, on every rank, when a node has too little."""
    answers = ranks.gather("save-memory/needs", [ranks.node, host_bytes(), own_bytes(), saver.copy_bytes(engine)])
    problem = ranks.publish("save-memory/shortage", shortage([MemoryNeed(*one) for one in answers]) if answers is not None else None)
    if problem is None:
        failures = ranks.gather("save-memory/taken", _take(saver, engine, ranks))
        problem = ranks.publish("save-memory/failure", next((failure for failure in failures or [] if failure is not None), None))
    if problem is not None:
        with refused_together(ranks, "save-memory"):
            raise ConfigError(problem)


def shortage(needs: Sequence[MemoryNeed]) -> str | None:
    """Reason why the copies have no room beside what the ranks of a node hold now, for the first node of which that is certain."""
    for node in sorted({need.node for need in needs}):
        mine = [need for need in needs if need.node == node]
        limits = [need.limit_bytes for need in mine if need.limit_bytes is not None]
        held, copies = sum(need.held_bytes for need in mine), sum(need.copy_bytes for need in mine)
        if limits and held + copies > min(limits):
            whose = f"{len(mine)} ranks hold" if len(mine) > 1 else "rank holds"
            return (
                f"node {node} has {decimal_size(min(limits))} of host memory, of which its {whose} {decimal_size(held)}, and the copies that "
                f"saves are written from need {decimal_size(copies)} more; {REMEDY}"
            )
    return None


def _take(saver: Saver, engine: Any, ranks: Ranks) -> str | None:
    try:
        saver.reserve(engine)
    except (MemoryError, OSError) as error:
        size = decimal_size(saver.copy_bytes(engine))
        return f"rank {ranks.rank} on node {ranks.node} can't get {size} of host memory for the copy that saves are written from: {error}; {REMEDY}"
    return None
