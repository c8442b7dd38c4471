"""Facts about a job's pods that only the cluster knows: who took a pod away, why one isn't there yet, and whether one on a lost Node is
replaced (pure).

Kubernetes never replaces a StatefulSet's pod on a Node that is silent: nobody knows whether it still runs. Here an old attempt is fenced by
its number, so whoever opts in (`restart.lostNodeSeconds`) may have it force-deleted. A pod whose agent node 0 still hears is not lost,
whatever its Node is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from lockstep.api.names import CONTAINER, NODES_MAX, node_index, pod_name
from lockstep.api.objects import Object, claim_names, condition, conditions_of, is_running, last_end
from lockstep.api.status import ConditionType
from lockstep.plan.observed import Observed, ReceivedReport, current_report, is_terminating, owner_uid
from lockstep.plan.times import seconds_of, timestamp
from lockstep.plan.waiting.containers import event_troubles, is_heard, is_scheduled, scheduler_message, undecided, waits_for_a_claim
from lockstep_gang.contract.reply import Fact, FactType
from lockstep_spec.words import clauses, listed, named, number_of

FACT_CHARACTERS = 256
SIGNALLED = 128
"""An exit code above it is a signal's number more, up to SIGNALS; beyond that, as 255, the container runtime knows no code."""
SIGNALS = 64
SAME_SECONDS = 5.0
"""Most seconds between a change of the StatefulSet by somebody and what its controller then did to a pod."""
WAITING_MAX = 64
"""Pods that a reply says more of: the coordinator's line names five."""
_PREEMPTIONS = frozenset({"PreemptionByScheduler", "Preempted", "Preempting"})
_EVICTIONS = frozenset({"Evicted", "NodeShutdown", "Terminated", "NodeAffinity"})
_QUEUE = "TerminationTarget"
"""Kueue's condition on a pod that it takes back for another workload."""


@dataclass(frozen=True)
class NodeTrouble:
    """Reason why a Node is taken for lost."""

    name: str
    reason: str
    """NotReady, Unreachable (its kubelet is silent) or Gone."""
    since: str | None = None
    """RFC 3339."""

    @property
    def text(self) -> str:
        """For example `Node b is NotReady since 2026-01-01T00:00:00Z`."""
        if self.reason == "Gone":
            return f"Node {self.name} is not in the cluster any more"
        return f"Node {self.name} is NotReady" + (f" since {self.since}" if self.since else "")


def node_trouble(pod: Object, nodes: Mapping[str, Object]) -> NodeTrouble | None:
    """Return why the pod's Node is taken for lost; None if it is Ready, or the pod has none yet. `nodes`: by name; empty if they can't be
    seen.
    """
    name = pod["spec"].get("nodeName")
    if not name or not nodes:
        return None
    return trouble_of(nodes[name]) if name in nodes else NodeTrouble(name, "Gone")


def trouble_of(node: Object) -> NodeTrouble | None:
    ready = condition(node.get("status", {}), "Ready")
    if not ready or ready["status"] == "True":
        return None
    reason = "Unreachable" if ready["status"] == "Unknown" else "NotReady"
    return NodeTrouble(node["metadata"]["name"], reason, ready.get("lastTransitionTime"))


def loss_of(pod: Object, nodes: Mapping[str, Object]) -> Fact | None:
    """The fact that the cluster takes this pod away, or has lost it; None as long as it may stay, and for one that somebody deletes
    (`deletion_of`).
    """
    status = pod.get("status", {})
    marks = {kind: mark for kind, mark in conditions_of(status).items() if mark["status"] == "True"}
    disruption, queue = marks.get("DisruptionTarget"), marks.get(_QUEUE)
    if queue is not None or (disruption or {}).get("reason") in _PREEMPTIONS or status.get("reason") in _PREEMPTIONS:
        return _marked(FactType.PREEMPTED, pod, queue or disruption)
    trouble = node_trouble(pod, nodes)
    if trouble is not None:
        return _fact(FactType.NODE_LOST, pod, trouble.reason, trouble.text, trouble.since)
    if disruption is not None or status.get("reason") in _EVICTIONS:
        kind = FactType.NODE_LOST if (disruption or {}).get("reason") == "DeletionByPodGC" else FactType.EVICTED
        return _marked(kind, pod, disruption)
    return _killed(pod)


