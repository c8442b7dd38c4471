"""Why pods of a job don't run, in words of the person who can change it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

from lockstep.api.names import LABEL_HOSTNAME
from lockstep.plan.diff import amount
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Object, Observed

_INSUFFICIENT = re.compile(r"Insufficient ([^\s,.]+(?:\.[^\s,.]+)*)")
_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable", "ImageInspectError")
_NOT_YET = ("ContainerCreating", "PodInitializing")
_MOUNT_REASONS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
NAMED_NODES = 4


def is_scheduled(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName"))


def is_running(pod: Object) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return bool(statuses) and all("running" in status.get("state", {}) for status in statuses)


def why_not_created(observed: Observed) -> str | None:
    """The newest refusal of a pod by the API server (quota, admission, service account), as the StatefulSet's events tell it."""
    stateful_set = observed.stateful_set
    if stateful_set is None:
        return None
    events = [event for event in observed.events_of(stateful_set["metadata"]["uid"]) if event.get("reason") == "FailedCreate"]
    return str(events[0].get("message", "")) if events else None


def why_unscheduled(observed: Observed) -> Notice:
    """One sentence for all pods that have no node."""
    waiting = [pod for pod in observed.pods if not is_scheduled(pod)]
    messages = [message for pod in waiting if (message := _scheduler_message(pod))]
    unbound = [text for pod in waiting for text in _claims_not_bound(observed, pod)]
    if unbound:
        return Notice("ClaimNotBound", "; ".join(dict.fromkeys(unbound)))
    if not messages:
        return Notice("Scheduling", "the scheduler has not decided yet")
    lacking = _lacking(observed, waiting[0], messages[0])
    return Notice("Unschedulable", lacking or messages[0])


def _scheduler_message(pod: Object) -> str:
    conditions = pod.get("status", {}).get("conditions") or []
    return next((str(c.get("message", "")) for c in conditions if c["type"] == "PodScheduled" and c["status"] == "False"), "")


def _claims_not_bound(observed: Observed, pod: Object) -> list[str]:
    names = [v["persistentVolumeClaim"]["claimName"] for v in pod["spec"].get("volumes", []) if "persistentVolumeClaim" in v]
    # A class that binds late leaves claims Pending until the pod has a node: only the scheduler knows whether it waits for the claim.
    blamed = "persistentvolumeclaim" in _scheduler_message(pod).lower()
    return [text for name in names if (text := _why_unbound(observed, name, blamed=blamed))]


def _why_unbound(observed: Observed, name: str, *, blamed: bool) -> str | None:
    claim = observed.claims.get(name)
    if claim is None:
        return f"claim {name} does not exist in namespace {observed.namespace}: create it, or let the profile name one that exists"
    phase = claim.get("status", {}).get("phase", "Pending")
    events = observed.events_of(claim["metadata"]["uid"])
    if phase == "Bound" or not (blamed or events):
        return None
    class_name = claim.get("spec", {}).get("storageClassName")
    stated = f"its storage class is {class_name}" if class_name else "it has no storage class and the cluster has no default one"
    return f"claim {name} is {phase}: {events[0]['message'] if events else stated}"


def _lacking(observed: Observed, pod: Object, message: str) -> str:
    """The nodes that can never have the pod's resources, or those that have them in use; '' when it is something else."""
    resources = list(dict.fromkeys(_INSUFFICIENT.findall(message)))
    taken = {other["spec"].get("nodeName") for other in observed.pods}
    nodes = [node for node in observed.nodes if _may_use(pod, node) and node["metadata"]["name"] not in taken]
    parts = [text for resource in resources if (text := _lacking_resource(pod, nodes, resource))]
    return "; ".join(parts)


def _lacking_resource(pod: Object, nodes: list[Object], resource: str) -> str:
    asked = _requested(pod, resource)
    had = {
        node["metadata"]["name"]: amount(node.get("status", {}).get("allocatable", {}).get(resource, "0")) or Decimal(0) for node in nodes
    }
    poor = [name for name, there in had.items() if there < asked]
    if poor:
        return f"{_names(poor)} {'lacks' if len(poor) == 1 else 'lack'} {resource}"
    return f"{resource} is in use on {_names(list(had))}" if had else ""


def _names(nodes: list[str]) -> str:
    shown = ", ".join(sorted(nodes)[:NAMED_NODES])
    more = f" and {len(nodes) - NAMED_NODES} more" if len(nodes) > NAMED_NODES else ""
    return f"{'node' if len(nodes) == 1 else 'nodes'} {shown}{more}"


def _requested(pod: Object, resource: str) -> Decimal:
    asked = [c.get("resources", {}).get("requests", {}).get(resource, "0") for c in pod["spec"].get("containers", [])]
    return sum((amount(value) or Decimal(0) for value in asked), Decimal(0))


def _may_use(pod: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels", {})
    selected = all(labels.get(key) == value for key, value in (pod["spec"].get("nodeSelector") or {}).items())
    required = (pod["spec"].get("affinity") or {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms", [])
    return selected and (not terms or any(_host_fits(term, labels) for term in terms))


def _host_fits(term: Object, labels: dict[str, str]) -> bool:
    rules = [e for e in term.get("matchExpressions", []) if e["key"] == LABEL_HOSTNAME and e["operator"] == "In"]
    return all(labels.get(LABEL_HOSTNAME) in rule["values"] for rule in rules)


def why_not_started(observed: Observed) -> Notice | None:
    """The first reason why a scheduled pod's agent doesn't run; None while nothing is wrong."""
    found = (notice for pod in observed.pods if is_scheduled(pod) for notice in _pod_troubles(observed, pod))
    return next(found, None)


def _pod_troubles(observed: Observed, pod: Object) -> Iterable[Notice]:
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    if status.get("phase") == "Failed" and status.get("reason"):
        yield Notice("PodFailed", f"pod {name}: {status['reason']}: {status.get('message', '')}")
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        yield from _container_troubles(name, container)
    if not is_running(pod):
        for event in observed.events_of(pod["metadata"]["uid"]):
            if event.get("reason") in _MOUNT_REASONS:
                yield Notice("VolumeNotMounted", f"pod {name}: {event.get('message', '')}")
                return


def _container_troubles(pod: str, container: Object) -> Iterable[Notice]:
    state, image = container.get("state", {}), container.get("image", "")
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or (container.get("lastState", {}).get("terminated") if waiting else None)
    reason = waiting.get("reason", "")
    if reason in _PULL_REASONS:
        yield Notice("ImagePullFailed", f"pod {pod}: image {image} of container {container['name']}: {waiting.get('message', reason)}")
    elif ended and ended.get("exitCode", 0) != 0:
        told = (ended.get("message") or "").strip() or ended.get("reason", "")
        text = f"pod {pod}: container {container['name']} exited with code {ended['exitCode']}" + (f": {told}" if told else "")
        yield Notice("ContainerFailed", f"{text}; kubectl logs {pod} -c {container['name']} says more")
    elif reason and reason not in _NOT_YET:
        yield Notice("ContainerNotStarted", f"pod {pod}: container {container['name']}: {reason}: {waiting.get('message', '')}")
