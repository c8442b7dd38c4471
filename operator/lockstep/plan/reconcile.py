"""What should happen next to one job: observed, report and now in; objects to write and status out. Pure.

The rules:
- A job starts from zero pods only. What it starts with is frozen into ConfigMap x-run-<hash>; until it is at zero again only that counts.
- Nothing is adopted: an object of a job's name that has another owner is reported and left alone.
- Nothing is sent when nothing has to change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.api.names import ANNOTATION_RUN_HASH, run_name
from lockstep.plan.accept import Accepted, accept, missing_service_account
from lockstep.plan.conditions import SILENT_SECONDS, Reason, View
from lockstep.plan.hold import held_until
from lockstep.plan.layers import Notice
from lockstep.plan.objects import Frozen, RenderContext, thaw
from lockstep.plan.observed import Object, Observed, ReceivedReport, current_report, is_terminating, is_true, owner_uid
from lockstep.plan.status import due, job_status
from lockstep.plan.writes import Decision, absent_claims, object_writes, with_log
from lockstep_gang.contract import State


@dataclass(frozen=True)
class Note:
    """A Kubernetes Event about the job, told once at a transition."""

    type: str
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """What to send, in this order. Empty tuples and None: nothing."""

    create: tuple[Object, ...] = ()
    """Objects seen to be absent: POST. An object that is there after all is looked at, never merged into."""
    claims: tuple[Object, ...] = ()
    """As create, but one that is there is fine, whoever made it."""
    apply: tuple[Object, ...] = ()
    """Objects of this job that differ, with the uid and resourceVersion that were seen."""
    delete: tuple[Object, ...] = ()
    status: Object | None = None
    events: tuple[Note, ...] = ()
    again_seconds: float | None = None


def reconcile(observed: Observed, received: ReceivedReport | None, context: RenderContext, now: float) -> Plan:
    """The next step of one job. `context` holds what only the operator knows of it."""
    if is_terminating(observed.job):
        return Plan()
    received = _newest(observed, received)
    complete, failed = _ended(observed, received)
    held = held_until(observed, received, now)
    decision = _decide(observed, context, finished=complete or failed, held=held is not None)
    create, apply, delete = object_writes(observed, decision, context)
    if complete or failed:
        create, apply = with_log(observed, received, create, apply)
    view = replace(_view(observed, received, decision, (complete, failed), now), held_until=held)
    status = _status(view, decision)
    write, again = due(observed.status, status, now)
    return Plan(
        create=create,
        claims=absent_claims(observed, decision),
        apply=apply,
        delete=delete,
        status=status if write else None,
        events=_notes(observed.status, status) if write else (),
        again_seconds=again if again is not None else _next_look(view),
    )


def _newest(observed: Observed, received: ReceivedReport | None) -> ReceivedReport | None:
    """An end counts for ever; anything else while its pod is there."""
    if received is not None and received.report.state in (State.COMPLETE, State.FAILED):
        return received
    return current_report(observed, received)


def _ended(observed: Observed, received: ReceivedReport | None) -> tuple[bool, bool]:
    complete, failed = is_true(observed.status, "Complete"), is_true(observed.status, "Failed")
    if received is not None and not (complete or failed):
        complete, failed = received.report.state is State.COMPLETE, received.report.state is State.FAILED
    return complete, failed


def _decide(observed: Observed, context: RenderContext, *, finished: bool, held: bool) -> Decision:
    found = accept(observed, context)
    accepted = found if isinstance(found, Accepted) else None
    refusal = found if isinstance(found, Notice) else None
    suspended = bool(observed.job["spec"].get("suspend", False))
    if observed.at_zero:
        if accepted is not None and not (finished or suspended):
            refusal = missing_service_account(observed, accepted) or _previous(observed)
        starts = accepted is not None and refusal is None and not (finished or suspended)
        running = accepted.frozen if starts and accepted is not None else None
        replicas = running.nodes if running is not None else 0
        return Decision(accepted, refusal or _obstacle(observed, finished), running, replicas, starts)
    running = _thawed(observed)
    remains = _foreign(observed) or _previous(observed) if running is None else None
    replicas = 0 if (finished and not held) or suspended or running is None else running.nodes
    return Decision(accepted, refusal or remains or _obstacle(observed, finished), running, replicas, starts=False)


def _obstacle(observed: Observed, finished: bool) -> Notice | None:
    return None if finished else observed.obstacle


def _thawed(observed: Observed) -> Frozen | None:
    """The run that the pods there were made from; None when its ConfigMap is gone or another job's."""
    holders = [item for item in (observed.stateful_set, *observed.pods) if item is not None]
    hashes = [item["metadata"].get("annotations", {}).get(ANNOTATION_RUN_HASH) for item in holders]
    for run_hash in filter(None, hashes):
        found = observed.objects.get(("ConfigMap", run_name(observed.name, run_hash)))
        if found is not None and owner_uid(found) == observed.uid and not is_terminating(found):
            return thaw(found)
    return None


