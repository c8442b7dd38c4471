"""Places of the embedded cluster: its folders, and the names and addresses it uses on the machine."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.environments import cache_root

RUN_ROOT = Path("/run/lockstep")


class Layout:
    """One embedded cluster. `index` shifts its networks, so that several can be up at once.

    Networks: nodes 10.<89+index>.0.0/24 with the control plane on .1 and node i on .10+i; pods of node i 10.<140+index>.i.0/24;
    Services 10.99.<16·index>.0/20 as kube-proxy needs a range of its own in each cluster.
    """

    def __init__(self, name: str, index: int, root: Path) -> None:
        self.name, self.index, self.root = name, index, root
        self.state = root / "devcluster" / name
        self.kubeconfig = self.state / "admin.kubeconfig"
        self.pki = self.state / "pki"
        self.logs = self.state / "logs"
        self.daemons = self.state / "daemons"
        """A record of each daemon that was started."""
        self.starting = self.state / "starting"
        """The lock that a daemon holds from its start until it has joined its control group."""
        self.sysctls = self.state / "sysctls.json"
        """The machine's settings as they were before."""
        self.volumes = self.state / "volumes"
        """The data of claims, one folder a claim; it outlives `down`."""
        self.python_volume = root / "python"
        """Folder that pods mount as their Python environment: the cached packages and a copy of Lockstep's own code."""
        self.python_mount = self.state / "python"
        """Folder where the nodes see `python_volume`, read-only; an empty folder outside of them."""
        self.cgroup = f"lockstep-{name}"
        self.run = RUN_ROOT / name
        """Sockets and network namespaces: short paths on a file system that a reboot empties."""
        self.bridge = f"lk-br{index}"
        self.gateway = f"10.{89 + index}.0.1"
        self.node_network = f"10.{89 + index}.0.0/24"
        self.pod_network = f"10.{140 + index}.0.0/16"
        self.service_network = f"10.99.{16 * index}.0/20"
        self.networks = (self.node_network, self.pod_network, self.service_network)
        self.service_address = f"10.99.{16 * index}.1"
        """The ClusterIP of the Service `kubernetes`: the first of the range."""
        self.server = f"https://{self.gateway}:6443"

    def log(self, daemon: str) -> Path:
        return self.logs / f"{daemon}.log"

    def etcd_port(self, peer: bool = False) -> int:
        return 23790 + 2 * self.index + peer

    def node(self, number: int) -> NodeLayout:
        return NodeLayout(self, number)


class NodeLayout:
    """One node: a network namespace with a containerd, a kubelet and a kube-proxy of its own."""

    def __init__(self, cluster: Layout, number: int) -> None:
        self.cluster, self.number = cluster, number
        self.name = f"{cluster.name}-{number}"
        self.state = cluster.state / "nodes" / str(number)
        self.run = cluster.run / str(number)
        self.namespace = f"lk{cluster.index}-node{number}"
        self.link = f"lk{cluster.index}v{number}"
        """The host's end of the node's cable."""
        self.address = f"10.{89 + cluster.index}.0.{10 + number}"
        self.pod_network = f"10.{140 + cluster.index}.{number}.0/24"
        self.cgroup = f"lockstep-{cluster.name}-{number}"
        self.containerd_socket = self.run / "containerd.sock"


DEFAULT_NAME = "lockstep"
NUMBER = "LOCKSTEP_DEVCLUSTER"
NUMBERS_MAX = 9


def default_layout() -> Layout:
    """The embedded cluster that $LOCKSTEP_DEVCLUSTER numbers, 0 to 9; unset: 0. Raises ConfigError."""
    number = os.environ.get(NUMBER, "0")
    if not number.isdecimal() or int(number) > NUMBERS_MAX:
        raise ConfigError(
            f"{NUMBER} is {number!r}, must be a number from 0 to {NUMBERS_MAX}: it tells the embedded clusters of one machine apart"
        )
    index = int(number)
    return Layout(name=f"{DEFAULT_NAME}{index or ''}", index=index, root=cache_root())
