"""Why pods of a job that have a node don't run, in words of the person who can change it (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lockstep.plan.layers import Notice
from lockstep.plan.observed import Object, Observed
from lockstep.plan.openshift_images import REGISTRY, pull_command
from lockstep.plan.running import is_running
from lockstep.plan.times import seconds_of

_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable", "ImageInspectError")
_NOT_YET = ("ContainerCreating", "PodInitializing")
_MOUNT_REASONS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_SANDBOX_REASON = "FailedCreatePodSandBox"
_VAGUE = "Unable to attach or mount volumes"
NAMED_PODS = 4
FROM_ANOTHER_NAMESPACE = (
    f"whoever administers the image's namespace lets the job's namespace pull from it: {pull_command('JOBS_NAMESPACE', 'IMAGE_NAMESPACE')}"
)
_MISSING = re.compile(r'(secret|configmap) "[^"]+" not found', re.IGNORECASE)
_HINTS = (
    ("ContainerNotStarted", _MISSING, "make it in the job's namespace, or take it out of spec.env or envFrom"),
    ("ContainerNotStarted", re.compile(r"couldn't find key", re.IGNORECASE), "add the key, or correct it in spec.env"),
    ("VolumeNotMounted", _MISSING, "make it in the job's namespace, or take it out of podTemplate.volumes"),
    ("ImagePullFailed", re.compile(rf"{REGISTRY}.*(unauthorized|authentication|denied|\b40[13]\b)", re.IGNORECASE | re.DOTALL), FROM_ANOTHER_NAMESPACE),
    ("ImagePullFailed", re.compile(r"unauthorized|authentication|denied|\b40[13]\b", re.IGNORECASE), "spec.imagePullSecrets, or the profile's pod.image_pull_secrets, takes the registry's login"),
    ("ImagePullFailed", re.compile(r"not found|unknown|\b404\b|InvalidImageName|parse", re.IGNORECASE), "correct spec.image, or the profile's image"),
    ("ContainerFailed", re.compile(r"OOMKilled"), "raise resources.limits.memory of the profile"),
)  # fmt: skip
"""(reason, what was said, what helps); the first that fits counts."""


def is_scheduled(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName"))


def placed_at(pod: Object) -> float:
    """When it got its node; where nobody says, when it was made."""
    told = [c for c in pod.get("status", {}).get("conditions") or [] if c["type"] == "PodScheduled" and c["status"] == "True"]
    since = next((c["lastTransitionTime"] for c in told if c.get("lastTransitionTime")), pod["metadata"].get("creationTimestamp"))
    return seconds_of(since) if since else 0.0


def scheduler_message(pod: Object) -> str:
    """Why the scheduler found no node for it; '' when it has one, or the scheduler has not looked yet."""
    conditions = pod.get("status", {}).get("conditions") or []
    return next((str(c.get("message", "")) for c in conditions if c["type"] == "PodScheduled" and c["status"] == "False"), "")


def waits_for_room(pod: Object) -> bool:
    """The scheduler, or a queue, lets it wait until there is room for it. A claim that isn't bound is another matter."""
    blocked = bool(scheduler_message(pod) or pod["spec"].get("schedulingGates"))
    return not is_scheduled(pod) and blocked and not waits_for_a_claim(pod)


def waits_for_a_claim(pod: Object) -> bool:
    return not is_scheduled(pod) and "persistentvolumeclaim" in scheduler_message(pod).lower()


@dataclass(frozen=True)
class Trouble:
    """What keeps one pod from running. Two pods with the same are told together."""

    reason: str
    text: str
    container: str = ""
    """Whose log says more."""


def why_not_started(observed: Observed) -> Notice | None:
    """What keeps pods that have a node from running, all of them in one sentence; None while nothing is wrong."""
    groups: dict[Trouble, list[str]] = {}
    for pod in filter(is_scheduled, observed.pods):
        trouble = next(_troubles(observed, pod), None)
        if trouble is not None:
            groups.setdefault(trouble, []).append(pod["metadata"]["name"])
    if not groups:
        return None
    return Notice(next(iter(groups)).reason, "; ".join(_told(trouble, pods) for trouble, pods in groups.items()))


def _told(trouble: Trouble, pods: list[str]) -> str:
    shown = ", ".join(pods[:NAMED_PODS]) + (f" and {len(pods) - NAMED_PODS} more" if len(pods) > NAMED_PODS else "")
    hint = next((hint for reason, pattern, hint in _HINTS if reason == trouble.reason and pattern.search(trouble.text)), "")
    log = f"kubectl logs {pods[0]} -c {trouble.container} says more" if trouble.container else ""
    return "; ".join(filter(None, (f"pod{'s' if len(pods) > 1 else ''} {shown}: {trouble.text}", hint, log)))


def _troubles(observed: Observed, pod: Object) -> Iterator[Trouble]:
    status = pod.get("status", {})
    if status.get("phase") == "Failed" and status.get("reason"):
        yield Trouble("PodFailed", f"{status['reason']}: {status.get('message', '')}")
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        yield from _container_troubles(container)
    if not is_running(pod):
        yield from _event_troubles(observed.events_of(pod["metadata"]["uid"]))


def _container_troubles(container: Object) -> Iterator[Trouble]:
    state, image, name = container.get("state", {}), container.get("image", ""), container["name"]
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or (container.get("lastState", {}).get("terminated") if waiting else None)
    reason = waiting.get("reason", "")
    if reason in _PULL_REASONS:
        yield Trouble("ImagePullFailed", f"image {image} of container {name}: {waiting.get('message', reason)}")
    elif ended and ended.get("exitCode", 0) != 0:
        told = (ended.get("message") or "").strip() or ended.get("reason", "")
        yield Trouble("ContainerFailed", f"container {name} exited with code {ended['exitCode']}" + (f": {told}" if told else ""), name)
    elif reason and reason not in _NOT_YET:
        yield Trouble("ContainerNotStarted", f"container {name}: {reason}: {waiting.get('message', '')}")


def _event_troubles(events: Iterable[Object]) -> Iterator[Trouble]:
    """The kubelet tells in vague words, too, that it waits for what it told precisely before."""
    mounts = [event for event in events if event.get("reason") in _MOUNT_REASONS]
    for event in sorted(mounts, key=lambda event: _VAGUE in event.get("message", "")):
        yield Trouble("VolumeNotMounted", str(event.get("message", "")))
    for event in events:
        if event.get("reason") == _SANDBOX_REASON:
            yield Trouble("NetworkNotReady", str(event.get("message", "")))
