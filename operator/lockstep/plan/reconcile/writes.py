"""Objects of a job to create, change or delete. What is as it should be is left alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from lockstep.api.names import job_labels, log_name, run_name
from lockstep.api.objects import Object, is_running
from lockstep.api.status import InterferenceStatus
from lockstep.api.statuspart import unchecked
from lockstep.plan.diff import changes, needs_recreation
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, ReceivedReport, is_terminating, owner_uid
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.accept import Accepted
from lockstep.plan.reconcile.clocks import start_mark
from lockstep.plan.reconcile.events import WARNING, JobEvent
from lockstep.plan.reconcile.interactive import is_stopped
from lockstep.plan.reconcile.stopping import scaled_words
from lockstep.plan.render.objects import TEMPLATE_KEY, Frozen, RenderContext, children, claims, has_lost_key, job_reference, run_proof
from lockstep.plan.times import remaining, seconds_of, timestamp
from lockstep.plan.waiting.containers import lacks_secret

LOG_KEY = "node-0.log"
INTERFERENCE_SECONDS = 600.0
REMEMBERED_JOBS, REMEMBERED_CHARACTERS = 32, 64 << 10
"""Jobs whose rendered objects are remembered, since each look compares them, and the largest run of such a job: most have 10 KB."""


@dataclass(frozen=True)
class Decision:
    """Decision that object writes follow from."""

    accepted: Accepted | None
    refusal: Notice | None
    running: Frozen | None
    """The frozen run of the pods that are there or about to be."""
    replicas: int
    starts: bool
    """True if the job starts from zero pods, with `accepted.frozen`."""
    stopping: Notice | None = None
    """Pods that are there are to go, and the job has not ended."""
    proven: bool = True
    """`running` is the operator's own, so that its pod template may be applied."""


Written = tuple[tuple[Object, ...], tuple[Object, ...], tuple[Object, ...]]


def object_writes(observed: Observed, decision: Decision, context: RenderContext) -> Written:
    """(create, apply, delete)."""
    running = decision.running
    if running is None:
        return (), _scaled(observed, decision), ()
    proof = run_proof(running, context.run_key) if context.run_key and decision.proven else ""
    wanted = [
        _marked(item, start_mark(observed)) if item["kind"] == "StatefulSet" else item
        for item in _children(running, observed.uid, context.key, decision.replicas, proof)
    ]
    if decision.replicas == 0:
        wanted = [item for item in wanted if item["kind"] == "StatefulSet"]
    if not decision.proven:
        wanted = [item for item in wanted if item["kind"] != "StatefulSet"]
    if has_lost_key(running, context):  # what its agents have can't be made again, and with another one a pod would be a stranger to them
        wanted = [item for item in wanted if item["kind"] != "Secret"]
    present = [(item, observed.objects[_key(item)]) for item in wanted if _key(item) in observed.objects]
    ours = [(item, live) for item, live in present if owner_uid(live) == observed.uid and not is_terminating(live)]
    renewed = [live for item, live in ours if decision.starts and needs_recreation(item, live)]
    forged = [(item, live) for item, live in ours if is_other_run(item, live)]
    create = [item for item in wanted if _key(item) not in observed.objects and not _is_mounted(item, observed)]
    create += [item for item, _ in forged]
    apply = [_precise(item, live) for item, live in ours if not _is_fixed(item) and live not in renewed and changes(item, live)]
    apply += [_precise(item, live) for item, live in ours if decision.starts and _lacks_proof(item, live) and not is_other_run(item, live)]
    foreign = [item for item, live in present if owner_uid(live) != observed.uid]
    old = _old_runs(observed, running) if decision.starts else []
    scaled = () if decision.proven else _scaled(observed, decision)
    return (*sorted(create, key=makes_pods), *foreign), (*apply, *scaled), (*renewed, *(live for _, live in forged), *old)


def any_foreign(observed: Observed, create: tuple[Object, ...]) -> bool:
    """Returns whether somebody else is seen to have one of these names."""
    return any(_key(item) in observed.objects for item in create)


def is_of_namesake(observed: Observed, item: Object) -> bool:
    """Return True if it belongs to a TrainingJob of this name, which may be an earlier one."""
    owners = item["metadata"].get("ownerReferences", [])
    return any(owner["kind"] == "TrainingJob" and owner["name"] == observed.name for owner in owners)


