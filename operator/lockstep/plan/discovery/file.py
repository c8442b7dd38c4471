"""The whole cluster file from one look at a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from urllib.parse import urlsplit

from lockstep.api.objects import Object
from lockstep.api.quantity import number
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.storageclasses import JudgedClass, Shareable, judge_classes
from lockstep.plan.discovery.draft import Entry, left_out, stated, unknown, write
from lockstep.plan.discovery.nodes import Group, default_nodes, gpu_entries, gpu_groups, node_entries, pod_entries
from lockstep.plan.discovery.rails import is_unlimited, rdma_entries
from lockstep.plan.waiting.nodes import GIB, allocatable

AMOUNTS = ("memory", "cpu")
EXAMPLES = {"requests": {"memory": "128Gi", "cpu": 32}, "limits": {"memory": "256Gi", "cpu": 64}}
CHOICE = "a choice, not a finding"


def discovered(name: str, facts: ClusterFacts) -> tuple[str, list[Entry]]:
    """The text of clusters/NAME.yaml, and its entries."""
    entries = list(_entries(name, facts))
    return write(_header(name, facts), entries), entries


def _header(name: str, facts: ClusterFacts) -> list[str]:
    probed = [probe for probe in facts.probes if not probe.error]
    return [
        f"The cluster {name}, as `lockstep cluster discover {name}` saw it at {facts.server} (Kubernetes {facts.version}).",
        "The comment beside or above a value is its source. `unknown` marks what you may not see, or what the API doesn't say.",
        f"Every key is explained in docs/reference/trainingcluster.md. Next: read it, then `lockstep cluster lint {name}`.",
        (
            f"Probe pods looked at {', '.join(probe.node for probe in probed)}."
            if probed
            else "No pod was started: --probe also looks inside the nodes."
        ),
        *_limits(facts),
    ]


def _entries(name: str, facts: ClusterFacts) -> Iterator[Entry]:
    groups = gpu_groups(facts)
    network = list(rdma_entries(facts, groups))
    rdma = any(entry.key == "network.rdma.enabled" and entry.value is True for entry in network)
    yield stated("cluster.name", name, "")
    host = urlsplit(facts.server).hostname or ""
    if ":" in host or not host:
        yield left_out("cluster.api", host, "the API server's address; only a host name or IPv4 address can stand here")
    else:
        yield stated("cluster.api", host, "the API server of your context; deploy refuses another one")
    yield stated("cluster.namespace", facts.namespace, facts.namespace_from)
    yield left_out("cluster.description", "what people should know", "one line for `lockstep cluster list`")
    yield stated("cluster.platform", *_platform(facts))
    yield from node_entries(facts, groups)
    yield from _storage_entries(facts)
    yield from network
    yield from _security_entries(facts, rdma=rdma)
    yield from gpu_entries(facts, groups)
    yield from resource_entries(facts, groups)
    yield from pod_entries(facts, groups)
    yield left_out("image", "registry.example.com/team/image:tag", "unknown: any image with Python 3.10 or newer; or every job names one")


def _platform(facts: ClusterFacts) -> tuple[str, str]:
    if facts.is_openshift:
        return "openshift", "the API server has security.openshift.io"
    return "kubernetes", "the API server has no security.openshift.io, so no SCC hands out user ids"


def _storage_entries(facts: ClusterFacts) -> Iterator[Entry]:
    classes = judge_classes(facts)
    if not classes:
        listing = facts.list("StorageClass")
        why = listing.why_not or "the cluster has no storage class"
        yield unknown("storage.mode", "rwx", f"{why}. rwx (the default) needs a class whose claims are ReadWriteMany")
        yield unknown("storage.class_rwx", "nfs-csi", f"{why}; left out, claims get the default class")
        yield unknown("storage.class_rwo", "ceph-rbd", f"{why}; left out, claims get the default class")
        return
    shared = [judged for judged in classes if judged.shareable is Shareable.YES]
    yield from _shared_entries(shared, classes)
    yield _own_entry(shared, classes)
    yield left_out("storage.workspace_size", "100Gi", "/workspace: code, models, runs; the default")
    yield left_out("storage.datasets_size", "500Gi", "/datasets; the default")


def _shared_entries(shared: list[JudgedClass], classes: list[JudgedClass]) -> Iterator[Entry]:
    others = "; ".join(f"{judged.name}: {judged.why}" for judged in classes if judged.shareable is not Shareable.YES)
    if shared:
        yield stated("storage.mode", "rwx", f"class {shared[0].name} can be shared by all pods")
        more = f"; others that can: {', '.join(judged.name for judged in shared[1:])}" if shared[1:] else ""
        yield stated("storage.class_rwx", shared[0].name, f"{shared[0].why}{more}")
        return
    yield stated("storage.mode", "volumeClaimTemplates", f"no class was found that can be shared by all pods ({others})")
    doubtful = next((judged.name for judged in classes if judged.shareable is not Shareable.NO and not judged.is_default), "nfs-csi")
    yield unknown("storage.class_rwx", doubtful, "which class has ReadWriteMany volumes; if one does, mode: rwx is easier to work with")


def _own_entry(shared: list[JudgedClass], classes: list[JudgedClass]) -> Entry:
    single = [judged for judged in classes if judged not in shared] or classes
    best = next((judged for judged in single if judged.is_default), single[0])
    return stated("storage.class_rwo", best.name, f"{best.why}{'; the default class' if best.is_default else ''}")


def _security_entries(facts: ClusterFacts, *, rdma: bool) -> Iterator[Entry]:
    yield stated("security.service_account", "ml-dev-sa", "made by `lockstep deploy`; a choice, not a finding")
    if rdma and not is_unlimited(facts.probes):
        yield stated(
            "security.ipc_lock", True, f"NICs need locked memory, and nothing shows that the runtime lifted its limit{_sccs(facts)}"
        )
    elif rdma:
        yield left_out("security.ipc_lock", False, "not needed: network.rdma.memlock is unlimited")


def _sccs(facts: ClusterFacts) -> str:
    if not facts.is_openshift:
        return ""
    listing = facts.list("SecurityContextConstraints")
    if not listing.seen:
        return f"; which SCC allows it is unknown: {listing.why_not}"
    allowing = sorted(str(item["metadata"]["name"]) for item in listing.items if allows_ipc_lock(item))
    return f"; SCCs that allow IPC_LOCK: {', '.join(allowing) or 'none yet, lockstep deploy brings one'}"


def allows_ipc_lock(scc: dict[str, object]) -> bool:
    allowed = scc.get("allowedCapabilities") or []
    return isinstance(allowed, list) and ("IPC_LOCK" in allowed or "*" in allowed)


def _limits(facts: ClusterFacts) -> list[str]:
    """Quotas and limit ranges of the namespace, for the header: no key of the file holds them."""
    lines = []
    for kind, word in (("ResourceQuota", "quota"), ("LimitRange", "limit range")):
        listing = facts.list(kind)
        if not listing.seen:
            lines.append(f"{word}: unknown: {listing.why_not}")
        for item in listing.items:
            lines.append(f"{word} {item['metadata']['name']} of namespace {facts.namespace}: {_values(item)}")
    return lines


def _values(item: dict[str, dict[str, object]]) -> str:
    hard = item["spec"].get("hard")
    if isinstance(hard, dict):
        return ", ".join(f"{key} {value}" for key, value in sorted(hard.items()))
    limits = item["spec"].get("limits")
    limits_by_type = [
        f"{limit.get('type')} {name} {', '.join(f'{key} {value}' for key, value in sorted(limit[name].items()))}"
        for limit in (limits if isinstance(limits, list) else [])
        for name in ("min", "max", "default", "defaultRequest", "maxLimitRequestRatio")
        if limit.get(name)
    ]
    return "; ".join(limits_by_type) or "no limits"


def resource_entries(facts: ClusterFacts, groups: Sequence[Group]) -> Iterator[Entry]:
    """The section `resources`. Half of what the smallest node has is enough for a model's loading and leaves room for others.

    Limits stand there only where a pod without them would be refused, or be given others.
    """
    needed = limits_needed(facts)
    if not groups:
        yield from _not_known(facts, needed)
        return
    nodes = groups[0].nodes
    has = {resource: min(allocatable(node, resource) for node in nodes) for resource in AMOUNTS}
    bounds = {resource: _bounds(facts, groups[0], resource) for resource in AMOUNTS}
    requests = {resource: min([has[resource] / 2, *bounds[resource].values()]) for resource in AMOUNTS}
    source = f"half of what the smallest of these nodes has for pods ({has['cpu']:f} CPUs, {has['memory'] / GIB:.0f}Gi)"
    less = dict.fromkeys(who for resource in AMOUNTS for who, most in bounds[resource].items() if most == requests[resource])
    source += f", or as much as {' and '.join(less)} {'allows' if len(less) == 1 else 'allow'} a pod" if less else ""
    yield stated("resources.requests", {resource: _spelled(resource, requests[resource]) for resource in AMOUNTS}, f"{source}; {CHOICE}")
    if needed:
        limits = {resource: _spelled(resource, requests[resource]) for resource in AMOUNTS if resource in needed}
        yield stated("resources.limits", limits, f"{_together(needed)}. As much as is requested is {CHOICE}")


def _not_known(facts: ClusterFacts, needed: dict[str, list[str]]) -> Iterator[Entry]:
    """Nobody knows what such jobs need; but not what becomes of a pod that doesn't say it, either."""
    listing = facts.list("Node")
    why = "ranks on the CPU: say what your jobs need" if listing.seen else f"unknown: {listing.why_not}"
    yield left_out("resources.requests", EXAMPLES["requests"], why)
    if needed:
        yield unknown("resources.limits", EXAMPLES["limits"], f"what your jobs need, and it must be stated: {_together(needed)}")


