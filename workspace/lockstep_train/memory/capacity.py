"""Memory that a rank has, of its device and of its host, and the host memory for the copy that saves are written from, taken before the
first step.

Where a node has too little for that copy, the kernel would end a rank at its first save, before anything is committed, and so in every
attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep_machine.limits import control_groups, memory_limit
from lockstep_machine.readings import byte_sizes
from lockstep_spec.memory import RUNTIME_BYTES
from lockstep_spec.words import decimal_size
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.ranks import Ranks, refused_together
from lockstep_train.checkpoint.save.save import Saver

if TYPE_CHECKING:
    import torch


def device_bytes(device: torch.device, ranks_per_node: int) -> int | None:
    """All of a GPU's memory, or this rank's share of the memory that its container or machine has; None when nothing says it."""
    if device.type == "cuda":
        import torch

        total = int(torch.cuda.get_device_properties(device).total_memory)
        return total // ranks_per_node if has_host_memory(device) else total
    host = host_bytes()
    return None if host is None else host // ranks_per_node


def has_host_memory(device: torch.device) -> bool:
    """Return True for a GPU that is built into the processor and has no memory of its own."""
    if device.type != "cuda":
        return False
    import torch

    return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def is_crowded(device: torch.device) -> bool:
    """Return True for a GPU of which another process holds more memory than this one's CUDA context takes."""
    if device.type != "cuda":
        return False
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) > RUNTIME_BYTES[True]


def host_bytes(root: Path = Path("/")) -> int | None:
    """The least of the machine's memory and of every limit of this process's control groups, version 1 and 2."""
    groups = control_groups("memory", root / "sys/fs/cgroup", root / "proc/self/cgroup")
    limits = [byte_sizes(root / "proc/meminfo").get("MemTotal"), *map(memory_limit, groups)]
    return min((limit for limit in limits if limit is not None), default=None)


def own_bytes(rollup: Path = Path("/proc/self/smaps_rollup")) -> int:
    """Memory that this process alone has and no file can give back, its part of what it shares; 0 when nothing says it."""
    return int(byte_sizes(rollup).get("Pss_Anon", 0))


REMEDY = (
    "raise spec.resources.memory, or without it the cluster's resources.limits.memory, put fewer ranks on a node, or set"
    " training.checkpoint.content to Lite"
)


@dataclass(frozen=True)
class MemoryNeed:
    """Memory that one rank holds and needs."""

    node: int
    limit_bytes: int | None
    """Limit of its node's ranks together; None: not known."""
    held_bytes: int
    copy_bytes: int


def reserve_copy(saver: Saver, engine: Any, ranks: Ranks) -> None:
    """Take the copy's memory, on every rank. A collective through the store. Raises ConfigError, on every rank, when a node has too
    little.
    """
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
                f"node {node} has {decimal_size(min(limits))} of host memory, of which its {whose} {decimal_size(held)}, and the copies"
                f" that saves are written from need {decimal_size(copies)} more; {REMEDY}"
            )
    return None


def _take(saver: Saver, engine: Any, ranks: Ranks) -> str | None:
    try:
        saver.reserve(engine)
    except (MemoryError, OSError) as error:
        size = decimal_size(saver.copy_bytes(engine))
        return (
            f"rank {ranks.rank} on node {ranks.node} can't get {size} of host memory for the copy that saves are written from: {error};"
            f" {REMEDY}"
        )
    return None
