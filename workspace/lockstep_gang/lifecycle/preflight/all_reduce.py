"""The short all-reduce (pure): its bandwidth, and which node makes it slow.

First pairs of nodes measure it, then each node in doubt with one that is known to be good. A node is good once a pair with it was fast; it
is bad when a pair of it and a good one was slow. Every round has its deadline and there are only so many rounds, so the search ends
whatever hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep_gang.contract.preflight import Finding, Measured
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.preflight.nodes import error, warning

ROUNDS_MAX = 4


@dataclass(frozen=True)
class Measurement:
    """Result of an all-reduce over some nodes: bytes a second of bus bandwidth, 0 with an error."""

    nodes: tuple[int, ...]
    bytes_per_second: int
    error: str = ""


@dataclass(frozen=True)
class SlowNodes:
    """Nodes that are bad, and `unclear` ones: slow with everyone they were measured with, of whom nobody is known to be good."""

    bad: tuple[int, ...]
    unclear: tuple[int, ...]


def judge(nodes: int, pairs: Sequence[Measurement], minimum: int) -> SlowNodes:
    good = _good(pairs, minimum)
    slow = [set(pair.nodes) for pair in pairs if pair.bytes_per_second < minimum]
    doubtful = [node for node in range(nodes) if node not in good and any(node in pair for pair in slow)]
    bad = tuple(node for node in doubtful if any(node in pair and pair & good for pair in slow))
    return SlowNodes(bad, tuple(node for node in doubtful if node not in bad))


def next_pairs(nodes: int, pairs: Sequence[Measurement], minimum: int, rounds: int) -> tuple[tuple[int, ...], ...]:
    """The pairs of the next round, `rounds` having been made; none: nothing more can be learned."""
    if rounds == 0:
        return tuple((node, node + 1) for node in range(0, nodes - 1, 2))
    if rounds >= ROUNDS_MAX:
        return ()
    good, verdict = _good(pairs, minimum), judge(nodes, pairs, minimum)
    judged = {*good, *verdict.bad}
    doubtful = [node for node in range(nodes) if node not in judged]
    measured = {frozenset(pair.nodes) for pair in pairs}
    return _matched(doubtful, sorted(good), measured)


def _good(pairs: Sequence[Measurement], minimum: int) -> set[int]:
    return {node for pair in pairs if pair.bytes_per_second >= minimum for node in pair.nodes}


def _matched(doubtful: list[int], good: list[int], measured: set[frozenset[int]]) -> tuple[tuple[int, ...], ...]:
    """Pairs of each doubtful node with a good one of its own, as far as there are enough; without any, pairs of them other than before."""
    left, free, matches = list(doubtful), list(good), []
    while left:
        node = left.pop(0)
        partners = free if good else left
        partner = next((other for other in partners if frozenset((node, other)) not in measured), None)
        if partner is not None:
            partners.remove(partner)
            matches.append((partner, node) if good else (node, partner))
    return tuple(matches)


def busbw(measured: Measured) -> int:
    """Bytes a second that every link carries in a ring all-reduce: 2 (n - 1) / n × bytes / time."""
    return round(2 * (measured.ranks - 1) / measured.ranks * measured.bytes / (measured.microseconds / 1e6))


def judge_pairs(run: Run, whole: Measurement, pairs: Sequence[Measurement], minimum: int | None) -> list[Finding]:
    """Findings about who makes the all-reduce slow, as far as the pairs tell."""
    if minimum is None:
        fix = "look at node 0's log; without a threshold in the cluster this stops nothing"
        return [warning("allReduce", None, f"the all-reduce was not measured: {whole.error}", fix)] if whole.error else []
    if whole.bytes_per_second >= minimum:
        return []
    verdict = judge(run.nodes, pairs, minimum)
    findings = [_slow_node(run, node, pairs, minimum) for node in verdict.bad]
    if verdict.unclear or not findings:
        findings.append(_slow_together(run, verdict.unclear, whole, minimum))
    return findings


def _slow_node(run: Run, node: int, pairs: Sequence[Measurement], minimum: int) -> Finding:
    own = [pair for pair in pairs if node in pair.nodes]
    worst = min(own, key=lambda pair: pair.bytes_per_second)
    others = ", ".join(str(other) for pair in own for other in pair.nodes if other != node)
    figure = worst.error or f"{gigabytes(worst.bytes_per_second)} busbw, the cluster asks for {gigabytes(minimum)}"
    message = f"{run.node_name(node)} is slow with every node that it was paired with ({others}): {figure}"
    fix = "look at its NICs, cables and switch port; the job goes on without it where another node is free"
    return replace(error("allReduce", node, message, fix), excludes=True)


def _slow_together(run: Run, unclear: Sequence[int], whole: Measurement, minimum: int) -> Finding:
    figure = whole.error or f"{gigabytes(whole.bytes_per_second)} busbw, the cluster asks for {gigabytes(minimum)}"
    message = f"the all-reduce over {run.nodes} nodes is slow: {figure}"
    if run.nodes == 2:
        return error("allReduce", None, message, "two nodes can't tell which one it is: run preflight with a third one")
    if unclear:
        listed = ", ".join(run.node_name(node) for node in unclear[:8])
        return error("allReduce", None, f"{message}; slow in pairs, too: {listed}", "compare the cluster's threshold with nccl-tests")
    return error(
        "allReduce", None, f"{message}; every pair is fast", "look at the switches between the nodes: their uplinks are too narrow"
    )


def gigabytes(value: int) -> str:
    return f"{value / 1e9:.3g} GB/s"
