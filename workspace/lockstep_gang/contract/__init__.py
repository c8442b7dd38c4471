"""What the control plane, the coordinator, agents and ranks say to each other. The only part of the gang that `lockstep` imports."""

from lockstep_gang.contract.codec import ContractError, from_json, to_json
from lockstep_gang.contract.goodput import Goodput, Loss, Spent
from lockstep_gang.contract.proof import ProofError, is_report_signature, parse_key, report_signature
from lockstep_gang.contract.reply import ORDER_STOP, Fact, FactType, Reply, parse_reply, reply_json
from lockstep_gang.contract.report import (
    REPORT_BYTES_MAX,
    REPORT_FORMAT,
    Cause,
    CheckpointReport,
    Failure,
    Metric,
    NodeReport,
    RankCount,
    Report,
    Restart,
    State,
    TrainerReport,
    parse_report,
    report_body,
)
from lockstep_gang.contract.run import RUN_FORMAT, JobIdentity, ReportTarget, RestartPolicy, Run, Storage, WhenDone, parse_run, run_text
from lockstep_gang.contract.stop import Save, StopReport

__all__ = [
    "ORDER_STOP", "REPORT_BYTES_MAX", "REPORT_FORMAT", "RUN_FORMAT", "Cause", "CheckpointReport", "ContractError", "Fact", "FactType",
    "Failure", "Goodput", "JobIdentity", "Loss", "Metric", "NodeReport", "ProofError", "RankCount", "Reply", "Report", "ReportTarget",
    "Restart", "RestartPolicy", "Run", "Save", "Spent", "State", "StopReport", "Storage", "TrainerReport", "WhenDone", "from_json",
    "is_report_signature", "parse_key", "parse_reply", "parse_report", "parse_run", "reply_json", "report_body", "report_signature",
    "run_text", "to_json",
]  # fmt: skip
