"""Place of this process among the ranks, from torchrun's and the agent's variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep_train.base.errors import ConfigError


@dataclass(frozen=True)
class RankEnvironment:
    """Place of this process among the ranks, in torchrun's variables; a lone process is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    """The node's number, which stays when ranks are ordered otherwise at the next start: a volume of its own belongs to it."""
    nodes: int
    master_address: str
    master_port: int
    attempt: int | None
    """The attempt's number, or None when nobody counts (run by hand): the next free one is taken."""
    report_socket: str | None
    gpus_per_node: int
    """GPUs that each node holds for the run; 0: it trains on CPUs, or nobody says."""


def ignored_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A line for each variable that people set and nothing reads."""
    values = os.environ if environ is None else environ
    if "NCCL_TIMEOUT" not in values:
        return []
    return [
        f"NCCL_TIMEOUT={values['NCCL_TIMEOUT']} has no effect: neither NCCL nor PyTorch reads it; set training.limits.collectiveTimeoutSeconds"
    ]


def rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Read torchrun's and the agent's variables. Raises ConfigError for a value that is no number."""
    values = os.environ if environ is None else environ

    def number(name: str, default: str) -> int:
        text = values.get(name, default)
        if not text.isdigit():
            raise ConfigError(f"the environment variable {name} is {text!r}, but must be a whole number")
        return int(text)

    return RankEnvironment(
        rank=number("RANK", "0"),
        world_size=number("WORLD_SIZE", "1"),
        local_rank=number("LOCAL_RANK", "0"),
        local_world_size=number("LOCAL_WORLD_SIZE", values.get("WORLD_SIZE", "1")),
        node=number("LOCKSTEP_NODE", values.get("GROUP_RANK", "0")),
        nodes=number("GROUP_WORLD_SIZE", "1"),
        master_address=values.get("MASTER_ADDR", "127.0.0.1"),
        master_port=number("MASTER_PORT", "0"),
        attempt=number("LOCKSTEP_ATTEMPT", "1") if "LOCKSTEP_ATTEMPT" in values else None,
        report_socket=values.get("LOCKSTEP_REPORT_SOCKET"),
        gpus_per_node=number("GPUS_PER_NODE", "0"),
    )
