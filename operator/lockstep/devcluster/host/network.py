"""Links, namespaces and routes: a bridge on the host, a network namespace and a cable for every node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from lockstep.devcluster.host.layout import Layout, NodeLayout

COMMENT = "lockstep-devcluster"


def run(*command: str) -> None:
    """Run a command; its error text becomes the exception's."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def succeeds(*command: str) -> bool:
    """Return True if the command ends with 0."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _link_exists(name: str) -> bool:
    return Path("/sys/class/net", name).exists()


def _filter_rules(layout: Layout) -> list[list[str]]:
    """Accept what crosses our bridge even where the host's default is to drop what it forwards."""
    tail = ["-m", "comment", "--comment", f"{COMMENT}-{layout.index}", "-j", "ACCEPT"]
    return [["FORWARD", "-i", layout.bridge, *tail], ["FORWARD", "-o", layout.bridge, *tail]]


def create_bridge(name: str, address: str) -> None:
    if not _link_exists(name):
        run("ip", "link", "add", name, "type", "bridge")
    run("ip", "address", "replace", f"{address}/24", "dev", name)
    run("ip", "link", "set", name, "up")


def let_through(layout: Layout) -> None:
    for rule in _filter_rules(layout):
        if not succeeds("iptables", "-w", "-C", *rule):
            run("iptables", "-w", "-I", *rule)


def create_namespace(name: str) -> None:
    if not succeeds("nsenter", f"--net=/run/netns/{name}", "true"):  # after a kill its file may be left
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        run("ip", "netns", "add", name)


def connect(namespace: str, link: str, address: str, bridge: str) -> None:
    """Make the namespace with its address on a cable to the bridge; `link` is this machine's end of it."""
    create_namespace(namespace)
    if not _link_exists(link):
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    run("ip", "link", "set", link, "master", bridge, "up")
    run("ip", "-n", namespace, "address", "replace", f"{address}/24", "dev", "eth0")
    for end in ("lo", "eth0"):
        run("ip", "-n", namespace, "link", "set", end, "up")


def create_node(node: NodeLayout, nodes: list[NodeLayout]) -> None:
    """Make the node's namespace with its cable to the bridge, and routes to every node's pods, also from the host."""
    connect(node.namespace, node.link, node.address, node.cluster.bridge)
    inside = ["ip", "-n", node.namespace]
    run(*inside, "route", "replace", "default", "via", node.cluster.gateway)
    run("nsenter", f"--net=/run/netns/{node.namespace}", "sysctl", "-qw", "net.ipv4.ip_forward=1")
    for other in nodes:
        if other.number != node.number:
            run(*inside, "route", "replace", other.pod_network, "via", other.address)
    run("ip", "route", "replace", node.pod_network, "via", node.address)


def remove_all(prefix: str, bridge: str) -> None:
    """Remove the cables and namespaces whose names begin so, and the bridge with its routes."""
    for path in sorted(Path("/sys/class/net").glob(f"{prefix}v*")):
        _delete_link(path.name)
    _delete_link(bridge)
    for path in sorted(Path("/run/netns").glob(f"{prefix}-*")) if Path("/run/netns").exists() else []:
        run("ip", "netns", "delete", path.name)


def remove_rules(layout: Layout) -> None:
    for rule in _filter_rules(layout) if shutil.which("iptables") else []:
        while succeeds("iptables", "-w", "-C", *rule):
            run("iptables", "-w", "-D", *rule)


def _delete_link(name: str) -> None:
    """Delete the link if it is there. It may vanish meanwhile: the kernel takes a dead namespace's links away in its own time."""
    try:
        if _link_exists(name):
            run("ip", "link", "delete", name)
    except RuntimeError:
        if _link_exists(name):
            raise


def forget_namespaces() -> None:
    """`ip netns add` mounts /run/netns on itself and leaves that: undone when nobody has a namespace there."""
    folder = Path("/run/netns")
    if folder.is_dir() and not any(folder.iterdir()):
        while succeeds("mountpoint", "-q", str(folder)):
            run("umount", str(folder))