def name_taken(observed: Observed, kind: str, item: Object) -> Notice:
    """Refusal for a job while somebody else's object has the name that one of its own needs."""
    name, owners = item["metadata"]["name"], item["metadata"].get("ownerReferences", [])
    holder = ", ".join(f"{owner['kind']} {owner['name']}" for owner in owners) or "nobody that Lockstep knows"
    text = f"{kind} {name} in namespace {observed.namespace} exists already and belongs to {holder}"
    look = f"kubectl describe {kind} {name} -n {observed.namespace}"
    return Notice(Reason.NAME_TAKEN, f"{text}: Lockstep leaves it alone; delete it, or give the job another name ({look})")


def is_started(observed: Observed, running: Frozen | None) -> bool:
    """Returns whether status says that this run was started. If not, an operator ended in the middle of the start: what is missing was
    never made.
    """
    return running is not None and observed.status_part("run").get("name") == running.name


def _children(running: Frozen, owner_uid: str, key: str, replicas: int, proof: str) -> list[Object]:
    rendered = _made if len(running.run) + len(running.template) <= REMEMBERED_CHARACTERS else _made.__wrapped__
    items: list[Object] = json.loads(rendered(running, owner_uid, key, replicas, proof))
    return items


@lru_cache(REMEMBERED_JOBS)
def _made(running: Frozen, owner_uid: str, key: str, replicas: int, proof: str) -> str:
    """Return the objects as JSON, so that nobody can change what is remembered."""
    return json.dumps(children(running, owner_uid=owner_uid, key=key, replicas=replicas, proof=proof))


def _marked(item: Object, mark: dict[str, str]) -> Object:
    metadata = item["metadata"]
    return {**item, "metadata": {**metadata, "annotations": {**metadata["annotations"], **mark}}}


def makes_pods(item: Object) -> bool:
    """Return True for what is created last, unless nothing is known to be in the way."""
    return bool(item["kind"] == "StatefulSet")


def is_other_run(item: Object, live: Object) -> bool:
    """Return True if `live` has the name of the frozen run `item` and holds another: the operator didn't write it."""
    return is_frozen_run(item) and (live.get("data") != item["data"] or bool(live.get("binaryData")))


def is_frozen_run(item: Object) -> bool:
    return bool(item["kind"] == "ConfigMap" and TEMPLATE_KEY in item["data"])


def _lacks_proof(item: Object, live: Object) -> bool:
    """A run of an older operator, or of one whose key was lost, that starts again as it is."""
    return is_frozen_run(item) and bool(changes({"metadata": {"annotations": item["metadata"].get("annotations")}}, live))


def _scaled(observed: Observed, decision: Decision) -> tuple[Object, ...]:
    """The StatefulSet as it stands, with as many pods as are wanted: nothing proves another template, or there is none."""
    live = observed.own_stateful_set
    if live is None or is_terminating(live) or observed.replicas == decision.replicas:
        return ()
    fields = ("name", "namespace", "labels", "annotations", "ownerReferences", "uid", "resourceVersion")
    metadata = {field: live["metadata"][field] for field in fields if field in live["metadata"]}
    spec = {**live["spec"], "replicas": decision.replicas}
    return ({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec},)


def repairs(observed: Observed, decision: Decision, create: tuple[Object, ...], delete: tuple[Object, ...]) -> tuple[JobEvent, ...]:
    """Events about objects of the job that somebody else deleted, scaled or wrote, and what is done about it."""
    replaced = {_key(item) for item in delete}
    return (
        *_scaled_by_hand(observed, decision),
        *(event for item in create if (event := _repair(observed, decision, item, replaced)) is not None),
    )


def interference(observed: Observed, events: tuple[JobEvent, ...], now: float) -> tuple[InterferenceStatus | None, float | None]:
    """Return status.interference, and in how many seconds it goes away: an Event alone is hard to find a minute later."""
    if events:
        message = "; ".join(event.message for event in events)
        return unchecked(InterferenceStatus, time=timestamp(now), message=message), INTERFERENCE_SECONDS
    before = InterferenceStatus.stored(observed.status.get("interference") or None)
    left = remaining(seconds_of(before.time), INTERFERENCE_SECONDS, now) if before is not None else 0.0
    return (before, left) if left > 0 else (None, None)


