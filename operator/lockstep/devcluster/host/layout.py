"""Places of the embedded cluster: its folders, and the names and addresses it uses on the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.api.errors import ConfigError

RUN_ROOT = Path("/run/lockstep")


def cache_root() -> Path:
    """Folder of what is costly to make again: $LOCKSTEP_CACHE, else lockstep/ in the user's cache folder (as scripts/setup.py)."""
    own, base = os.environ.get("LOCKSTEP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(base) if base else Path.home() / ".cache") / "lockstep"


@dataclass(frozen=True)
class Layout:
    """One embedded cluster. `index` shifts its networks, so that several can be up at once.

    Networks: nodes 10.<89+index>.0.0/24 with the control plane on .1 and node i on .10+i; pods of node i 10.<140+index>.i.0/24;
    Services 10.<96>.<16·index>.0/20 as kube-proxy needs a range of its own in each cluster.
    """

    name: str
    index: int
    root: Path

    @property
    def state(self) -> Path:
        return self.root / "devcluster" / self.name

    @property
    def kubeconfig(self) -> Path:
        return self.state / "admin.kubeconfig"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def daemons(self) -> Path:
        """A record of each daemon that was started."""
        return self.state / "daemons"

    @property
    def starting(self) -> Path:
        """The lock that a daemon holds from its start until it has joined its control group."""
        return self.state / "starting"

    def log(self, daemon: str) -> Path:
        return self.logs / f"{daemon}.log"

    @property
    def sysctls(self) -> Path:
        """The machine's settings as they were before."""
        return self.state / "sysctls.json"

    @property
    def volumes(self) -> Path:
        """The data of claims, one folder a claim; it outlives `down`."""
        return self.state / "volumes"

    @property
    def python_volume(self) -> Path:
        """Folder that pods mount as their Python environment: the cached packages and a copy of the checkout's code."""
        return self.root / "python"

    @property
    def python_mount(self) -> Path:
        """Folder where the nodes see `python_volume`, read-only; an empty folder outside of them."""
        return self.state / "python"

    @property
    def cgroup(self) -> str:
        return f"lockstep-{self.name}"

    @property
    def run(self) -> Path:
        """Sockets and network namespaces: short paths on a file system that a reboot empties."""
        return RUN_ROOT / self.name

    @property
    def bridge(self) -> str:
        return f"lk-br{self.index}"

    @property
    def gateway(self) -> str:
        return f"10.{89 + self.index}.0.1"

    @property
    def node_network(self) -> str:
        return f"10.{89 + self.index}.0.0/24"

    @property
    def pod_network(self) -> str:
        return f"10.{140 + self.index}.0.0/16"

    @property
    def service_network(self) -> str:
        return f"10.96.{16 * self.index}.0/20"

    @property
    def service_address(self) -> str:
        """The ClusterIP of the Service `kubernetes`: the first of the range."""
        return f"10.96.{16 * self.index}.1"

    @property
    def server(self) -> str:
        return f"https://{self.gateway}:6443"

    def etcd_port(self, peer: bool = False) -> int:
        return 23790 + 2 * self.index + peer

    def node(self, number: int) -> NodeLayout:
        return NodeLayout(self, number)


@dataclass(frozen=True)
class NodeLayout:
    """One node: a network namespace with a containerd, a kubelet and a kube-proxy of its own."""

    cluster: Layout
    number: int

    @property
    def name(self) -> str:
        return f"{self.cluster.name}-{self.number}"

    @property
    def state(self) -> Path:
        return self.cluster.state / "nodes" / str(self.number)

    @property
    def run(self) -> Path:
        return self.cluster.run / str(self.number)

    @property
    def namespace(self) -> str:
        return f"lk{self.cluster.index}-node{self.number}"

    @property
    def link(self) -> str:
        """The host's end of the node's cable."""
        return f"lk{self.cluster.index}v{self.number}"

    @property
    def address(self) -> str:
        return f"10.{89 + self.cluster.index}.0.{10 + self.number}"

    @property
    def pod_network(self) -> str:
        return f"10.{140 + self.cluster.index}.{self.number}.0/24"

    @property
    def cgroup(self) -> str:
        return f"lockstep-{self.cluster.name}-{self.number}"

    @property
    def containerd_socket(self) -> Path:
        return self.run / "containerd.sock"


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