def deletion_of(pod: Object, job: Object | None, stateful_set: Object | None) -> Fact | None:
    """The fact that somebody deletes, or has deleted, a pod which its StatefulSet is to have; None where that follows from what became of
    the job.
    """
    if job is None or stateful_set is None or is_terminating(job) or is_terminating(stateful_set):
        return None
    index = node_index(pod["metadata"]["name"])
    if owner_uid(pod) != stateful_set["metadata"]["uid"] or not 0 <= index < stateful_set["spec"].get("replicas", 1):
        return None
    asked_for, done = _asked_for(pod), (job.get("status") or {}).get("interference") or {}
    by_the_set = asked_for is not None and abs(seconds_of(done.get("time", asked_for)) - seconds_of(asked_for)) <= SAME_SECONDS
    why = str(done["message"]) if done and by_the_set else "it was deleted by hand, or by a program other than Lockstep"
    return _fact(FactType.DELETED, pod, "Deleted", why, asked_for)


def _asked_for(pod: Object) -> str | None:
    """Time of its deletion: deletionTimestamp is the end of its grace period. None if unknown."""
    at, grace = pod["metadata"].get("deletionTimestamp"), pod["metadata"].get("deletionGracePeriodSeconds") or 0
    return timestamp(seconds_of(at) - grace) if at else None


def _killed(pod: Object) -> Fact | None:
    """The last end of its container, if that was none of the agent's own."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    end = next((last_end(status) for status in statuses if status["name"] == CONTAINER), {})
    code, out_of_memory = end.get("exitCode", 0), end.get("reason") == "OOMKilled"
    if not out_of_memory and code <= SIGNALLED:
        return None
    if out_of_memory:
        limit = next(
            (c.get("resources", {}).get("limits", {}).get("memory") for c in pod["spec"].get("containers", []) if c["name"] == CONTAINER),
            None,
        )
        reached = f"at its limit of {limit}" if limit else "though it has no limit: the Node's memory was used up"
        kind, words = FactType.OUT_OF_MEMORY, f"the kernel killed its container {reached} (OOMKilled)"
    else:
        by_signal = f" (signal {code - SIGNALLED}), {end.get('reason', 'Error')}; by the kubelet, the kernel or by hand"
        unknown = f", {end.get('reason', 'Error')}: the container runtime doesn't know how; its machine may have been off"
        words = f"its container was ended with exit code {code}{by_signal if code <= SIGNALLED + SIGNALS else unknown}"
        kind = FactType.CONTAINER_ENDED
    fact = _fact(kind, pod, str(end.get("reason", "")), words, end.get("finishedAt"))
    return replace(fact, pod_uid=f"{fact.pod_uid}/{end.get('finishedAt', '')}")  # a pod's container may end so several times


def _marked(kind: FactType, pod: Object, mark: Object | None) -> Fact:
    """`mark`: the condition that says so; without one the pod's status does."""
    source = mark or pod.get("status", {})
    return _fact(kind, pod, source.get("reason", ""), source.get("message", ""), source.get("lastTransitionTime"))


def _fact(kind: FactType, pod: Object, reason: str, message: str, since: str | None = None) -> Fact:
    metadata = pod["metadata"]
    return Fact(
        type=kind, node=node_index(metadata["name"]), pod=metadata["name"], reason=reason, message=message.strip()[:FACT_CHARACTERS],
        pod_uid=metadata["uid"], node_name=pod["spec"].get("nodeName") or "", since=since,
    )  # fmt: skip


def losses(observed: Observed) -> dict[str, Fact]:
    """uid → the loss of every pod that is still there."""
    facts = ((str(pod["metadata"]["uid"]), _loss(pod, observed)) for pod in observed.pods)
    return {uid: fact for uid, fact in facts if fact is not None}


def _loss(pod: Object, observed: Observed) -> Fact | None:
    lost = loss_of(pod, observed.judged_nodes)
    return deletion_of(pod, observed.job, observed.stateful_set) if lost is None and is_terminating(pod) else lost


def facts_of(observed: Observed, remembered: Mapping[str, Fact]) -> tuple[Fact, ...]:
    """For the coordinator: losses first, those of pods that are gone too (`remembered`: uid → fact), then why pods don't run yet."""
    present = {str(pod["metadata"]["uid"]) for pod in observed.pods}
    gone = [fact for uid, fact in remembered.items() if uid not in present]
    waiting = sorted(_waiting(observed), key=lambda fact: bool(fact.node_name))  # pods without a node hold the start's time
    return (*gone, *losses(observed).values(), *waiting[:WAITING_MAX])


