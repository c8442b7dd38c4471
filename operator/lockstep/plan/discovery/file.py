"""The whole cluster file from one look at a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.storageclasses import JudgedClass, Shareable, judge_classes
from lockstep.plan.discovery.draft import Entry, left_out, stated, unknown, write
from lockstep.plan.discovery.nodes import gpu_entries, gpu_groups, node_entries, pod_entries
from lockstep.plan.discovery.rails import is_unlimited, rdma_entries
from lockstep.plan.discovery.resources import resource_entries


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
        f"Probe pods looked at {', '.join(probe.node for probe in probed)}."
        if probed
        else "No pod was started: --probe also looks inside the nodes.",
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
    yield left_out("cluster.description", "what people should know", "one line for `lockstep clusters`")
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
    """The section `storage`."""
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
    """The section `security`."""
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
