"""What the last preflight found, as status shows it (pure)."""

from __future__ import annotations

from typing import Any

from lockstep.plan.observed import Object, Observed
from lockstep_gang.contract import Bandwidth, Finding, PreflightReport, Report, State

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
