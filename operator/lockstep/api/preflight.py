"""Preflight: what is looked at on all nodes before ranks start, and what was found."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from lockstep.api.model import Model
from lockstep_spec.choices import Severity

FINDINGS_MAX = 20
EXCLUDED_MAX = 16
Text = Annotated[str, Field(max_length=1024)]
Count = Annotated[int, Field(ge=0)]
Time = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]


class PreflightMode(StrEnum):
    """How much is looked at before an attempt."""

    FULL = "Full"
    BASIC = "Basic"
    OFF = "Off"


class Preflight(Model):
    """What is looked at on all nodes before the ranks start. An error stops the start and spends no restart."""

    mode: PreflightMode = PreflightMode.FULL
    """Full: every check, and a short all-reduce where the cluster states network.minimumBusbw. Basic: without the all-reduce. Off: nothing."""
    all_reduce: bool = False
    """true: with mode Full, measure the all-reduce where the cluster states no threshold, too; status.preflight then has the figure."""


class PreflightFinding(Model):
    """One check that a node did not pass."""

    check: Annotated[str, Field(max_length=64)]
    """Which one: docs/how-to/preflight.md has the table."""
    severity: Severity
    node: Count | None = None
    """The node's index in the job. Left out: it is about several nodes together."""
    node_name: Text | None = None
    """The Node that its pod runs on."""
    message: Text
    """What was seen."""
    fix: Text
    """What to do."""


class AllReduceStatus(Model):
    """The bandwidth of the short all-reduce."""

    ranks: Count
    """Processes that took part: one a GPU, or one a node without GPUs."""
    bytes: Count
    """Bytes that each of them reduced."""
    busbw: Annotated[str, Field(max_length=32)]
    """Bus bandwidth in decimal GB/s: 2 (ranks - 1) / ranks × bytes / time."""


class PreflightStatus(Model):
    """What the last preflight found."""

    time: Time
    """When it ended."""
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


class ExcludedNode(Model):
    """A node that this job no longer uses."""

    name: Annotated[str, Field(max_length=253)]
    """The Node."""
    time: Time
    """Since when."""
    message: Text
    """What preflight found there."""


ExcludedNodes = Annotated[list[ExcludedNode], Field(max_length=EXCLUDED_MAX)]
