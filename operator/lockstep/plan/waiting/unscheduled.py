"""Reasons why pods of a job have no node, in one sentence for all of them (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lockstep.api.objects import Object, claim_names, go_on_words
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, is_terminating
from lockstep.plan.waiting.containers import OF_A_JOB, Hints, is_scheduled, scheduler_message, undecided, waits_for_a_claim, why_not_started
from lockstep.plan.waiting.nodes import named, why_no_node_fits

_INSUFFICIENT = re.compile(r"Insufficient ([^\s,.]+(?:\.[^\s,.]+)*)")
_OF_VOLUMES = re.compile(r"\d+ node\(s\) [^,.]*volume[^,.]*")
_NO_CLASS = re.compile(r'storageclass\.storage\.k8s\.io "([^"]*)" not found')


def why_waiting(observed: Observed, hints: Hints = OF_A_JOB) -> Notice | None:
    """Return what keeps pods from running, their containers first; None while nothing is wrong."""
    why = why_not_started(observed, hints) or (None if all(map(is_scheduled, observed.pods)) else why_unscheduled(observed))
    return None if why is None or why.reason == "Scheduling" else why


def why_unscheduled(observed: Observed) -> Notice:
    """One sentence for all pods that have no node."""
    waiting = [pod for pod in observed.pods if not is_scheduled(pod)]
    gated = why_gated(observed, waiting)
    if gated is not None:
        return gated
    unbound = [text for pod in waiting for text in _claims_not_bound(observed, pod)]
    if unbound:
        return Notice("ClaimNotBound", "; ".join(dict.fromkeys(unbound)))
    refused = [(pod, message) for pod in waiting if (message := scheduler_message(pod))]
    if not refused:
        return Notice("Scheduling", undecided(waiting))
    messages = list(dict.fromkeys(message for _, message in refused))
    return Notice("Unschedulable", "; ".join(_explained(observed, refused[0][0], messages)) or messages[0])


def _explained(observed: Observed, pod: Object, messages: list[str]) -> list[str]:
    """Pods of a job are alike, so that what keeps one off a node keeps all off it."""
    text = " ".join(messages)
    taken = {other["spec"].get("nodeName") for other in observed.pods if is_scheduled(other)}
    left = [node for node in observed.nodes if node["metadata"]["name"] not in taken]
    if not left and observed.nodes:
        return [
            f"the job needs one node per pod, and {named(sorted(taken))} already {'has' if len(taken) == 1 else 'have'} one of its pods"
        ]
    parts = why_no_node_fits(pod, left, list(dict.fromkeys(_INSUFFICIENT.findall(text))), observed.others, observed.unused)
    return parts + list(dict.fromkeys(f"the scheduler says: {reason}" for reason in _OF_VOLUMES.findall(text)))


def _claims_not_bound(observed: Observed, pod: Object) -> list[str]:
    # A class that binds late leaves claims Pending until the pod has a node: only the scheduler knows whether it waits for the claim.
    blamed = waits_for_a_claim(pod)
    names = claim_names(pod) if observed.sees_claims else []
    return [text for name in names if (text := _why_unbound(observed, name, blamed=blamed))]


def _why_unbound(observed: Observed, name: str, *, blamed: bool) -> str | None:
    claim = observed.claims.get(name)
    if claim is None and observed.status.get("attempts"):
        job, again = f"{observed.name} -n {observed.namespace}", go_on_words(observed.job)
        anew = f"if Lockstep creates it, start on an empty one (lockstep stop {job}), then `lockstep resume {job}` to {again}"
        return f"claim {name} was deleted with its data: create it; {anew}"
    if claim is None:
        helps = f"let the cluster name one that exists (kubectl get pvc -n {observed.namespace})"
        return f"claim {name} does not exist in namespace {observed.namespace}: create it, or {helps}"
    if is_terminating(claim):
        return f"claim {name} is being deleted: it is gone once no pod mounts it, and has to be created again then"
    phase = claim.get("status", {}).get("phase", "Pending")
    events = observed.events_of(claim["metadata"]["uid"])
    if phase == "Bound" or not (blamed or events):
        return None
    class_name = claim.get("spec", {}).get("storageClassName")
    detail = events[0]["message"] if events else f"its storage class is {class_name}"
    choose = "name one that exists (kubectl get storageclass)"
    if missing := _NO_CLASS.search(detail):
        why = f": there is no storage class {missing[1]}: {choose}"
    elif not (events or class_name):
        why = f": it has no storage class and the cluster has no default one: {choose}"
    else:
        why = f": {detail}: see what its provisioner says (kubectl describe pvc {name} -n {observed.namespace})"
    return f"claim {name} is {phase}{why}"


KUEUE_GATES = frozenset({"kueue.x-k8s.io/admission", "kueue.x-k8s.io/topology"})


def is_gated(pod: Object) -> bool:
    return bool(pod["spec"].get("schedulingGates"))


def why_gated(observed: Observed, waiting: Sequence[Object]) -> Notice | None:
    """Return why the scheduler may not place these pods yet; None if nothing holds them back."""
    gates = sorted({gate["name"] for pod in waiting for gate in pod["spec"].get("schedulingGates") or []})
    if not gates:
        return None
    queue = observed.job["spec"].get("queueName")
    if queue is not None and KUEUE_GATES.issuperset(gates):
        look = f"kubectl get localqueue,workloads -n {observed.namespace}"
        return Notice("Queued", f"the job waits in Kueue's queue {queue} until it fits the quota ({look})")
    return Notice("Queued", f"the scheduling gates {', '.join(gates)} hold the pods back: the controller that set them has to remove them")