def _repair(observed: Observed, decision: Decision, item: Object, replaced: set[tuple[str, str]]) -> JobEvent | None:
    kind, name = _key(item)
    if is_frozen_run(item) and (kind, name) in replaced:
        return JobEvent(WARNING, "FrozenRunReplaced", f"ConfigMap {name} was changed by somebody else: Lockstep writes it again")
    if decision.starts or (kind, name) in observed.objects:
        return None
    if is_frozen_run(item):
        text = f"ConfigMap {name} was deleted or has lost its labels while pods use it: Lockstep writes it again"
        return JobEvent(WARNING, "FrozenRunRestored", text)
    if kind not in _EFFECTS:
        return None
    if kind == "Secret" and not lacks_secret(observed):
        return None  # Secrets aren't watched: it may well be there
    lost = "was deleted" if kind == "Secret" else "was deleted or has lost its labels"
    return JobEvent(WARNING, "ObjectRestored", f"{kind} {name} {lost} while the job has pods: Lockstep creates it again{_EFFECTS[kind]}")


_EFFECTS = {
    "Secret": "; pods that wait for it mount it within two minutes",
    "Service": "; without it nodes can't find each other by name",
    "NetworkPolicy": "",
    "StatefulSet": "; its pods end with it, and the job continues from its last checkpoint",
}


def _scaled_by_hand(observed: Observed, decision: Decision) -> Iterator[JobEvent]:
    """Yield an event if somebody else scaled or deleted the StatefulSet. It is set back in the same step; a stop that it began is finished
    first.
    """
    if observed.own_stateful_set is None or decision.running is None:
        return
    if is_terminating(observed.own_stateful_set):
        if not decision.starts:
            yield JobEvent(
                WARNING,
                "StatefulSetDeleted",
                f"StatefulSet {observed.name} is being deleted by somebody else: the job starts again when it is gone",
            )
        return
    ends = decision.stopping is not None and decision.stopping.reason is Reason.STOPPING and not is_stopped(observed)
    if decision.replicas != observed.replicas and decision.replicas and (observed.status.get("nodes") or not decision.starts):
        words = scaled_words(observed, f"it is set back to {decision.replicas}")
    else:
        words = scaled_words(observed, "the job starts again after this stop") if ends and observed.replicas == 0 else ""
    if words:
        yield JobEvent(WARNING, "StatefulSetScaled", words)


def _is_mounted(item: Object, observed: Observed) -> bool:
    """Secrets aren't watched; pods that run show that theirs is there, also to an operator that has just been started."""
    return item["kind"] == "Secret" and bool(observed.pods) and all(map(is_running, observed.pods))


def _is_fixed(item: Object) -> bool:
    """Never changed once it is there: frozen runs, and the Secret, which the operator may make but not change."""
    return bool(item.get("immutable")) or item["kind"] == "Secret"


def _key(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def _precise(item: Object, live: Object) -> Object:
    """The object as it is sent: another of that name, or a newer one, is a conflict and not overwritten."""
    exact = {"uid": live["metadata"]["uid"], "resourceVersion": live["metadata"]["resourceVersion"]}
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


def absent_claims(observed: Observed, decision: Decision) -> tuple[Object, ...]:
    # Made again for pods that wait for it where nothing can have been on it: no attempt ever ran.
    waits = decision.replicas > 0 and not observed.status.get("attempts") and not any(map(is_running, observed.pods))
    if not (decision.starts or waits) or decision.accepted is None:
        return ()
    return tuple(claims(decision.accepted.resolved, existing=observed.claims))


def with_log(
    observed: Observed, received: ReceivedReport | None, create: tuple[Object, ...], apply: tuple[Object, ...]
) -> tuple[tuple[Object, ...], tuple[Object, ...]]:
    """The last lines outlive the pods in ConfigMap x-log."""
    if received is None or not received.report.log:
        return create, apply
    item = last_lines(observed, received)
    live = observed.objects.get(_key(item))
    if live is None:
        return (*create, item), apply
    mine = owner_uid(live) == observed.uid
    return create, (*apply, _precise(item, live)) if mine and changes(item, live) else apply


def last_lines(observed: Observed, received: ReceivedReport) -> Object:
    """ConfigMap x-log."""
    metadata = {
        "name": log_name(observed.name),
        "namespace": observed.namespace,
        "labels": job_labels(observed.name),
        "ownerReferences": [job_reference(observed.name, observed.uid)],
    }
    text = "\n".join(received.report.log) + "\n"
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {LOG_KEY: text}}
