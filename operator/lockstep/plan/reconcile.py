"""What should happen next to one job: observed, report and now in; objects to write and status out. Pure.

The rules:
- A job starts from zero pods only. What it starts with is frozen into ConfigMap x-run-<hash>; until it is at zero again only that counts.
- Nothing is adopted: an object of a job's name that has another owner is reported and left alone.
- Nothing is sent when nothing has to change.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.api.names import ANNOTATION_RUN_HASH, job_labels, log_name, run_name
from lockstep.plan.accept import Accepted, accept, missing_service_account
from lockstep.plan.conditions import SILENT_SECONDS, Reason, View
from lockstep.plan.diff import changes, needs_recreation
from lockstep.plan.layers import Notice
from lockstep.plan.objects import Frozen, RenderContext, children, claims, thaw
from lockstep.plan.observed import Object, Observed, ReceivedReport, current_report, is_terminating, is_true, owner_uid
from lockstep.plan.status import due, job_status
from lockstep_gang.contract import State

LOG_KEY = "node-0.log"


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


@dataclass(frozen=True)
class Decision:
    """What was decided before any object is written."""

    accepted: Accepted | None
    refusal: Notice | None
    running: Frozen | None
    """The frozen run of the pods that are there or about to be."""
    replicas: int
    starts: bool
    """From zero pods, with `accepted.frozen`."""


def reconcile(observed: Observed, received: ReceivedReport | None, context: RenderContext, now: float) -> Plan:
    """The next step of one job. `context` holds what only the operator knows of it."""
    if is_terminating(observed.job):
        return Plan()
    received = _newest(observed, received)
    complete, failed = _ended(observed, received)
    decision = _decide(observed, context, finished=complete or failed)
    create, apply, delete = _objects(observed, decision, context)
    if complete or failed:
        create, apply = _with_log(observed, received, create, apply)
    view = _view(observed, received, decision, (complete, failed), now)
    status = _status(view, decision)
    write, again = due(observed.status, status, now)
    return Plan(
        create=create,
        claims=_absent_claims(observed, decision),
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


def _decide(observed: Observed, context: RenderContext, *, finished: bool) -> Decision:
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
    replicas = 0 if finished or suspended or running is None else running.nodes
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


Written = tuple[tuple[Object, ...], tuple[Object, ...], tuple[Object, ...]]


def _objects(observed: Observed, decision: Decision, context: RenderContext) -> Written:
    """(create, apply, delete)."""
    running = decision.running
    if running is None:
        return (), (), _unknown_gang(observed, decision)
    wanted = children(running, owner_uid=observed.uid, key=context.key, replicas=decision.replicas)
    if decision.replicas == 0:
        wanted = [item for item in wanted if item["kind"] == "StatefulSet"]
    create = [item for item in wanted if _key(item) not in observed.objects]
    present = [(item, observed.objects[_key(item)]) for item in wanted if _key(item) in observed.objects]
    ours = [(item, seen) for item, seen in present if owner_uid(seen) == observed.uid and not is_terminating(seen)]
    renewed = [seen for item, seen in ours if decision.starts and needs_recreation(item, seen)]
    apply = [_precise(item, seen) for item, seen in ours if not _is_fixed(item) and seen not in renewed and changes(item, seen)]
    foreign = [item for item, seen in present if owner_uid(seen) != observed.uid]
    old = _old_runs(observed, running) if decision.starts else []
    return (*create, *foreign), tuple(apply), (*renewed, *old)


def _unknown_gang(observed: Observed, decision: Decision) -> tuple[Object, ...]:
    """A StatefulSet of ours whose frozen run is gone can't be scaled to zero as it was made: it goes as a whole."""
    found = observed.stateful_set
    must_end = observed.replicas > 0 and decision.replicas == 0 and found is not None
    return (found,) if must_end and found is not None and owner_uid(found) == observed.uid else ()


def _is_fixed(item: Object) -> bool:
    """Never changed once it is there: frozen runs, and the Secret, which the operator may make but not change."""
    return bool(item.get("immutable")) or item["kind"] == "Secret"


def _key(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def _precise(item: Object, seen: Object) -> Object:
    """The object as it is sent: another of that name, or a newer one, is a conflict and not overwritten."""
    exact = {"uid": seen["metadata"]["uid"], "resourceVersion": seen["metadata"]["resourceVersion"]}
    return {**item, "metadata": {**item["metadata"], **exact}}


def _old_runs(observed: Observed, running: Frozen) -> list[Object]:
    prefix = run_name(observed.name, "")
    return [
        item
        for (kind, name), item in observed.objects.items()
        if kind == "ConfigMap"
        and name.startswith(prefix)
        and name != running.name
        and owner_uid(item) == observed.uid
        and not is_terminating(item)
    ]


def _absent_claims(observed: Observed, decision: Decision) -> tuple[Object, ...]:
    if not decision.starts or decision.accepted is None:
        return ()
    return tuple(claim for claim in claims(decision.accepted.resolved) if claim["metadata"]["name"] not in observed.claims)


def _with_log(
    observed: Observed, received: ReceivedReport | None, create: tuple[Object, ...], apply: tuple[Object, ...]
) -> tuple[tuple[Object, ...], tuple[Object, ...]]:
    """The last lines outlive the pods in ConfigMap x-log."""
    if received is None or not received.report.log:
        return create, apply
    item = last_lines(observed, received)
    seen = observed.objects.get(_key(item))
    if seen is None:
        return (*create, item), apply
    mine = owner_uid(seen) == observed.uid
    return create, (*apply, _precise(item, seen)) if mine and changes(item, seen) else apply


def last_lines(observed: Observed, received: ReceivedReport) -> Object:
    """ConfigMap x-log."""
    owner = {"apiVersion": observed.job["apiVersion"], "kind": "TrainingJob", "name": observed.name, "uid": observed.uid,
             "controller": True, "blockOwnerDeletion": False}  # fmt: skip
    metadata = {
        "name": log_name(observed.name), "namespace": observed.namespace, "labels": job_labels(observed.name), "ownerReferences": [owner],
    }  # fmt: skip
    text = "\n".join(received.report.log) + "\n"
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {LOG_KEY: text}}


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
    """A silence is noticed without anything happening."""
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
