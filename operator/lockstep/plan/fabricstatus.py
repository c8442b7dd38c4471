"""Condition FabricVerified and status.fabric: the coordinator's verdict on what NCCL logged, in the status' words."""

from __future__ import annotations

from typing import Any

from lockstep.api.status import ConditionType
from lockstep.plan.observed import Object, Observed
from lockstep.plan.readstatus import condition
from lockstep_gang.contract import DifferingRanks, FabricReport, Report

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
