"""The whole cluster file from one look at a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.discovery.draft import Entry, left_out, stated, write
from lockstep.plan.discovery.nodes import gpu_entries, gpu_groups, node_entries, pod_entries
from lockstep.plan.discovery.rails import rdma_entries
from lockstep.plan.discovery.resources import resource_entries
from lockstep.plan.discovery.rights import limits_said, security_entries
from lockstep.plan.discovery.storage import storage_entries


def discovered(name: str, facts: ClusterFacts) -> tuple[str, list[Entry]]:
    """The text of clusters/NAME.yaml, and its entries."""
    entries = list(_entries(name, facts))
    return write(_header(name, facts), entries), entries


def _header(name: str, facts: ClusterFacts) -> list[str]:
    probed = [probe for probe in facts.probes if not probe.error]
    return [
        f"The cluster {name}, as `lockstep cluster discover {name}` saw it at {facts.server} (Kubernetes {facts.version}).",
        "Beside or above every value: where it came from. `unknown` marks what you may not see, or what the API doesn't say.",
        f"Every key is explained in docs/reference/trainingcluster.md. Next: read it, then `lockstep cluster lint {name}`.",
        f"Probe pods looked at {', '.join(probe.node for probe in probed)}."
        if probed
        else "No pod was started: --probe looks inside the nodes, too.",
        *limits_said(facts),
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
    yield from storage_entries(facts)
    yield from network
    yield from security_entries(facts, rdma=rdma)
    yield from gpu_entries(facts, groups)
    yield from resource_entries(facts, groups)
    yield from pod_entries(facts, groups)
    yield left_out("image", "registry.example.com/team/image:tag", "unknown: any image with Python 3.10 or newer; or every job names one")


def _platform(facts: ClusterFacts) -> tuple[str, str]:
    if facts.is_openshift:
        return "openshift", "the API server has security.openshift.io"
    return "kubernetes", "the API server has no security.openshift.io, so no SCC hands out user ids"
