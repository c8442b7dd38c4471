"""Reasons why pods of a job that have a node don't run, in words for whoever can change it (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lockstep.api.names import key_secret_name, node_index, run_name
from lockstep.api.objects import Object, condition, is_running, last_end
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, event_time, is_terminating, start_anew
from lockstep.plan.ship.openshift import REGISTRY, pull_command
from lockstep.plan.times import seconds_of
from lockstep_gang.contract.trouble import TroubleKind
from lockstep_spec.exits import SAVED, UNREACHABLE
from lockstep_spec.words import any_of, named, printable_line

if TYPE_CHECKING:
    from lockstep_gang.contract.report import Report

_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable", "ImageInspectError")
_NOT_YET = ("ContainerCreating", "PodInitializing")
_MOUNT_REASONS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_SANDBOX_REASON = "FailedCreatePodSandBox"
_NO_LOGIN_REASON = "FailedToRetrieveImagePullSecret"
PULL_EVENT = re.compile(r'Failed to pull image "[^"]*": (?P<why>.+)', re.DOTALL)
"""The message of the kubelet's Event of reason `Failed`. The container's own state says the same when the pod is next looked at, up to 10 s
later.
"""
_UNREACHED = any_of(
    r"dial tcp|timeout|timed out|deadline exceeded|connection re(fused|set)|unexpected EOF",
    r"no such host|server misbehaving|unreachable|no route to host",
    r"too ?many ?requests|\b429\b|\b50[0-4]\b",
    flags=re.IGNORECASE,
)
"""The registry was not reached, or has no time: the next pull may do better."""
_VAGUE = "Unable to attach or mount volumes"
DEFAULT_SCHEDULER = "default-scheduler"
CRASHES = 2
MOUNT_SECONDS = 15.0
"""A kubelet that hears late of what was made just before a pod has mounted it by then."""
_CACHE = any_of(
    r"failed to sync (configmap|secret) cache",
    r"object .* not registered",
    r"no relationship found between node",
    flags=re.IGNORECASE,
)
"""The kubelet's words for that, and the API server's where it has not yet seen itself that the pod is on that node."""
LINES, LINE_CHARACTERS = 3, 600
"""Lines and characters of the end of a container's log."""
CUT_OFF_HINTS = {
    TroubleKind.DNS.value: (
        "check the cluster's DNS (kubectl get pods -n kube-system -l k8s-app=kube-dns; OpenShift: oc get pods -n openshift-dns) and what"
        " keeps pods of namespace {namespace} from its port 53 (kubectl get networkpolicy -n {namespace})"
    ),
    TroubleKind.REFUSED.value: (
        "the operator's log says why (kubectl logs -n lockstep-system deployment/lockstep-operator); lockstep stop and resume start the job"
        " with a new certificate and token"
    ),
    TroubleKind.NETWORK.value: (
        "look for what keeps pods of namespace {namespace} apart (kubectl get networkpolicy -n {namespace}), then at the network of their"
        " Nodes"
    ),
    TroubleKind.NAME.value: (
        "check that the operator's Service exists (kubectl get service -A -l app.kubernetes.io/name=lockstep); lockstep deploy creates it"
        " again"
    ),
}
"""First word of what such an agent leaves → where to look; the most telling one first."""
FROM_ANOTHER_NAMESPACE = (
    f"an administrator of the image's namespace lets the job's namespace pull from it: {pull_command('JOBS_NAMESPACE', 'IMAGE_NAMESPACE')}"
)
_MISSING = re.compile(r'(secret|configmap) "([^"]+)" not found', re.IGNORECASE)
_MAKE = {
    "Secret": "kubectl create secret generic {name} -n {namespace} --from-literal=KEY=VALUE",
    "ConfigMap": "kubectl create configmap {name} -n {namespace} --from-file=FILE",
}
Hints = tuple[tuple[str, re.Pattern[str], str], ...]
"""(reason, what was said, what helps, with the namespace and the command that makes what is missing); the first that fits counts."""
_OF_ANY_POD: Hints = (
    ("VolumeNotMounted", re.compile(r'"(kube-root-ca|openshift-service-ca)\.crt" not found'),
        "kube-controller-manager puts it into every namespace within seconds: if it doesn't, an administrator looks there"),
    ("ContainerNotStarted", re.compile(r"runAsNonRoot", re.IGNORECASE),
        "the image names no user but root: OpenShift assigns one, plain Kubernetes doesn't; is the cluster file's platform right?"),
)  # fmt: skip
OF_A_JOB: Hints = (
    *_OF_ANY_POD,
    ("ContainerNotStarted", _MISSING, "create it in the job's namespace, or remove it from spec.env or envFrom ({make})"),
    ("ContainerNotStarted", re.compile(r"couldn't find key", re.IGNORECASE),
        "add the key, or correct it in spec.env (kubectl get secret,configmap -n {namespace})"),
    ("VolumeNotMounted", _MISSING, "create it in the job's namespace, or remove it from podTemplate.volumes ({make})"),
    ("VolumeNotMounted", re.compile(r"Multi-Attach error", re.IGNORECASE),
        "only one Node at a time can attach this volume (ReadWriteOnce), so pods of several can't share it: use a ReadWriteMany claim, or"
        " set storage.mode to PerPod; if another job's pod has it, delete that pod or wait for its end"),
    ("ImagePullFailed", _UNREACHED,
        "Kubernetes retries the pull; if it keeps failing, correct the registry in spec.image, or the network between the Node and the"
        " registry"),
    ("ImagePullFailed", re.compile(rf"{REGISTRY}.*(unauthorized|authentication|denied|\b40[13]\b)", re.IGNORECASE | re.DOTALL),
        FROM_ANOTHER_NAMESPACE),
    ("ImagePullFailed", re.compile(r"unauthorized|authentication|denied|\b40[13]\b", re.IGNORECASE),
        "put the registry's login into spec.imagePullSecrets, or into the cluster's pod.image_pull_secrets"),
    ("ImagePullFailed", re.compile(r"not found|unknown|\b404\b|InvalidImageName|parse", re.IGNORECASE),
        "correct spec.image, or the cluster's image"),
    ("ContainerFailed", re.compile(r"OOMKilled"), "raise spec.resources.memory, or without it resources.limits.memory of the cluster"),
)  # fmt: skip
OF_THE_OPERATOR: Hints = (
    *_OF_ANY_POD,
    *((reason, _MISSING, "create it in the operator's namespace") for reason in ("ContainerNotStarted", "VolumeNotMounted")),
)
OF_A_HELPER: Hints = (  # of a pod that a command makes to look at nodes or files: its spec isn't a person's
    *_OF_ANY_POD,
    *((reason, _MISSING, "create it in the pod's namespace") for reason in ("ContainerNotStarted", "VolumeNotMounted")),
    ("VolumeNotMounted", re.compile(r"Multi-Attach error", re.IGNORECASE),
        "only one Node at a time can attach this volume (ReadWriteOnce): wait for the end of the pod that has it"),
    ("ImagePullFailed", _UNREACHED,
        "Kubernetes retries the pull; if it keeps failing, look at the network between the Node and the registry"),
)  # fmt: skip