def _waiting(observed: Observed) -> Iterator[Fact]:
    for index in range(min(observed.replicas, NODES_MAX)):  # whoever may edit StatefulSets may write any number into one
        pod = observed.pod(index)
        if pod is None:
            yield Fact(FactType.WAITING, index, pod_name(observed.name, index), "NotCreated")
        elif (why := _why_waiting(observed, pod)) is not None:
            yield _fact(FactType.WAITING, pod, *why)


def _why_waiting(observed: Observed, pod: Object) -> tuple[str, str] | None:
    """(one word, the cluster's sentence); None when it runs."""
    if is_terminating(pod):
        return "Terminating", "an earlier pod of this name is still ending"
    if not is_scheduled(pod):
        message = scheduler_message(pod)
        if waits_for_a_claim(pod):
            return "ClaimNotBound", message
        return ("Unschedulable", message) if message else ("Scheduling", undecided([pod]))
    if is_running(pod):
        return None
    reason, message = _of_containers(pod.get("status", {}))
    trouble = next(event_troubles(observed, pod), None) if reason == "ContainerCreating" else None
    return (reason, message) if trouble is None else (trouble.reason, trouble.text)


def _of_containers(status: Object) -> tuple[str, str]:
    preparing = status.get("initContainerStatuses") or []
    ready = bool(preparing) and all((c.get("state", {}).get("terminated") or {}).get("exitCode") == 0 for c in preparing)
    for container in [*preparing, *(status.get("containerStatuses") or [])]:
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason not in ("", "PodInitializing", "ContainerCreating"):
            return reason, waiting.get("message", "")
    # All that is left to do between the init containers' end and the start is to pull the image.
    return ("ImagePulling", "") if ready else ("ContainerCreating", "")


def racks_of(observed: Observed, nodes: int) -> tuple[str, ...]:
    """Rack of each node; '' if its Node lacks the label. (): the cluster names no label, or not every pod is on a node yet."""
    cluster = observed.status_part("cluster").get("name")
    spec: Object = next((profile.get("spec", {}) for profile in observed.profiles if profile["metadata"]["name"] == cluster), {})
    label = (spec.get("nodes") or {}).get("rackLabel")
    hosts = [pod["spec"].get("nodeName") for pod in (observed.pod(node) for node in range(nodes)) if pod is not None]
    if label is None or len(hosts) < nodes or not all(hosts):
        return ()
    labels = {node["metadata"]["name"]: node["metadata"].get("labels") or {} for node in observed.nodes}
    return tuple(str(labels.get(host, {}).get(label, "")) for host in hosts)


FRESH_SECONDS = 30.0
"""A report that is older says nothing about who is connected now."""
LOOK_AGAIN_SECONDS = 10.0
LOOK_AGAIN_MAX_SECONDS = 600.0
SUGGESTED_SECONDS = 60
SHARED_MODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})


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
    obstacles = [*_on_lost_nodes(observed, current_report(observed, received), now), *_without_node(observed)]
    if not obstacles:
        return Verdict()
    obstacles.sort(key=lambda lost: _MOST_URGENT.index(lost.reason))
    at = [(max(lost.due, listening_since + FRESH_SECONDS), lost.pod) for lost in obstacles if lost.due is not None]
    looks = [min(due - now, LOOK_AGAIN_MAX_SECONDS) for due, _ in at if due > now]
    looks += [LOOK_AGAIN_SECONDS for lost in obstacles if lost.reason == "AgentConnected"]
    return Verdict(
        reason=obstacles[0].reason,
        message=clauses([lost.message for lost in obstacles]),
        replace=tuple(pod for due, pod in at if due <= now and pod is not None),
        again_seconds=min(looks, default=None),
    )


def _on_lost_nodes(observed: Observed, received: ReceivedReport | None, now: float) -> Iterator[_Lost]:
    seconds = observed.restart.get("lostNodeSeconds")
    for pod in observed.pods:
        trouble = node_trouble(pod, observed.judged_nodes)
        if trouble is not None:
            is_connected = received is not None and now - received.received <= FRESH_SECONDS and is_heard(pod, received.report)
            yield _lost(observed, pod, trouble, seconds, connected=is_connected)


def _is_own(observed: Observed, pod: Object) -> bool:
    """Return True if the job's own StatefulSet made the pod, and not an earlier job of this name or somebody without an operator."""
    made_by = observed.own_stateful_set
    return made_by is not None and owner_uid(pod) == made_by["metadata"]["uid"]


