"""An all-reduce sweep as a job, and what its lines say (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from lockstep.api import names
from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.files.clusterkeys import Calibration, MeasuredOver, PairsFigure
from lockstep.api.job import TrainingJob
from lockstep.api.shared import FabricMode
from lockstep.plan.cluster.pairs import PairsMeasured
from lockstep_gang.contract.preflight import SWEEP, SWEEP_DONE, SWEEP_POINT

JOB = "lockstep-calibrate"
MIB = 2**20
LEAST_BYTES = MIB
MOST_GPU_BYTES, MOST_CPU_BYTES = 2**30, 16 * MIB
PREFLIGHT_GPU_BYTES, PREFLIGHT_CPU_BYTES = 256 * MIB, 8 * MIB
"""Sizes of preflight's all-reduce, which its threshold is compared at."""
THRESHOLD_PART = 0.8
"""Part of the measured bandwidth that a healthy fabric always reaches, and one with a missing NIC never does."""


@dataclass(frozen=True)
class Point:
    """One size."""

    bytes: int
    microseconds: int
    ranks: int

    @property
    def algorithm_gbs(self) -> float:
        """Decimal GB/s of algorithm bandwidth: bytes over time."""
        return self.bytes / self.microseconds / 1e3

    @property
    def bus_gbs(self) -> float:
        """Decimal GB/s of bus bandwidth: 2 (n - 1) / n × bytes / time, comparable between numbers of ranks."""
        return 2 * (self.ranks - 1) / self.ranks * self.algorithm_gbs


@dataclass(frozen=True)
class Sweep:
    """Points that were measured, and over what."""

    points: tuple[Point, ...]
    transport: str
    nodes: int


def sweep_job(profile: TrainingClusterSpec, nodes: int | None, mode: FabricMode) -> TrainingJob:
    """A job whose script is the sweep in the agent's own file: nothing has to be synced, and no claim is needed."""
    most = MOST_GPU_BYTES if profile.gpus.per_node else MOST_CPU_BYTES
    arguments = [SWEEP, "--least", str(LEAST_BYTES), "--most", str(most)]
    spec = {
        "nodes": nodes or profile.gpus.default_nodes,
        "script": {"path": names.AGENT_PATH, "args": arguments},
        "fabric": {"mode": mode.value},
        "storage": {"mode": "PerPod"},
        "restart": {"maxRestarts": 0},
        "preflight": "Basic",
    }
    return TrainingJob.model_validate({"metadata": {"name": JOB}, "spec": spec})


def point_in(line: str) -> Point | None:
    """One size, where this line of node 0's log has it."""
    _, mark, text = line.partition(SWEEP_POINT)
    if not mark:
        return None
    try:
        values = json.loads(text)
        point = Point(int(values["bytes"]), int(values["microseconds"]), int(values["ranks"]))
    except (ValueError, KeyError, TypeError, RecursionError):  # (somebody else's line)
        return None
    return point if min(point.bytes, point.microseconds, point.ranks) > 0 else None


def is_done(line: str) -> bool:
    return line.endswith(SWEEP_DONE)


def calibration_of(points: Sequence[Point], transport: str, nodes: int, day: str) -> Calibration:
    """`day` as 2026-11-21."""
    sweep = [{"bytes": point.bytes, "busbw": _rounded(point.bus_gbs, 4)} for point in points]
    return Calibration.model_validate({"transport": transport, "nodes": nodes, "ranks": points[0].ranks, "day": day, "sweep": sweep})


def suggested_threshold(points: Sequence[Point], *, gpus: bool) -> str | None:
    """Value for network.minimum_busbw, at the size that preflight takes; None: the sweep didn't get there."""
    size = PREFLIGHT_GPU_BYTES if gpus else PREFLIGHT_CPU_BYTES
    point_at_size = next((point for point in points if point.bytes == size), None)
    return None if point_at_size is None else _rounded(point_at_size.bus_gbs * THRESHOLD_PART, 2)


def _rounded(value: float, digits: int) -> str:
    """Round to so many significant digits, and write it without an exponent."""
    return f"{float(f'{value:.{digits}g}'):.6f}".rstrip("0").rstrip(".")


HEADINGS = {
    "calibration": (
        "# Measured by `lockstep cluster calibrate`: bus bandwidth in decimal GB/s, 2 (n - 1) / n × bytes / time with n = ranks."
    ),
    "pairs": "# Measured by `lockstep cluster calibrate --pairs`: decimal Gb/s from one node to another.",
}
"""Line above each section of measurements."""


def with_section(text: str, key: str, measured: Sequence[Calibration | PairsFigure]) -> str:
    """The cluster file's text with this section of measurements instead of the one that it has, or at its end; every other line as it
    was.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if re.match(rf"{key}\s*:", line)), None)
    before, after = (lines, []) if start is None else (lines[:start], lines[_end(lines, start) :])
    while before and (not before[-1].strip() or before[-1] == HEADINGS[key]):
        before.pop()
    rest = ["", *after] if after and after[0].strip() else after
    entries = (line for one in measured for line in _entry(one))
    return "\n".join([*before, "", HEADINGS[key], f"{key}:", *entries, *rest]) + "\n"


def _end(lines: Sequence[str], start: int) -> int:
    """Number of the line behind the section: comments and blank lines before the next key belong to that."""
    following = [number for number, line in enumerate(lines) if number > start and re.match(r"[^\s#-]", line)]
    end = following[0] if following else len(lines)
    while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1
    return end


def _entry(one: Calibration | PairsFigure) -> list[str]:
    """Lines of one measurement."""
    lines, day = [f"  - transport: {one.transport.value}", f"    nodes: {one.nodes}"], f'    day: "{one.day}"'
    if isinstance(one, PairsFigure):
        return [*lines, day, f'    least_gigabits: "{one.least_gigabits}"', f'    usual_gigabits: "{one.usual_gigabits}"']
    points = (f'      - {{bytes: {point.bytes}, busbw: "{point.busbw}"}}' for point in one.sweep)
    return [*lines, f"    ranks: {one.ranks}", day, "    sweep:", *points]


def pairs_figure(measured: PairsMeasured, day: str) -> PairsFigure:
    """`day` as 2026-11-21."""
    transport = MeasuredOver.RDMA if measured.by_rdma else MeasuredOver.TCP
    rates = {"leastGigabits": _rounded(measured.least_gbs(), 4), "usualGigabits": _rounded(measured.usual_gbs(), 4)}
    return PairsFigure.model_validate({"transport": transport, "nodes": len(measured.nodes), "day": day, **rates})


S = TypeVar("S", Calibration, PairsFigure)


def replaced(earlier: Sequence[S], new: S) -> list[S]:
    """Measurements with the new one instead of the one of its transport."""
    measured = {one.transport: one for one in earlier} | {new.transport: new}
    return [measured[transport] for transport in sorted(measured)]
