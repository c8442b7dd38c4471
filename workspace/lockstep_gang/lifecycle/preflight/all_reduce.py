"""The short all-reduce: its bandwidth, and who makes it slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep_gang.contract.preflight import Finding, Measured
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.preflight.findings import LookedAt, error, warning, where
from lockstep_gang.lifecycle.preflight.pairs import Measurement, judge


def busbw(measured: Measured) -> int:
    """Bytes a second that every link carries in a ring all-reduce: 2 (n - 1) / n × bytes / time."""
    return round(2 * (measured.ranks - 1) / measured.ranks * measured.bytes / (measured.microseconds / 1e6))


def why_not_measured(looked: Sequence[LookedAt]) -> list[Finding]:
    """torch is asked for only where it is: a script's image need not have it."""
    lacking = [node for node, facts, *_ in looked if "torch" not in facts.versions]
    fix = "install torch in the image, or set preflight.mode to Basic"
    return [warning("allReduce", node, f"node {node} has no torch: the all-reduce was left out", fix) for node in lacking[:1]]


def judge_pairs(run: Run, whole: Measurement, pairs: Sequence[Measurement], minimum: int | None) -> list[Finding]:
    """Who makes the all-reduce slow, as far as the pairs tell."""
    if minimum is None:
        fix = "look at node 0's log; without a threshold in the cluster this stops nothing"
        return [warning("allReduce", None, f"the all-reduce was not measured: {whole.error}", fix)] if whole.error else []
    if whole.bytes_per_second >= minimum:
        return []
    verdict = judge(run.nodes, pairs, minimum)
    found = [_slow_node(run, node, pairs, minimum) for node in verdict.bad]
    if verdict.unclear or not found:
        found.append(_slow_together(run, verdict.unclear, whole, minimum))
    return found


def _slow_node(run: Run, node: int, pairs: Sequence[Measurement], minimum: int) -> Finding:
    own = [pair for pair in pairs if node in pair.nodes]
    worst = min(own, key=lambda pair: pair.bytes_per_second)
    others = ", ".join(str(other) for pair in own for other in pair.nodes if other != node)
    seen = worst.error or f"{gigabytes(worst.bytes_per_second)} busbw, the cluster asks for {gigabytes(minimum)}"
    message = f"{where(run, node)} is slow with every node that it was paired with ({others}): {seen}"
    fix = "look at its NICs, cables and switch port; the job goes on without it where another node is free"
    return replace(error("allReduce", node, message, fix), excludes=True)


def _slow_together(run: Run, unclear: Sequence[int], whole: Measurement, minimum: int) -> Finding:
    seen = whole.error or f"{gigabytes(whole.bytes_per_second)} busbw, the cluster asks for {gigabytes(minimum)}"
    message = f"the all-reduce over {run.nodes} nodes is slow: {seen}"
    if run.nodes == 2:
        return error("allReduce", None, message, "two nodes can't tell which one it is: run preflight with a third one")
    if unclear:
        listed = ", ".join(where(run, node) for node in unclear[:8])
        return error("allReduce", None, f"{message}; slow in pairs, too: {listed}", "compare the cluster's threshold with nccl-tests")
    return error(
        "allReduce", None, f"{message}; every pair is fast", "look at the switches between the nodes: their uplinks are too narrow"
    )


def gigabytes(value: int) -> str:
    return f"{value / 1e9:.3g} GB/s"
