"""Judgment of what nodes found (pure): each against run.json, and all against each other.

A check is a name, the cause that it stands for, and the judgment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep_gang.contract.preflight import Finding, Met
from lockstep_gang.contract.report import Cause
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.preflight import checks
from lockstep_gang.lifecycle.preflight.findings import LookedAt, NodeAnswers, error

_UNFINISHED = {
    "unresolved": ("names", "is the cluster's DNS there?"),
    "paths": ("paths", "the volume does not answer: is its server there?"),
    "volume": ("writable", "the volume does not answer: is its server there?"),
}


@dataclass(frozen=True)
class _Check:
    name: str
    cause: Cause
    judge: Callable[[NodeAnswers], Iterator[Finding]]
    applies: Callable[[Run], bool] = lambda run: True


def judge_all(run: Run, looked: Sequence[LookedAt], met: Mapping[int, Met]) -> list[Finding]:
    """Everything that is wrong, but for the all-reduce."""
    nodes = NodeAnswers(run, {node: facts for node, facts, *_ in looked}, met, skews(looked))
    findings = [finding for check in _CHECKS if check.applies(run) for finding in check.judge(nodes)]
    return [*findings, *_unfinished(nodes)]


def checks_of(run: Run) -> list[str]:
    """Names of the checks that are made of this job's nodes, but for the all-reduce."""
    return [check.name for check in _CHECKS if check.applies(run)]


def cause_of(finding: Finding) -> Cause:
    known = {check.name: check.cause for check in _CHECKS} | {"answer": Cause.NODE_LOST, "allReduce": Cause.FABRIC}
    return known[finding.check]


def skews(looked: Sequence[LookedAt]) -> dict[int, float]:
    """Seconds by which each node's clock is ahead of node 0's, by what both ends saw of one question and its answer (as NTP does)."""
    ahead = {
        node: ((facts.received_ms / 1000 - asked) + (facts.sent_ms / 1000 - at)) / 2 for node, facts, asked, at in looked if facts.sent_ms
    }
    return {node: value - ahead[0] for node, value in ahead.items()} if 0 in ahead else {}


def silent(run: Run, answered: Iterable[int], seconds: float) -> list[Finding]:
    missing = sorted(set(range(run.nodes)) - set(answered))
    fix = "look at its agent's log; if its machine hangs, delete the pod"
    return [error("answer", node, f"{run.node_name(node)} did not answer in {seconds:.0f} s", fix) for node in missing]


def _unfinished(nodes: NodeAnswers) -> Iterator[Finding]:
    for node, looked in nodes.looked.items():
        for part in looked.unfinished:
            check, fix = _UNFINISHED.get(part, ("answer", "look at its agent's log"))
            yield error(check, node, f"{nodes.name(node)} could not finish the check of {check} in time", fix)


def _has_gpus(run: Run) -> bool:
    return run.gpus_per_node > 0


def _has_rdma(run: Run) -> bool:
    return run.preflight is not None and run.preflight.rdma is not None


def _has_peers(run: Run) -> bool:
    return run.nodes > 1


_CHECKS = (
    _Check("names", Cause.SETUP, checks.names),
    _Check("peers", Cause.FABRIC, checks.peers, _has_peers),
    _Check("paths", Cause.CONFIGURATION, checks.paths),
    _Check("writable", Cause.STORAGE, checks.writable),
    _Check("shared", Cause.STORAGE, checks.shared, lambda run: run.nodes > 1 and run.storage is not None),
    _Check("space", Cause.STORAGE, checks.space),
    _Check(
        "sharedMemory", Cause.SETUP, checks.shared_memory, lambda run: run.preflight is not None and run.preflight.shm_bytes is not None
    ),
    _Check("gpus", Cause.SETUP, checks.gpus, _has_gpus),
    _Check("driver", Cause.SETUP, checks.drivers, _has_gpus),
    _Check("python", Cause.SETUP, checks.python, _has_peers),
    _Check("libraries", Cause.SETUP, checks.libraries, _has_peers),
    _Check("environment", Cause.SETUP, checks.environment, _has_peers),
    _Check("clock", Cause.SETUP, checks.clocks, _has_peers),
    _Check("lockedMemory", Cause.SETUP, checks.locked_memory, _has_rdma),
    _Check("hcas", Cause.FABRIC, checks.hcas, _has_rdma),
    _Check("rates", Cause.FABRIC, checks.rates, _has_rdma),
    _Check("gids", Cause.FABRIC, checks.gids, _has_rdma),
    _Check("mtu", Cause.FABRIC, checks.mtus, _has_rdma),
)
