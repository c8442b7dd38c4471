"""Condition FabricVerified and status.fabric: the coordinator's verdict on what NCCL logged, in the status' words."""

from __future__ import annotations

from typing import Any

from lockstep.api.objects import Object, condition
from lockstep.api.status import ConditionType
from lockstep.plan.observed import Observed
from lockstep_gang.contract import Bandwidth, DifferingRanks, FabricReport, Finding, PreflightReport, Report, State

NOT_STARTED = "NotStarted"
NAME, TEXT, LIST, DIFFERING = 64, 1024, 64, 32


def fabric_words(observed: Observed, report: Report | None) -> tuple[str, str, str]:
    """(status, reason, message) of the condition. What was verified stays said while nobody reports, and after the end."""
    if report is not None and report.fabric is not None:
        return report.fabric.verified.value, report.fabric.reason.value, report.fabric.message
    known = condition(observed.status, ConditionType.FABRIC_VERIFIED)
    if known:
        return known["status"], known["reason"], known["message"]
    return "Unknown", NOT_STARTED, "no rank has been started"


def fabric_status(observed: Observed, fabric: FabricReport) -> Object:
    """status.fabric, bounded as its schema says."""
    fields: dict[str, Any] = {
        "transport": fabric.transport,
        "network": fabric.network and fabric.network[:NAME],
        "hcas": [name[:NAME] for name in fabric.hcas[:LIST]],
        "link": fabric.link and fabric.link[:NAME],
        "interfaces": [name[:NAME] for name in fabric.interfaces[:LIST]],
        "gpuDirect": fabric.gpu_direct and fabric.gpu_direct[:NAME],
        "ncclVersion": fabric.nccl_version and fabric.nccl_version[:NAME],
        "ranksHeard": fabric.ranks_heard,
        "differing": [_difference(observed, ranks) for ranks in fabric.differing[:DIFFERING]],
    }
    return {key: value for key, value in fields.items() if value is not None}


def _difference(observed: Observed, ranks: DifferingRanks) -> Object:
    pod = observed.pod(ranks.node)
    name = (pod or {}).get("spec", {}).get("nodeName")
    known = (observed.status.get("fabric") or {}).get("differing", [])
    kept = next((d.get("nodeName") for d in known if d["node"] == ranks.node), None)
    fields = {"node": ranks.node, "nodeName": name or kept, "ranks": ranks.ranks[:NAME], "why": ranks.why[:TEXT]}
    return {key: value for key, value in fields.items() if value is not None}


TEXT = 1024


def preflight_stops(report: Report) -> bool:
    """Whether no rank is started because of what preflight found."""
    failed = report.preflight is not None and not report.preflight.ok
    return failed and report.state in (State.WAITING, State.BACKING_OFF)


def preflight_status(observed: Observed, result: PreflightReport) -> Object:
    """status.preflight. A node's name is taken while its pod is there, and kept after that."""
    before = observed.status.get("preflight") or {}
    known = {f.get("node"): f.get("nodeName") for f in before.get("findings", [])} if before.get("time") == result.time else {}
    found: dict[str, Any] = {
        "time": result.time, "ok": result.ok, "checks": len(result.checks), "nodes": result.nodes, "milliseconds": result.milliseconds,
        "findings": [_finding(observed, finding, known.get(finding.node)) for finding in result.findings], "omitted": result.omitted,
    }  # fmt: skip
    if result.all_reduce is not None:
        found["allReduce"] = _bandwidth(result.all_reduce)
    return found


def _finding(observed: Observed, finding: Finding, known: str | None) -> Object:
    pod = None if finding.node is None else observed.pod(finding.node)
    fields = {
        "check": finding.check,
        "severity": finding.severity.value,
        "node": finding.node,
        "nodeName": known or (pod or {}).get("spec", {}).get("nodeName"),
        "message": finding.message[:TEXT],
        "fix": finding.fix[:TEXT],
    }
    return {key: value for key, value in fields.items() if value is not None}


def _bandwidth(measured: Bandwidth) -> Object:
    return {"ranks": measured.ranks, "bytes": measured.bytes, "busbw": f"{measured.bytes_per_second / 1e9:.3f}"}
