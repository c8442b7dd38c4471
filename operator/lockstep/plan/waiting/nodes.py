"""Reasons why nodes can't take a pod: each node's first obstacle, what a pod asks for as the scheduler counts it, and who holds that
(pure).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal
from typing import NamedTuple

from lockstep.api.names import LABEL_HOSTNAME, LABEL_JOB
from lockstep.api.objects import Object
from lockstep.api.quantity import number
from lockstep_spec import words
from lockstep_spec.words import clauses

GIB = Decimal(2**30)
_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_NOT_READY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_CONTROL_PLANE = "node-role.kubernetes.io/"
_OF_SEVERAL = {"is": "are", "has": "have", "lacks": "lack"}
Obstacle = tuple[str, str]
"""Words about one node: a verb of these, and the rest."""


def why_no_node_fits(
    pod: Object, nodes: Sequence[Object], used_up: Sequence[str], others: Sequence[Object], unused: frozenset[tuple[str, str]]
) -> list[str]:
    """Parts of a sentence; [] when nothing seen here explains it. `used_up`: resources that the scheduler found wanting somewhere.
    `others`: pods of anybody else. `unused`: as of `who_holds`.
    """
    candidates = [node for node in nodes if _is_wanted(pod, node)]
    if nodes and not candidates:
        return [_nobody_matches(pod)]
    groups: dict[Obstacle, list[str]] = defaultdict(list)
    free: list[str] = []
    for node in candidates:
        obstacle, name = _obstacle(pod, node), str(node["metadata"]["name"])
        (free if obstacle is None else groups[obstacle]).append(name)
    if len(groups) > 1:  # what keeps jobs off control planes is worth a word only when nothing else is
        groups = {obstacle: names for obstacle, names in groups.items() if _CONTROL_PLANE not in obstacle[1]}
    parts = [f"{named(names)} {verb if len(names) == 1 else _OF_SEVERAL[verb]} {rest}" for (verb, rest), names in groups.items()]
    for resource in used_up:
        if free and resource in requested_resources(pod):
            who = who_holds(others, free, resource, request(pod, resource), unused)
            parts.append(f"{resource} is in use on {named(free)}" + (f": {who}" if who else ""))
    return parts


def why_never(pod: Object, node: Object) -> str | None:
    """Return why this node could not take the pod even if nobody used it; None if it could."""
    if not _is_wanted(pod, node):
        return "is none of those that the job and its cluster name by node names and selectors"
    obstacle = _obstacle(pod, node)
    return None if obstacle is None else " ".join(obstacle)


def fitting_nodes(pod: Object, nodes: Sequence[Object]) -> list[str]:
    """Nodes that could ever take the pod, whoever uses them now."""
    return [str(node["metadata"]["name"]) for node in nodes if _is_wanted(pod, node) and _obstacle(pod, node) is None]


def contend(pod: Object, other: Object, nodes: Sequence[Object]) -> bool:
    """Return True if both pods could use one of the nodes, and want the same devices, or none. Without nodes their selectors decide."""
    devices, others = ({name for name in requested_resources(one) if "/" in name} for one in (pod, other))
    if not (devices & others if devices else not others):
        return False
    if nodes:
        return any(why_never(pod, node) is None and why_never(other, node) is None for node in nodes)
    wanted = pod["spec"].get("nodeSelector") or {}
    return all(wanted.get(key, value) == value for key, value in (other["spec"].get("nodeSelector") or {}).items())


def _is_wanted(pod: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels", {})
    selected = all(labels.get(key) == value for key, value in (pod["spec"].get("nodeSelector") or {}).items())
    terms = _terms(pod)
    return selected and (not terms or any(_term_fits(term, node) for term in terms))


def _terms(pod: Object) -> list[Object]:
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    return list((affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or [])


def _term_fits(term: Object, node: Object) -> bool:
    """Return True if the term allows the node by its host name, and by its own name, by which preflight leaves nodes out."""
    name, host = node["metadata"]["name"], node["metadata"].get("labels", {}).get(LABEL_HOSTNAME)
    rules = [(rule, host) for rule in term.get("matchExpressions", []) if rule["key"] == LABEL_HOSTNAME]
    rules += [(rule, name) for rule in term.get("matchFields", [])]
    return all(
        (value in rule.get("values", [])) is (rule["operator"] == "In") for rule, value in rules if rule["operator"] in ("In", "NotIn")
    )


def _nobody_matches(pod: Object) -> str:
    selector = ", ".join(f"{key}={value}" for key, value in (pod["spec"].get("nodeSelector") or {}).items())
    hosts = sorted({v for t in _terms(pod) for r in t.get("matchExpressions", []) if r["operator"] == "In" for v in r.get("values", [])})
    criteria = [f"the node selector {selector}" if selector else "", f"the cluster's nodes.gpuNodes ({', '.join(hosts)})" if hosts else ""]
    return f"no node of the cluster matches {' and '.join(filter(None, criteria)) or 'what the job and its cluster file ask of nodes'}"


def _obstacle(pod: Object, node: Object) -> Obstacle | None:
    return _taint_obstacle(pod, node) or _size_obstacle(pod, node)


def _taint_obstacle(pod: Object, node: Object) -> Obstacle | None:
    spec = node.get("spec", {})
    barring = barring_taints(node, pod["spec"].get("tolerations") or [])
    if any(taint["key"] in _NOT_READY for taint in barring):
        return "is", "not ready"
    if spec.get("unschedulable") or any(taint["key"] == _UNSCHEDULABLE for taint in barring):
        return "is", "cordoned"
    if not barring:
        return None
    taint = shown_taint(barring[0])
    return "has", f"the taint {taint}, which neither podTemplate.tolerations nor the cluster's pod.tolerations tolerates"


def _size_obstacle(pod: Object, node: Object) -> Obstacle | None:
    """The first resource of which the whole node has too little, whoever uses it."""
    for resource in requested_resources(pod):
        wants, amount = request(pod, resource), allocatable(node, resource)
        if amount == 0:
            return "lacks", resource
        if amount < wants:
            return "has", f"only {shown_amount(amount, resource)} of the {shown_amount(wants, resource)} {resource} that a pod asks for"
    return None


def allocatable(node: Object, resource: str) -> Decimal:
    """Amount that the node has for pods, in use or not."""
    return number(node.get("status", {}).get("allocatable", {}).get(resource))


def shown_amount(value: Decimal, resource: str) -> str:
    """Bytes as GiB, everything else as it is counted."""
    if resource in ("memory", "ephemeral-storage") or resource.startswith("hugepages-"):
        return f"{value / GIB:.1f}Gi"
    return f"{value.normalize():f}"


def named(nodes: list[str]) -> str:
    """`node a`, or `nodes a, b and 3 more`."""
    return words.named("node", sorted(nodes))


HARD = ("NoSchedule", "NoExecute")
PASSING = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Kubernetes sets and takes away these by itself: not ready, cordoned, short of memory."""


