"""A dev environment that nobody uses: a warning, then its GPUs are released (pure). A run that was asked for is use until it has ended."""

from __future__ import annotations

from dataclasses import replace

from lockstep_gang.contract.interactive import RUN_TEXT, Idleness, InteractiveReport
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import stamp
from lockstep_gang.lifecycle.gang import Gang, Session


def with_idleness(gang: Gang, run: Run, now: float) -> Gang:
    """The gang with how long nobody has used it; of a job that is no dev environment nothing changes."""
    if run.interactive is None:
        return gang
    session = gang.session
    if session.request is not None or not session.used_at:
        session = replace(session, used_at=now)
    passed, limits = now - session.used_at, run.interactive
    if not limits.idle_seconds or passed < limits.warn_seconds:
        idleness = Idleness.NONE
    else:
        idleness = Idleness.OVER if passed >= limits.idle_seconds else Idleness.WARNED
    return replace(gang, session=replace(session, idleness=idleness))


def wake_at(gang: Gang, run: Run) -> float | None:
    """When the next of the two times is up; null: none is."""
    session = gang.session
    if run.interactive is None or not run.interactive.idle_seconds or session.request is not None or session.idleness is Idleness.OVER:
        return None
    warned = session.idleness is Idleness.WARNED
    return session.used_at + (run.interactive.idle_seconds if warned else run.interactive.warn_seconds)


def line(session: Session, run: Run) -> str:
    """For the log, when it has changed."""
    assert run.interactive is not None  # noqa: S101 (the caller asked)
    if session.idleness is Idleness.NONE:
        return "the environment is in use again"
    since = f"nobody has used the environment since {stamp(session.used_at)}"
    if session.idleness is Idleness.WARNED:
        return f"{since}: its GPUs are released at {stamp(session.used_at + run.interactive.idle_seconds)}, unless something is run or a shell is used"
    return f"{since}: its GPUs are released now; it comes back with: lockstep resume {run.job.name} -n {run.job.namespace}"


def interactive_report(gang: Gang, run: Run) -> InteractiveReport | None:
    """For the operator. Null: it is no dev environment."""
    if run.interactive is None:
        return None
    session, request = gang.session, gang.session.request
    ready = all(node.connected and not node.leaving for node in gang.nodes)
    if request is not None:
        return InteractiveReport(ready, request.asked.text[:RUN_TEXT], request.asked.by[:RUN_TEXT], stamp(request.since))
    release = stamp(session.used_at + run.interactive.idle_seconds) if session.idleness is not Idleness.NONE else None
    since = stamp(session.used_at) if release is not None else None  # each change of a job's status is a write
    return InteractiveReport(ready, idle_since=since, idleness=session.idleness, release=release)