def _previous(observed: Observed) -> Notice | None:
    """Objects of a deleted job of the same name that the garbage collector has not removed yet."""
    remaining = [
        f"{kind} {name}"
        for (kind, name), item in observed.objects.items()
        if owner_uid(item) != observed.uid and _owned_by_namesake(observed, item) and (is_terminating(item) or kind == "StatefulSet")
    ]
    if observed.stateful_set is None:
        remaining += [f"Pod {pod['metadata']['name']}" for pod in observed.pods]
    if not remaining:
        return None
    return Notice(Reason.PREVIOUS_JOB_REMAINS, f"an earlier job of this name is still being removed: {', '.join(sorted(remaining))}")


def _foreign(observed: Observed) -> Notice | None:
    """A StatefulSet with pods that carries our labels, but is somebody else's: an in-namespace run, say."""
    found = observed.stateful_set
    if found is None or owner_uid(found) == observed.uid or _owned_by_namesake(observed, found):
        return None
    owners = ", ".join(f"{o['kind']} {o['name']}" for o in found["metadata"].get("ownerReferences", [])) or "nobody"
    text = f"StatefulSet {observed.name} in namespace {observed.namespace} exists already and belongs to {owners}"
    return Notice(Reason.NAME_TAKEN, f"{text}: Lockstep leaves it alone; delete it, or give the job another name")


def _owned_by_namesake(observed: Observed, item: Object) -> bool:
    owners = item["metadata"].get("ownerReferences", [])
    return any(o["kind"] == "TrainingJob" and o["name"] == observed.name for o in owners)


def _view(observed: Observed, received: ReceivedReport | None, decision: Decision, ended: tuple[bool, bool], now: float) -> View:
    return View(
        observed=observed,
        refusal=None if any(ended) else decision.refusal,
        received=received,
        wanted_pods=decision.replicas,
        suspend=bool(observed.job["spec"].get("suspend", False)),
        complete=ended[0],
        failed=ended[1],
        failure_message=_failure_message(observed, received),
        now=now,
    )


def _failure_message(observed: Observed, received: ReceivedReport | None) -> str:
    if received is not None and received.report.failure is not None:
        return received.report.failure.message
    known = observed.status.get("conditions", [])
    return next(
        (c["message"] for c in known if c["type"] == "Failed" and c["status"] == "True"), received.report.message if received else ""
    )


def _status(view: View, decision: Decision) -> Object:
    accepted, running = decision.accepted, decision.running
    is_current = accepted is not None and running is not None and accepted.frozen.hash == running.hash
    profile = accepted.profile if accepted is not None and is_current else None
    return job_status(view, running, profile, pending=running is not None and accepted is not None and not is_current)


def _next_look(view: View) -> float | None:
    """A silence, and the end of a hold, are noticed without anything happening."""
    if view.held_until is not None:
        return view.held_until - view.now + 0.1
    if view.received is None or view.finished:
        return None
    left = view.received.received + SILENT_SECONDS - view.now
    return left + 1.0 if left > 0 else None


def _notes(before: Object, after: Object) -> tuple[Note, ...]:
    """The summary's new reason, when it has one."""
    old = {c["type"]: c for c in before.get("conditions", [])}.get("Progressing", {})
    new = {c["type"]: c for c in after["conditions"]}["Progressing"]
    if old.get("reason") == new["reason"]:
        return ()
    good = new["status"] == "True" or new["reason"] in (
        Reason.COMPLETE,
        Reason.SUSPENDED,
        Reason.STOPPING,
        Reason.SCHEDULING,
        Reason.PODS_NOT_CREATED,
    )
    return (Note("Normal" if good else "Warning", new["reason"], new["message"]),)
