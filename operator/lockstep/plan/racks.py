"""In which rack each node of a job is, by the label that its cluster names (pure)."""

from __future__ import annotations

from lockstep.plan.observed import Object, Observed


def racks_of(observed: Observed, nodes: int) -> tuple[str, ...]:
    """Of node i; empty text: its Node lacks the label. (): the cluster names no label, or not every pod is on a node yet."""
    label = _rack_label(observed)
    hosts = [pod["spec"].get("nodeName") for pod in (observed.pod(node) for node in range(nodes)) if pod is not None]
    if label is None or len(hosts) < nodes or not all(hosts):
        return ()
    labels = {node["metadata"]["name"]: node["metadata"].get("labels") or {} for node in observed.nodes}
    return tuple(str(labels.get(host, {}).get(label, "")) for host in hosts)


def _rack_label(observed: Observed) -> str | None:
    name = (observed.status.get("cluster") or {}).get("name")
    spec: Object = next((profile.get("spec", {}) for profile in observed.profiles if profile["metadata"]["name"] == name), {})
    label = (spec.get("nodes") or {}).get("rackLabel")
    return None if label is None else str(label)
