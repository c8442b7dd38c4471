"""Pods on Nodes that are lost: whether they are replaced, and what to do where they aren't (pure).

Kubernetes never replaces a StatefulSet's pod on a Node that is silent: nobody knows whether it still runs. Here an old attempt is fenced by its number, so
whoever opts in (`restart.lostNodeSeconds`) may have it force-deleted. A pod whose agent node 0 still hears is not lost, whatever its Node is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from lockstep.api.objects import Object, condition
from lockstep.api.status import ConditionType
from lockstep.plan.observed import Observed, ReceivedReport, current_report, owner_uid
from lockstep.plan.reconcile.podfacts import NodeTrouble, node_index, node_trouble, trouble_of
from lockstep.plan.times import seconds_of
from lockstep.plan.waiting.containers import is_scheduled, scheduler_message
from lockstep_spec.words import listed

FRESH_SECONDS = 30.0
"""A report that is older says nothing about who is connected now."""
LOOK_AGAIN_SECONDS = 10.0
LOOK_AGAIN_MAX_SECONDS = 600.0
SUGGESTED_SECONDS = 60
SHARED_MODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})
NAMED = 3


@dataclass(frozen=True)
class Verdict:
    """About all pods of a job. `reason` is '' when every Node is Ready; the message is stable as long as nothing changes."""

    reason: str = ""
    message: str = ""
    replace: tuple[Object, ...] = ()
    """Pods to delete by force now."""
    again_seconds: float | None = None


@dataclass(frozen=True)
class _Lost:
    reason: str
    message: str
    due: float | None = None
    """Time at which its pod is replaced, seconds since the epoch."""
    pod: Object | None = None


_MOST_URGENT = ("NodeBoundVolume", "NodeLost", "NoNodeFree", "Replacing", "AgentConnected")
"""Reasons, the one that a person can do most about first."""


def lost_nodes(observed: Observed, received: ReceivedReport | None, now: float, listening_since: float = 0.0) -> Verdict:
    """`listening_since`: when this operator began to take reports; it deletes nothing before the first ones must have come.

    Right after an outage of the API server what status says stays as it is.
    """
    if observed.unsettled_seconds > 0:
        before = condition(observed.status, ConditionType.NODES_HEALTHY)
        stays = before.get("status") == "False"
        return Verdict(before["reason"] if stays else "", before["message"] if stays else "", again_seconds=observed.unsettled_seconds)
    found = [*_on_lost_nodes(observed, current_report(observed, received), now), *_without_node(observed)]
    if not found:
        return Verdict()
    found.sort(key=lambda lost: _MOST_URGENT.index(lost.reason))
    at = [(max(lost.due, listening_since + FRESH_SECONDS), lost.pod) for lost in found if lost.due is not None]
    looks = [min(due - now, LOOK_AGAIN_MAX_SECONDS) for due, _ in at if due > now]
    looks += [LOOK_AGAIN_SECONDS for lost in found if lost.reason == "AgentConnected"]
    return Verdict(
        reason=found[0].reason,
        message=listed([lost.message for lost in found], NAMED, "; "),
        replace=tuple(pod for due, pod in at if due <= now and pod is not None),
        again_seconds=min(looks, default=None),
    )


def _on_lost_nodes(observed: Observed, received: ReceivedReport | None, now: float) -> Iterator[_Lost]:
    seconds = (observed.job["spec"].get("restart") or {}).get("lostNodeSeconds")
    for pod in observed.pods:
        trouble = node_trouble(pod, observed.judged_nodes)
        if trouble is not None:
            yield _lost(observed, pod, trouble, seconds, connected=_is_connected(pod, received, now))


def _is_own(observed: Observed, pod: Object) -> bool:
    """Return True if the job's own StatefulSet made the pod, and not an earlier job of this name or somebody without an operator."""
    made_by = observed.stateful_set
    return made_by is not None and owner_uid(made_by) == observed.uid and owner_uid(pod) == made_by["metadata"]["uid"]


def _is_connected(pod: Object, received: ReceivedReport | None, now: float) -> bool:
    if received is None or now - received.received > FRESH_SECONDS:
        return False
    index = node_index(pod["metadata"]["name"])
    return index == 0 or any(node.node == index and node.connected for node in received.report.nodes)


def _lost(observed: Observed, pod: Object, trouble: NodeTrouble, seconds: int | None, *, connected: bool) -> _Lost:
    name, where = pod["metadata"]["name"], f"-n {observed.namespace}"
    begun = f"{trouble.text}, and pod {name} was on it"
    force = f"kubectl delete pod {name} {where} --force --grace-period=0"
    bound = _node_bound_claim(observed, pod)
    if connected:
        look = f"kubectl describe node {trouble.name}"
        return _Lost("AgentConnected", f"{trouble.text}, yet the agent in pod {name} answers, so the job is left alone: {look}")
    if bound is not None:
        give_up = f"kubectl delete pvc {bound} {where} --wait=false; {force}"
        text = f"{begun}: its claim {bound} can be mounted by one Node only, so bring the Node back, or give up what only this claim holds: {give_up}"
        return _Lost("NodeBoundVolume", text)
    if not _is_own(observed, pod):
        return _Lost("NodeLost", f"{begun}, left by an earlier job of this name: once the machine is off, {force}")
    if seconds is None:
        patch = f'{{"spec":{{"restart":{{"lostNodeSeconds":{SUGGESTED_SECONDS}}}}}}}'
        always = f"kubectl patch tj {observed.name} {where} --type merge -p '{patch}'"
        text = f"{begun}: bring the Node back, or once its machine is off have the pod replaced: {force}; to have Lockstep do so: {always}"
        return _Lost("NodeLost", text)
    since = seconds_of(trouble.since) if trouble.since else 0.0
    at = datetime.fromtimestamp(since + seconds, UTC).strftime("%H:%M:%SZ")
    return _Lost(
        "Replacing", f"{begun}: it is replaced {f'at {at}' if trouble.since else 'now'} (restart.lostNodeSeconds)", since + seconds, pod
    )


def _node_bound_claim(observed: Observed, pod: Object) -> str | None:
    """The first claim of the pod that another Node can't mount as well."""
    names = [v["persistentVolumeClaim"]["claimName"] for v in pod["spec"].get("volumes") or [] if "persistentVolumeClaim" in v]
    modes = {name: set(observed.claims.get(name, {}).get("spec", {}).get("accessModes") or SHARED_MODES) for name in names}
    return next((name for name in names if not modes[name] & SHARED_MODES), None)


def _without_node(observed: Observed) -> Iterator[_Lost]:
    """Pods of a job that has run before which find no Node while one is lost."""
    waiting = [pod for pod in observed.pods if not is_scheduled(pod) and scheduler_message(pod)]
    if not waiting or not observed.status.get("attempts"):
        return
    lost = [trouble for node in observed.nodes if (trouble := trouble_of(node)) is not None]
    if not lost:
        return
    names = ", ".join(pod["metadata"]["name"] for pod in waiting[:NAMED])
    fewer = observed.replicas - len(waiting)
    less = f", or go on with fewer: kubectl scale tj {observed.name} -n {observed.namespace} --replicas={fewer}" if fewer > 0 else ""
    nodes = "; ".join(trouble.text for trouble in lost[:NAMED])
    yield _Lost(
        "NoNodeFree", f"{nodes}, and pod {names} finds no other Node: bring it back, or add one{less} (condition PodsScheduled has more)"
    )