def _together(needed: dict[str, list[str]]) -> str:
    return "; ".join(dict.fromkeys(why for reasons in needed.values() for why in reasons))


def limits_needed(facts: ClusterFacts) -> dict[str, list[str]]:
    """Resources, of CPU and memory, that a pod must state limits of → why."""
    reasons: dict[str, list[str]] = {}
    for limit_range in facts.list("LimitRange").items:
        limits = default_limits(limit_range)
        defaults = ", ".join(f"{resource} {limits[resource]}" for resource in sorted(limits) if resource in AMOUNTS)
        for resource in AMOUNTS:
            if resource in limits:
                why = f"limit range {limit_range['metadata']['name']} limits pods that state none to {defaults}"
                reasons.setdefault(resource, []).append(why)
    for quota in facts.list("ResourceQuota").items:
        for resource in AMOUNTS:
            if f"limits.{resource}" in (quota["spec"].get("hard") or {}):
                why = f"quota {quota['metadata']['name']} counts limits.{resource} and refuses pods that state none"
                reasons.setdefault(resource, []).append(why)
    return reasons


def default_limits(limit_range: Object) -> dict[str, str]:
    """Limits of a container that states none: a maximum is a default limit, too."""
    rules = _rules(limit_range, "Container")
    return {
        resource: str(value) for rule in rules for resource, value in {**(rule.get("max") or {}), **(rule.get("default") or {})}.items()
    }