def is_scheduled(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName"))


def placed_at(pod: Object) -> float:
    """Time at which the pod got its node; its creation if that is unknown."""
    scheduled = condition(pod.get("status", {}), "PodScheduled")
    placed = scheduled.get("lastTransitionTime") if scheduled.get("status") == "True" else None
    since = placed or pod["metadata"].get("creationTimestamp")
    return seconds_of(since) if since else 0.0


def start_phase(pod: Object) -> str:
    """Return how far a pod is, in one word: what its first waiting container waits for, else the pod's phase."""
    states = (container.get("state", {}).get("waiting", {}).get("reason") for container in _containers(pod))
    return str(next(filter(None, states), pod.get("status", {}).get("phase", "Pending")))


def scheduler_message(pod: Object) -> str:
    """Return why the scheduler found no node for it; '' if it has one, or the scheduler has not looked yet."""
    scheduled = condition(pod.get("status", {}), "PodScheduled")
    return str(scheduled.get("message", "")) if scheduled.get("status") == "False" else ""


def undecided(pods: Iterable[Object]) -> str:
    """Return the message of pods that have no node and that the scheduler has said nothing about: one of another name may not be there."""
    name = next((pod["spec"].get("schedulerName", DEFAULT_SCHEDULER) for pod in pods), DEFAULT_SCHEDULER)
    if name == DEFAULT_SCHEDULER:
        return "the scheduler has not decided yet"
    return f"the scheduler {name} has not decided yet: does one of this name run, as podTemplate.schedulerName says?"


def waits_for_room(pod: Object) -> bool:
    """The scheduler, or a queue, lets it wait until there is room for it. A claim that isn't bound is another matter."""
    blocked = bool(scheduler_message(pod) or pod["spec"].get("schedulingGates"))
    return not is_scheduled(pod) and blocked and not waits_for_a_claim(pod)


def waits_for_a_claim(pod: Object) -> bool:
    return not is_scheduled(pod) and "persistentvolumeclaim" in scheduler_message(pod).lower()


def lacks_secret(observed: Observed) -> bool:
    """The kubelet says that the job's Secret, made once and not watched, is gone."""
    lost = re.compile(rf'secret "{re.escape(key_secret_name(observed.name))}[-0-9a-f]*" not found')
    waiting = [pod for pod in observed.pods if not is_running(pod)]
    return any(lost.search(event.get("message", "")) for pod in waiting for event in observed.events_of(pod["metadata"]["uid"]))


def _own_hint(observed: Observed, kind: str, name: str) -> str:
    """Return what helps if the object that a pod misses is one that Lockstep makes; else ''."""
    own = {"Secret": key_secret_name(observed.name), "ConfigMap": run_name(observed.name, "")}.get(kind)
    if own is None or not re.fullmatch(rf"{re.escape(own)}[-0-9a-f]*", name):
        return ""
    look = f"lockstep describe {observed.name} -n {observed.namespace}"
    return (
        f"Lockstep creates this {kind.lower()} itself, and again after a deletion; the kubelet mounts it within two minutes ({look}); if it"
        f" does not, {start_anew(observed)}"
    )


@dataclass(frozen=True)
class Trouble:
    """Obstacle that keeps one pod from running. Pods with the same are reported together."""

    reason: str
    text: str
    container: str = ""
    """Whose log says more."""


def why_not_started(observed: Observed, hints: Hints = OF_A_JOB) -> Notice | None:
    """Return what keeps pods that have a node from running, in one sentence for all of them; None while nothing is wrong."""
    groups: dict[Trouble, list[str]] = {}
    for pod in filter(is_scheduled, observed.pods):
        if is_terminating(pod):
            continue  # how its containers end is part of the stop that somebody asked for
        trouble = next(_troubles(observed, pod), None)
        if trouble is not None:
            lacks = _lacking_login(observed, pod) if trouble.reason == "ImagePullFailed" else ""
            groups.setdefault(replace(trouble, text=trouble.text + lacks), []).append(pod["metadata"]["name"])
    if not groups:
        return None
    return Notice(next(iter(groups)).reason, "; ".join(_explained(observed, trouble, pods, hints) for trouble, pods in groups.items()))


def why_cut_off(observed: Observed, report: Report | None) -> Notice | None:
    """Return what pods said before their agents ended because nobody heard them; those that are heard by now, or were when all ranks ran,
    are left out.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    ready_since = _ready_since(observed) if report is None else None
    for pod in observed.pods:
        words = _last_words(pod, ready_since)
        if words is not None and not is_heard(pod, report):
            groups.setdefault(words[0], []).append((str(pod["metadata"]["name"]), words[1]))
    if not groups:
        return None
    kind = next(name for name in CUT_OFF_HINTS if name in groups)
    pods = [pod for pod, _ in groups[kind]]
    hint = CUT_OFF_HINTS[kind].format(namespace=observed.namespace)
    return Notice(kind, f"{named('pod', pods)}: {groups[kind][0][1]}; {hint}")


def _ready_since(observed: Observed) -> str | None:
    """Time since which all ranks run, as status tells an operator that has just started and has no report yet."""
    ready = condition(observed.status, "RanksReady")
    return ready["lastTransitionTime"] if ready.get("status") == "True" else None


def _last_words(pod: Object, ready_since: str | None) -> tuple[str, str] | None:
    """(kind, sentence) of an agent that ended since nobody heard it, unless that was before all ranks ran."""
    for container in pod.get("status", {}).get("containerStatuses") or []:
        end = last_end(container)
        kind, _, text = str(end.get("message") or "").strip().partition(": ")
        is_over = ready_since is not None and str(end.get("finishedAt") or "") <= ready_since
        if end.get("exitCode") == UNREACHABLE and kind in CUT_OFF_HINTS and not is_over:
            return kind, printable_line(text)
    return None


def is_heard(pod: Object, report: Report | None) -> bool:
    """Return True if the report shows that the pod's agent is connected."""
    index = node_index(pod["metadata"]["name"])
    return report is not None and (index == 0 or any(node.node == index and node.connected for node in report.nodes))


def _explained(observed: Observed, trouble: Trouble, pods: list[str], hints: Hints) -> str:
    usual = next((hint for reason, pattern, hint in hints if reason == trouble.reason and pattern.search(trouble.text)), "")
    kind, name = missing_object(Notice(trouble.reason, trouble.text)) or ("", "")
    make = _MAKE.get(kind, "").format(name=name, namespace=observed.namespace)
    hint = _own_hint(observed, kind, name) or usual.format(namespace=observed.namespace, make=make)
    look = f"kubectl logs {pods[0]} -n {observed.namespace} -c {trouble.container}"
    return "; ".join(
        filter(None, (f"{named('pod', pods)}: {trouble.text}", hint, f"its log says more ({look})" if trouble.container else ""))
    )


def _containers(pod: Object) -> list[Object]:
    """Return the states of its containers, in the order of their starts."""
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _troubles(observed: Observed, pod: Object) -> Iterator[Trouble]:
    status = pod.get("status", {})
    if status.get("phase") == "Failed" and status.get("reason"):
        yield Trouble("PodFailed", f"{status['reason']}: {status.get('message', '')}")
    for container in _containers(pod):
        yield from _container_troubles(container)
    if not is_running(pod):
        yield from event_troubles(observed, pod)


def _lacking_login(observed: Observed, pod: Object) -> str:
    """The kubelet pulls on without a Secret of imagePullSecrets that isn't there, and the registry's answer doesn't say so."""
    messages = [event.get("message", "") for event in observed.events_of(pod["metadata"]["uid"]) if event.get("reason") == _NO_LOGIN_REASON]
    names = re.search(r"\(([^)]+)\)", messages[0]) if messages else None
    missing = f"Secret {names[1]} of imagePullSecrets" if names is not None else "a Secret of imagePullSecrets"
    return f"; {missing} is not in namespace {observed.namespace}: create it, Kubernetes retries the pull" if messages else ""


def _container_troubles(container: Object) -> Iterator[Trouble]:
    state, image, name = container.get("state", {}), container.get("image", ""), container.get("name", "")
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or (container.get("lastState", {}).get("terminated") if waiting else None)
    reason = waiting.get("reason", "")
    if reason in _PULL_REASONS:
        yield Trouble("ImagePullFailed", f"image {image} of container {name}: {waiting.get('message', reason)}")
    elif ended and ended.get("exitCode", 0) not in (0, SAVED, UNREACHABLE):
        words = _end_of((ended.get("message") or "").strip()) or ended.get("reason", "")
        yield Trouble("ContainerFailed", f"container {name} exited with code {ended['exitCode']}" + (f": {words}" if words else ""), name)
    elif reason and reason not in _NOT_YET:
        yield Trouble("ContainerNotStarted", f"container {name}: {reason}: {waiting.get('message', '')}")


def lasts(why: Notice, pod: Object) -> bool:
    """Return True if what keeps a pod from running (`why_not_started`) doesn't pass by itself, also without a missing object.

    A container that crashed once may do better, an image may be on its way, and volumes, networks and nodes may come late.
    """
    crashes = next((container.get("restartCount", 0) for container in _containers(pod) if any(_container_troubles(container))), 0)
    return why.reason in ("PodFailed", "ContainerNotStarted") or (why.reason == "ContainerFailed" and crashes >= CRASHES)


def missing_object(why: Notice) -> tuple[str, str] | None:
    """Return (kind, name) of the Secret or ConfigMap that a pod waits for by the kubelet's words; None for none. Other reasons may quote a
    log.
    """
    missing = _MISSING.search(why.message) if why.reason in ("VolumeNotMounted", "ContainerNotStarted") else None
    return None if missing is None else ({"secret": "Secret", "configmap": "ConfigMap"}[missing[1].lower()], missing[2])


def _end_of(message: str) -> str:
    """The last lines: without words of its own a container that failed leaves the end of its log."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return "; ".join(lines[-LINES:])[-LINE_CHARACTERS:]


def _passes(observed: Observed, pod: Object, event: Object) -> bool:
    """The kubelet has just not heard yet of an object that Lockstep made a moment before the pod, or not of any."""
    message = str(event.get("message", ""))
    if _CACHE.search(message):
        return True
    missing = _MISSING.search(message)
    if missing is None or not missing[2].startswith((f"{observed.name}-run-", f"{observed.name}-agents")):
        return False
    if ("ConfigMap", missing[2]) in observed.objects:
        return True
    at = event_time(event)
    return bool(at) and seconds_of(at) - placed_at(pod) < MOUNT_SECONDS


def event_troubles(observed: Observed, pod: Object) -> Iterator[Trouble]:
    """Yield what Events say of a pod's volumes, network and images, as far as it isn't over: they stay when it is.

    The kubelet tells in vague words, too, that it waits for what it told precisely before.
    """
    events = observed.events_of(pod["metadata"]["uid"])
    has_both = condition(pod.get("status", {}), "PodReadyToStartContainers").get("status") == "True"  # volumes, then network
    mounts = [event for event in events if event.get("reason") in _MOUNT_REASONS and not (has_both or _passes(observed, pod, event))]
    for event in sorted(mounts, key=lambda event: _VAGUE in event.get("message", "")):
        yield Trouble("VolumeNotMounted", str(event.get("message", "")))
    for event in events:
        if event.get("reason") == _SANDBOX_REASON and not has_both:
            yield Trouble("NetworkNotReady", str(event.get("message", "")))
        if (failed := _failed_pull(pod, event)) is not None:
            yield failed


def _failed_pull(pod: Object, event: Object) -> Trouble | None:
    """Returns why an image was not pulled while its container's state doesn't say so yet; None once it has another state, which then
    counts.
    """
    pull = PULL_EVENT.match(str(event.get("message", "")))
    if pull is None:
        return None
    status, path = pod.get("status", {}), event["involvedObject"].get("fieldPath")
    for field in ("initContainers", "containers"):
        for container in status.get("initContainerStatuses" if field == "initContainers" else "containerStatuses") or []:
            waiting = container.get("state", {}).get("waiting") or {}
            if path == f"spec.{field}{{{container.get('name')}}}" and waiting.get("reason") in _NOT_YET:
                return Trouble("ImagePullFailed", f"image {container.get('image')} of container {container['name']}: {pull['why']}")
    return None
