"""Rails: further networks of every node, named and counted as on an RDMA cluster, and Multus to attach them to pods.

A rail is a bridge in every node, joined to the same rail's bridges of the others by cables through a network namespace of its own, where no
rule of the machine's firewall applies. The devices that count rails are pretended; their traffic is real, by sockets: gloo's, or NCCL's.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from lockstep.devcluster.host import network
from lockstep.devcluster.host.layout import Layout, NodeLayout
from lockstep.devcluster.node import cni_folder, pod_network_configuration, run_inside, write_once

MTU = 9000
CONFIGURATION = "00-multus.conf"
"""Before the pod network's own in the order of names: containerd takes the first."""
GROUP, KIND = "k8s.cni.cncf.io", "NetworkAttachmentDefinition"


def network_name(rail: int) -> str:
    """Name of the network of rail 1, 2, …: as clusters name them after the NIC's port."""
    return f"eno{4 + rail}np0-network"


def resource(rail: int) -> str:
    return f"openshift.io/eno{4 + rail}np0rdma"


def subnet(layout: Layout, rail: int) -> str:
    """A rail is a subnet of its own."""
    return f"10.{180 + layout.index}.{rail}.0/24"


def resources(rails: int) -> dict[str, int]:
    """One NIC a rail on a node, as where each has a single virtual function: one such pod a node."""
    return {resource(rail): 1 for rail in range(1, rails + 1)}


def attachment(layout: Layout, rail: int, namespace: str) -> dict[str, Any]:
    """The NetworkAttachmentDefinition. Without the annotation that names its resource: Multus would look for devices of a real plugin."""
    ipam = {"type": "host-local", "dataDir": str(layout.run / "rails"), "ranges": [[{"subnet": subnet(layout, rail)}]]}
    config = {"cniVersion": "0.4.0", "name": network_name(rail), "type": "bridge", "bridge": _bridge(rail), "mtu": MTU, "ipam": ipam}
    metadata = {"name": network_name(rail), "namespace": namespace}
    return {"apiVersion": f"{GROUP}/v1", "kind": KIND, "metadata": metadata, "spec": {"config": json.dumps(config)}}


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition of such attachments."""
    schema = {
        "type": "object",
        "properties": {"spec": {"type": "object", "properties": {"config": {"type": "string"}}}},
    }
    names = {
        "kind": KIND,
        "plural": "network-attachment-definitions",
        "singular": "network-attachment-definition",
        "shortNames": ["net-attach-def"],
    }
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def recorded(layout: Layout) -> int:
    """Number of rails that an earlier `up` has laid."""
    path = layout.state / "rails"
    return int(path.read_text()) if path.exists() else 0


def record(layout: Layout, rails: int) -> None:
    (layout.state / "rails").write_text(str(rails))


def _bridge(rail: int) -> str:
    """Name of the rail's bridge inside every node."""
    return f"rail{rail}"


def _hub(layout: Layout) -> str:
    """The namespace in which the cables of all nodes meet."""
    return f"lk{layout.index}-rails"


def lay(layout: Layout, nodes: list[NodeLayout], rails: int) -> None:
    """Make the bridges and cables of the first `rails` rails, those that aren't there yet. Addresses are given out for all nodes
    together.
    """
    hub = _hub(layout)
    (layout.run / "rails").mkdir(parents=True, exist_ok=True)
    network.create_namespace(hub)
    for rail in range(1, rails + 1):
        _make_bridge(hub, _bridge(rail))
        for node in nodes:
            _make_bridge(node.namespace, _bridge(rail))
            _make_cable(hub, node, rail)


def _make_bridge(namespace: str, name: str) -> None:
    if not _is_link(namespace, name):
        network.run("ip", "-n", namespace, "link", "add", name, "mtu", str(MTU), "type", "bridge")
    network.run("ip", "-n", namespace, "link", "set", name, "up")


def _make_cable(hub: str, node: NodeLayout, rail: int) -> None:
    outer, inner = f"r{rail}n{node.number}", f"cable{rail}"
    if not _is_link(node.namespace, inner):
        peer = ["type", "veth", "peer", "name", inner, "mtu", str(MTU), "netns", node.namespace]
        network.run("ip", "-n", hub, "link", "add", outer, "mtu", str(MTU), *peer)
    network.run("ip", "-n", hub, "link", "set", outer, "master", _bridge(rail), "up")
    network.run("ip", "-n", node.namespace, "link", "set", inner, "master", _bridge(rail), "up")


def _is_link(namespace: str, name: str) -> bool:
    return network.succeeds("ip", "-n", namespace, "link", "show", "dev", name)


def take_up(layout: Layout, nodes: list[NodeLayout]) -> None:
    """Remove the bridges in the nodes, and the hub with all cables."""
    subprocess.run(["ip", "netns", "delete", _hub(layout)], capture_output=True, check=False)
    for node in nodes:
        for rail in range(1, recorded(layout) + 1):
            if _is_link(node.namespace, _bridge(rail)):
                network.run("ip", "-n", node.namespace, "link", "delete", _bridge(rail))


def attach(node: NodeLayout, containerd_pid: int, programs: Path) -> None:
    """Let the node's pods get what their annotation names. Where containerd looks for plugins, Multus stands beside them, in this node
    only.
    """
    from lockstep.devcluster.certificates import Authority

    script = 'mountpoint -q "$1" || mount --bind "$0" "$1"'
    run_inside(node, containerd_pid, f"mount {programs}", script, str(programs), str(cni_folder()))
    kubeconfig = node.state / "multus.kubeconfig"
    Authority(node.cluster.pki).kubeconfig(kubeconfig, node.cluster.server, "multus", "system:masters", context=node.cluster.name)
    configuration = {
        "cniVersion": "0.4.0",
        "name": "pods-and-rails",
        "type": "multus",
        "binDir": str(cni_folder()),
        "kubeconfig": str(kubeconfig),
        "capabilities": {"portMappings": True},
        "delegates": [pod_network_configuration(node)],
    }
    write_once(node.state / "cni" / CONFIGURATION, json.dumps(configuration))


def detach(node: NodeLayout, containerd_pid: int) -> None:
    (node.state / "cni" / CONFIGURATION).unlink(missing_ok=True)
    script = 'while mountpoint -q "$1"; do umount -l "$1" || exit 1; done'
    run_inside(node, containerd_pid, f"unmount {cni_folder()}", script, "detach", str(cni_folder()))
