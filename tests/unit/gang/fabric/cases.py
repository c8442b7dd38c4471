"""What the tests of the fabric share: logs of tests/fabric_logs read as ranks, and runs that ask for something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep_gang.contract.fabric import FabricAsked, FabricReport, RankFabric
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.fabric.nccl import read_line
from lockstep_gang.lifecycle.fabric.verdict import verdict
from support.checkout import ROOT
from unit.gang.cases import make_run

LOGS = ROOT / "tests" / "fabric_logs"


def read(name: str, rank: int = 0) -> RankFabric:
    """A rank whose whole log is this file of tests/fabric_logs."""
    known = RankFabric(rank)
    for line in (LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines():
        known = read_line(known, line)
    return known


def gpu_run(transport: str = "RDMA", nodes: int = 2, ranks: int = 4, **asked: Any) -> Run:
    return make_run(nodes=nodes, ranks_per_node=ranks, gpus_per_node=ranks, fabric=FabricAsked(transport, **asked))


def all_ranks(run: Run, *names: str) -> tuple[RankFabric, ...]:
    """Every rank of node i has the log `names[i]`; the last name serves all further nodes."""
    return tuple(read(names[min(run.node_of(rank), len(names) - 1)], rank) for rank in range(run.world_size))


def judged(run: Run, *names: str) -> FabricReport:
    found = verdict(run, all_ranks(run, *names))
    assert found is not None
    return found


def without_traffic(rank: RankFabric) -> RankFabric:
    return replace(rank, traffic=(), inside=())
