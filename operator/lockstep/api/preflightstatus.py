"""status.preflight: the result of the last preflight."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lockstep.api.statuspart import Count, StatusPart, Text, Time
from lockstep_spec.codec import WORD_CHARACTERS

FINDINGS_MAX = 20


class PreflightFinding(StatusPart):
    """One check that a node did not pass."""

    check: Annotated[str, Field(max_length=64)]
    """Name of the check: docs/how-to/preflight.md has the table."""
    severity: Annotated[str, Field(max_length=WORD_CHARACTERS)]
    """Error or Warning. An Error stops the start, a Warning doesn't."""
    node: Count | None = None
    """The node's index in the job. Left out: it is about several nodes together."""
    node_name: Text | None = None
    """The Node that its pod runs on."""
    message: Text
    """Observation."""
    fix: Text
    """Fix to apply."""


class AllReduceStatus(StatusPart):
    """The bandwidth of the short all-reduce."""

    ranks: Count
    """Processes that took part: one a GPU, or one a node without GPUs."""
    bytes: Count
    """Bytes that each of them reduced."""
    busbw: Annotated[str, Field(max_length=32)]
    """Bus bandwidth in decimal GB/s: 2 (ranks - 1) / ranks × bytes / time."""


class SelfTestStatus(StatusPart):
    """The self-test of all devices."""

    devices: Count
    """Devices that computed right: GPUs, or one CPU a node."""
    precision: Annotated[str, Field(max_length=32)]
    """Precision that they computed in."""
    slowest_tflops: Annotated[str, Field(max_length=32)]
    """10^12 operations a second of the slowest one."""
    fastest_tflops: Annotated[str, Field(max_length=32)]
    """10^12 operations a second of the fastest one."""


class PreflightStatus(StatusPart):
    """Result of the last preflight."""

    time: Time
    """Time at which it ended."""
    ok: bool
    """false: an error stopped the start."""
    checks: Count
    """Checks that were made."""
    nodes: Count
    """Nodes that were looked at."""
    milliseconds: Count
    """Duration of the checks."""
    findings: Annotated[list[PreflightFinding], Field(max_length=FINDINGS_MAX)] = []
    """Checks that failed or warned, errors first."""
    omitted: Count = 0
    """Further findings that are not listed."""
    all_reduce: AllReduceStatus | None = None
    self_test: SelfTestStatus | None = None
