"""A dev environment (pure): what its status says, and when nobody uses it any more and its GPUs are released.

Released is written into status first, then the pods go: whoever looks next, this operator or another, goes on from there. It ends when
spec.restart.retry is raised (`lockstep resume`), or when the job is suspended by hand. The operator never writes a spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.api.job import JobType
from lockstep.api.objects import Object, condition
from lockstep.api.status import InteractiveStatus
from lockstep.api.statuspart import taken_from, unchecked
from lockstep.plan.observed import Observed, ReceivedReport
from lockstep_gang.contract.interactive import Idleness
from lockstep_gang.contract.report import Report


def is_interactive(job: Mapping[str, Any]) -> bool:
    return bool(job["spec"].get("type") == JobType.INTERACTIVE.value)


def is_released(observed: Observed) -> bool:
    """Return True if its GPUs were released and not asked for again. A suspension by hand takes its place."""
    stored = observed.status_part("interactive")
    suspended = observed.job["spec"].get("suspend", False)
    return not suspended and "released" in stored and observed.requested_retry <= stored.get("retry", 0)


def is_stopped(observed: Observed) -> bool:
    """Return True if the job is to have no pods: suspended by a person, or released."""
    return bool(observed.job["spec"].get("suspend", False)) or is_released(observed)


def release_due(observed: Observed, received: ReceivedReport | None) -> bool:
    """Return True if node 0 reports that nobody uses it. The report of a start that is being stopped says nothing about the next one."""
    report = received.report.interactive if received is not None else None
    return report is not None and report.idleness is Idleness.OVER and observed.replicas > 0 and not is_stopped(observed)


def interactive_status(observed: Observed, received: ReceivedReport | None, now: str) -> InteractiveStatus | None:
    """Return status.interactive; None if there is nothing to say."""
    if not is_interactive(observed.job) or observed.job["spec"].get("suspend", False):
        return None
    before = InteractiveStatus.stored(observed.status.get("interactive")) or unchecked(InteractiveStatus)
    if is_released(observed):
        return before
    if release_due(observed, received):
        return unchecked(InteractiveStatus, released=now, retry=observed.requested_retry, idle_since=before.idle_since)
    report = received.report.interactive if received is not None else None
    if report is None and not observed.pods:
        return None
    if report is None:
        status = before.model_copy(update={"released": None, "retry": None})
    else:
        status = taken_from(report, InteractiveStatus, script=report.script or None, by=report.by or None, release_time=report.release)
    return status if status.to_dict() else None


def unused(jobs: Iterable[Object]) -> frozenset[tuple[str, str]]:
    """(namespace, name) of the dev environments in which nothing runs, though they have their GPUs."""
    idle = (job for job in jobs if is_interactive(job) and condition(job.get("status") or {}, "Progressing").get("reason") == "Ready")
    return frozenset((str(job["metadata"]["namespace"]), str(job["metadata"]["name"])) for job in idle)


def is_ready(report: Report) -> bool:
    """All nodes wait, and nothing runs or is about to."""
    session = report.interactive
    return session is not None and session.ready and not session.script


def run_command(observed: Observed) -> str:
    return f"lockstep run --job {observed.name} -n {observed.namespace} train_multi_node.py"


def resume_command(observed: Observed) -> str:
    return f"lockstep resume {observed.name} -n {observed.namespace}"


def ready_words(observed: Observed, report: Report) -> str:
    session = report.interactive
    assert session is not None  # noqa: S101 (the caller asked)
    release = f"; nobody has used it since {session.idle_since}, and its GPUs are released at {session.release}" if session.release else ""
    return f"all nodes wait and nothing runs{release}; {run_command(observed)}"


def running_words(report: Report) -> str:
    """Return what all ranks run."""
    session = report.interactive
    return (
        f"{session.script} runs since {session.since}, asked for by {session.by}"
        if session is not None and session.script
        else "all ranks run"
    )


def released_words(observed: Observed) -> str:
    stored = observed.status_part("interactive")
    since = f" since {stored['idleSince']}" if "idleSince" in stored else ""
    return f"nobody used the environment{since}: its GPUs are released, its files are kept; bring it back with: {resume_command(observed)}"