def barring_taints(node: Object, tolerations: Sequence[Object]) -> list[Object]:
    """Taints that keep off a pod with these tolerations, in the node's order."""
    taints = [taint for taint in node.get("spec", {}).get("taints") or [] if taint["effect"] in HARD]
    return [taint for taint in taints if not any(_tolerates(toleration, taint) for toleration in tolerations)]


def lasting_taints(node: Object, tolerations: Sequence[Object]) -> list[Object]:
    """Return those of `barring_taints` that somebody has put there."""
    return [taint for taint in barring_taints(node, tolerations) if not taint["key"].startswith(PASSING)]


def shown_taint(taint: Object) -> str:
    """Return the taint as `kubectl taint` takes it: dedicated=infra:NoSchedule."""
    return f"{taint['key']}{'=' + taint['value'] if taint.get('value') else ''}:{taint['effect']}"


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    same_value = toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")
    return bool(toleration["key"] == taint["key"]) and same_value


PODS = "pods"
"""A node takes only so many."""


def requested_resources(pod: Object) -> list[str]:
    """Resources that the pod asks for, devices before CPU and memory: they say more about which nodes were meant."""
    spec = pod["spec"]
    names = {
        name
        for c in (*spec.get("containers", []), *(spec.get("initContainers") or []), {"resources": {"requests": spec.get("overhead")}})
        for name in c.get("resources", {}).get("requests") or {}
    }
    return sorted((name for name in names if request(pod, name)), key=lambda name: ("/" not in name, name))


def request(pod: Object, resource: str) -> Decimal:
    """Amount as the scheduler counts it: the containers together with sidecars, or the largest init container with the sidecars before it,
    and the pod's overhead.
    """
    if resource == PODS:
        return Decimal(1)
    return effective(pod, resource, "requests") + number((pod["spec"].get("overhead") or {}).get(resource))


