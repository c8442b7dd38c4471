"""Messages of the control plane, the coordinator, agents and ranks to each other. The only part of the gang that `lockstep` imports."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # each part is imported when something of it is asked for: most verbs need nothing but `printable_line`
    from lockstep_gang.contract.fabric import DifferingRanks, FabricAsked, FabricReason, FabricReport, Verified, are_whole_names
    from lockstep_gang.contract.goodput import Goodput, Loss, Spent
    from lockstep_gang.contract.interactive import Idleness, Interactive, InteractiveReport
    from lockstep_gang.contract.preflight import (
        PREFLIGHT_RESULT,
        AllReduce,
        Bandwidth,
        Expected,
        ExpectedPath,
        ExpectedRdma,
        Finding,
        Kind,
        PreflightReport,
    )
    from lockstep_gang.contract.proof import ProofError, is_report_signature, parse_key, report_signature
    from lockstep_gang.contract.reply import Fact, FactType, Reply, parse_reply, reply_json
    from lockstep_gang.contract.report import (
        CLAIM_BYTES_MAX,
        JOB_HEADER,
        REPORT_BYTES_MAX,
        REPORT_FORMAT,
        SIGNATURE_HEADER,
        Cause,
        CheckpointReport,
        FailedSaves,
        Failure,
        Metric,
        NodeReport,
        RankCount,
        Report,
        Restart,
        State,
        Straggler,
        TrainerReport,
        claimed_job,
        job_header,
        parse_report,
        report_body,
        report_bytes_max,
    )
    from lockstep_gang.contract.run import POD_IPS, RUN_FORMAT, JobIdentity, ReportTarget, RestartPolicy, Run, WhenDone, parse_run, run_text
    from lockstep_gang.contract.stop import Save, StopReport
    from lockstep_gang.contract.sweep import PROBE, PROBED, SWEEP, SWEEP_DONE, SWEEP_POINT
    from lockstep_gang.contract.text import cleaned, json_escaped, printable, printable_line

__all__ = [
    "CLAIM_BYTES_MAX",
    "JOB_HEADER",
    "POD_IPS",
    "PREFLIGHT_RESULT",
    "PROBE",
    "PROBED",
    "REPORT_BYTES_MAX",
    "REPORT_FORMAT",
    "RUN_FORMAT",
    "SIGNATURE_HEADER",
    "SWEEP",
    "SWEEP_DONE",
    "SWEEP_POINT",
    "AllReduce",
    "Bandwidth",
    "Cause",
    "CheckpointReport",
    "DifferingRanks",
    "Expected",
    "ExpectedPath",
    "ExpectedRdma",
    "FabricAsked",
    "FabricReason",
    "FabricReport",
    "Fact",
    "FactType",
    "FailedSaves",
    "Failure",
    "Finding",
    "Goodput",
    "Idleness",
    "Interactive",
    "InteractiveReport",
    "JobIdentity",
    "Kind",
    "Loss",
    "Metric",
    "NodeReport",
    "PreflightReport",
    "ProofError",
    "RankCount",
    "Reply",
    "Report",
    "ReportTarget",
    "Restart",
    "RestartPolicy",
    "Run",
    "Save",
    "Spent",
    "State",
    "StopReport",
    "Straggler",
    "TrainerReport",
    "Verified",
    "WhenDone",
    "are_whole_names",
    "claimed_job",
    "cleaned",
    "is_report_signature",
    "job_header",
    "json_escaped",
    "parse_key",
    "parse_reply",
    "parse_report",
    "parse_run",
    "printable",
    "printable_line",
    "reply_json",
    "report_body",
    "report_bytes_max",
    "report_signature",
    "run_text",
]

_PARTS = ("text", "sweep", "stop", "goodput", "fabric", "interactive", "preflight", "proof", "reply", "run", "report")
"""Modules in which names are looked up, those that import no other part first."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for part in _PARTS:
            found = vars(import_module(f"{__name__}.{part}"))
            if name in found:
                return globals().setdefault(name, found[name])
    raise AttributeError(f"module {__name__} has no attribute {name}")