def _lost(observed: Observed, pod: Object, trouble: NodeTrouble, seconds: int | None, *, connected: bool) -> _Lost:
    name, where = pod["metadata"]["name"], f"-n {observed.namespace}"
    begun = f"{trouble.text}, and pod {name} was on it"
    force = f"kubectl delete pod {name} {where} --force --grace-period=0"
    bound = next(iter(_node_bound_claims(observed, pod)), None)
    if connected:
        answers = f"{trouble.text}, but the agent in pod {name} still answers, so Lockstep leaves the job alone"
        return _Lost("AgentConnected", f"{answers}: see why it is not ready (kubectl describe node {trouble.name})")
    if bound is not None:
        give_up = f"kubectl delete pvc {bound} {where} --wait=false; {force}"
        text = f"{begun}: only one Node can mount its claim {bound}: bring the Node back, or give up the data in this claim: {give_up}"
        return _Lost("NodeBoundVolume", text)
    if not _is_own(observed, pod):
        return _Lost("NodeLost", f"{begun}, left by an earlier job of this name: once the machine is off, give it up ({force})")
    if seconds is None:
        patch = f'{{"spec":{{"restart":{{"lostNodeSeconds":{SUGGESTED_SECONDS}}}}}}}'
        always = f"kubectl patch tj {observed.name} {where} --type merge -p '{patch}'"
        text = f"{begun}: bring the Node back; once its machine is off, have the pod replaced ({force}); to have Lockstep do so: {always}"
        return _Lost("NodeLost", text)
    since = seconds_of(trouble.since) if trouble.since else 0.0
    at = datetime.fromtimestamp(since + seconds, UTC).strftime("%H:%M:%SZ")
    return _Lost(
        "Replacing", f"{begun}: it is replaced {f'at {at}' if trouble.since else 'now'} (restart.lostNodeSeconds)", since + seconds, pod
    )


def _node_bound_claims(observed: Observed, pod: Object) -> list[str]:
    """Return the pod's claims that another Node can't mount as well."""
    modes = {name: set(observed.claims.get(name, {}).get("spec", {}).get("accessModes") or SHARED_MODES) for name in claim_names(pod)}
    return [name for name in modes if not modes[name] & SHARED_MODES]


def one_node_claims_shared(observed: Observed) -> str:
    """Return a warning about claims that several pods mount, though one Node at a time may: two pods can be on one Node, and not every
    driver enforces it.
    """
    mounts = Counter(name for pod in observed.pods for name in _node_bound_claims(observed, pod))
    shared = sorted(name for name, count in mounts.items() if count > 1)
    if not shared:
        return ""
    modes = listed(list(dict.fromkeys(mode for name in shared for mode in observed.claims[name]["spec"]["accessModes"])))
    return (
        f"warning: {number_of(mounts[shared[0]], 'pod')} mount claim {listed(shared)}, which is {modes}: pods on another Node may never"
        " start, or see another volume: use a ReadWriteMany claim, or set storage.mode to PerPod"
    )


def images_differ(observed: Observed) -> str:
    """Return a warning about pods whose trainers run different images, as their Nodes name them: '' if none do."""
    pods: dict[str, list[str]] = {}
    for pod in observed.pods:
        for container in pod.get("status", {}).get("containerStatuses") or []:
            digest = str(container.get("imageID") or "").rpartition("@")[2]
            if container.get("name") == CONTAINER and digest:
                pods.setdefault(digest, []).append(str(pod["metadata"]["name"]))
    if len(pods) < 2:
        return ""
    groups = clauses([f"{digest[:19]} in {named('pod', names)}" for digest, names in pods.items()])
    return f"warning: the pods run different images, as after a tag was pushed again ({groups}): name the image by its digest"


def _without_node(observed: Observed) -> Iterator[_Lost]:
    """Pods of a job that has run before which find no Node while one is lost."""
    waiting = [pod for pod in observed.pods if not is_scheduled(pod) and scheduler_message(pod)]
    if not waiting or not observed.status.get("attempts"):
        return
    lost = [trouble for node in observed.nodes if (trouble := trouble_of(node)) is not None]
    if not lost:
        return
    names = listed([pod["metadata"]["name"] for pod in waiting])
    fewer = observed.replicas - len(waiting)
    less = f", or go on with fewer (kubectl scale tj {observed.name} -n {observed.namespace} --replicas={fewer})" if fewer > 0 else ""
    nodes = clauses([trouble.text for trouble in lost])
    yield _Lost(
        "NoNodeFree", f"{nodes}, and pod {names} finds no other Node: bring it back, or add one{less}; condition PodsScheduled has more"
    )