def effective(pod: Object, resource: str, which: str) -> Decimal:
    """`which`: requests or limits."""
    spec = pod["spec"]
    together = sum((_stated(container, resource, which) for container in spec.get("containers", [])), Decimal(0))
    sidecars = largest = Decimal(0)
    for container in spec.get("initContainers") or []:
        own = _stated(container, resource, which)
        if container.get("restartPolicy") == "Always":
            sidecars += own
            largest = max(largest, sidecars)
        else:
            largest = max(largest, sidecars + own)
    return max(together + sidecars, largest)


def _stated(container: Object, resource: str, which: str) -> Decimal:
    return number(((container.get("resources") or {}).get(which) or {}).get(resource))


JOB_KIND = "TrainingJob"
UNUSED = ", a dev environment in which nothing runs,"
_OVER = ("Succeeded", "Failed")
_HASH_LABEL = "pod-template-hash"
LEAST_SHARE = Decimal("0.1")
"""Least share of the request that a holder has to have. Whoever holds less (a DaemonSet's 100 m of CPU, say) isn't in the way."""


class Owner(NamedTuple):
    """Maker of a pod; without namespace, name and command where it is `unnamed`."""

    namespace: str
    name: str
    kind: str
    command: str
    """Frees all that its pods have."""


def who_holds(
    pods: Iterable[Object], nodes: Collection[str], resource: str, requested: Decimal, unused: frozenset[tuple[str, str]] = frozenset()
) -> str:
    """Return the owners of pods that have `resource` on these nodes, each with the command that frees it; '' if there are none.

    Idle dev environments (`unused`: namespace and name) come first, then those that have most.
    """
    held: dict[Owner, Decimal] = defaultdict(Decimal)
    for pod in pods:
        is_here = pod["spec"].get("nodeName") in nodes and pod.get("status", {}).get("phase") not in _OVER
        if is_here and (has := request(pod, resource)) and (pod["metadata"]["name"] or has >= requested * LEAST_SHARE):
            held[_owner(pod)] += has
    notes = {owner: UNUSED if owner.kind == JOB_KIND and owner[:2] in unused else "" for owner in held}
    holders = sorted((not notes[owner], -has, owner) for owner, has in held.items() if has >= requested * LEAST_SHARE)
    return clauses([_holding(owner, f"{-less.normalize():f}", notes[owner]) for _, less, owner in holders])


def _holding(owner: Owner, amount: str, note: str) -> str:
    if not owner.name:
        return f"{owner.kind} hold {amount}"
    return f"{owner.kind} {owner.namespace}/{owner.name}{note} holds {amount}" + (f" ({owner.command})" if owner.command else "")


def unnamed(pod: Object) -> Object:
    """Return what may be told in other namespaces of a pod: what it takes, on which Node, and if it is of a TrainingJob."""
    labels = {LABEL_JOB: ""} if LABEL_JOB in (pod["metadata"].get("labels") or {}) else {}
    takes = {key: pod["spec"][key] for key in ("nodeName", "containers", "initContainers", "overhead") if key in pod["spec"]}
    return {"metadata": {"name": "", "labels": labels}, "spec": takes, "status": {"phase": pod.get("status", {}).get("phase")}}


def _owner(pod: Object) -> Owner:
    metadata = pod["metadata"]
    namespace, name, labels = str(metadata.get("namespace", "")), str(metadata["name"]), metadata.get("labels") or {}
    if not name:
        return Owner("", "", f"{'jobs' if LABEL_JOB in labels else 'pods'} of other namespaces", "")
    if LABEL_JOB in labels:
        job = str(labels[LABEL_JOB])
        return Owner(namespace, job, JOB_KIND, f"""kubectl patch tj {job} -n {namespace} --type merge -p '{{"spec":{{"suspend":true}}}}'""")
    owner = next((o for o in metadata.get("ownerReferences", []) if o.get("controller")), None)
    if owner is None:
        return Owner(namespace, name, "Pod", f"kubectl delete pod {name} -n {namespace}")
    kind, name = str(owner["kind"]), str(owner["name"])
    if kind == "ReplicaSet" and name.endswith(f"-{labels.get(_HASH_LABEL)}"):
        kind, name = "Deployment", name.removesuffix(f"-{labels[_HASH_LABEL]}")
    if kind in ("StatefulSet", "Deployment", "ReplicaSet"):
        return Owner(namespace, name, kind, f"kubectl scale {kind.lower()} {name} -n {namespace} --replicas=0")
    suspend = f"""kubectl patch job {name} -n {namespace} --type merge -p '{{"spec":{{"suspend":true}}}}'"""
    return Owner(namespace, name, kind, suspend if kind == "Job" else "")
