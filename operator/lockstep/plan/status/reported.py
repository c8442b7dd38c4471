"""Condition FabricVerified and status.fabric: the coordinator's verdict on what NCCL logged, in the status' words."""

from __future__ import annotations

from lockstep.api.objects import condition
from lockstep.api.status import (
    AllReduceStatus,
    ConditionType,
    FabricDifference,
    FabricStatus,
    PreflightFinding,
    PreflightStatus,
    unchecked,
)
from lockstep.plan.observed import Observed
from lockstep_gang.contract import Bandwidth, FabricReport, Finding, PreflightReport, Report, State

NOT_STARTED = "NotStarted"


def fabric_words(observed: Observed, report: Report | None) -> tuple[str, str, str]:
    """(status, reason, message) of the condition. What was verified stays said while nobody reports, and after the end."""
    if report is not None and report.fabric is not None:
        return report.fabric.verified.value, report.fabric.reason.value, report.fabric.message
    known = condition(observed.status, ConditionType.FABRIC_VERIFIED)
    if known:
        return known["status"], known["reason"], known["message"]
    return "Unknown", NOT_STARTED, "no rank has been started"


def fabric_status(observed: Observed, fabric: FabricReport) -> FabricStatus:
    """Return status.fabric."""
    before = FabricStatus.stored(observed.status.get("fabric"))
    names = {item.node: item.node_name for item in before.differing} if before is not None else {}
    return unchecked(
        FabricStatus,
        transport=fabric.transport,
        network=fabric.network,
        hcas=list(fabric.hcas),
        link=fabric.link,
        interfaces=list(fabric.interfaces),
        gpu_direct=fabric.gpu_direct,
        nccl_version=fabric.nccl_version,
        ranks_heard=fabric.ranks_heard,
        differing=[
            unchecked(
                FabricDifference,
                node=ranks.node,
                node_name=observed.node_name(ranks.node) or names.get(ranks.node),
                ranks=ranks.ranks,
                why=ranks.why,
            )
            for ranks in fabric.differing
        ],
    )


def preflight_stops(report: Report) -> bool:
    """Return True if preflight keeps the ranks from being started."""
    failed = report.preflight is not None and not report.preflight.ok
    return failed and report.state in (State.WAITING, State.BACKING_OFF)


def preflight_status(observed: Observed, result: PreflightReport) -> PreflightStatus:
    """Return status.preflight. A node's name is read while its pod is there, and stays after that."""
    before = PreflightStatus.stored(observed.status.get("preflight"))
    names = {finding.node: finding.node_name for finding in before.findings} if before is not None and before.time == result.time else {}
    return unchecked(
        PreflightStatus,
        time=result.time,
        ok=result.ok,
        checks=len(result.checks),
        nodes=result.nodes,
        milliseconds=result.milliseconds,
        findings=[_finding(observed, finding, names.get(finding.node)) for finding in result.findings],
        omitted=result.omitted,
        all_reduce=None if result.all_reduce is None else _bandwidth(result.all_reduce),
    )


def _finding(observed: Observed, finding: Finding, name: str | None) -> PreflightFinding:
    return unchecked(
        PreflightFinding,
        check=finding.check,
        severity=finding.severity,
        node=finding.node,
        node_name=name or observed.node_name(finding.node),
        message=finding.message,
        fix=finding.fix,
    )


def _bandwidth(measured: Bandwidth) -> AllReduceStatus:
    return unchecked(AllReduceStatus, ranks=measured.ranks, bytes=measured.bytes, busbw=f"{measured.bytes_per_second / 1e9:.3f}")