def _rules(limit_range: Object, *kinds: str) -> list[Object]:
    """`kinds`: Container, Pod or PersistentVolumeClaim."""
    return [rule for rule in (limit_range.get("spec") or {}).get("limits") or [] if rule.get("type") in kinds]


def _bounds(facts: ClusterFacts, group: Group, resource: str) -> dict[str, Decimal]:
    """Quotas and limit ranges that bound a pod → how much they allow it; of a quota, each pod of a job of the default size has its part."""
    bounds: dict[str, Decimal] = {}
    for limit_range in facts.list("LimitRange").items:
        most = [rule.get("max") or {} for rule in _rules(limit_range, "Container", "Pod")]
        if stated_most := [number(each[resource]) for each in most if resource in each]:
            bounds[f"limit range {limit_range['metadata']['name']}"] = min(stated_most)
    pods = default_nodes(facts, group.gpus, len(group.nodes)).value
    for quota in facts.list("ResourceQuota").items:
        hard = quota["spec"].get("hard") or {}
        counted = [hard[key] for key in (resource, f"requests.{resource}", f"limits.{resource}") if key in hard]
        if counted:
            bounds[f"quota {quota['metadata']['name']}"] = min(number(text) for text in counted) / pods
    return bounds


def _spelled(resource: str, value: Decimal) -> str | int:
    """Rounded down; at least the smallest amount that means something."""
    if resource == "cpu":
        return int(value) if value >= 1 else f"{max(1, int(value * 1000))}m"
    return f"{int(value / GIB)}Gi" if value >= GIB else f"{max(1, int(value / 2**20))}Mi"
