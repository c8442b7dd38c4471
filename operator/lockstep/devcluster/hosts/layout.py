"""Places of the bed of hosts: its folders, and the names and addresses it uses on the machine."""

from __future__ import annotations

from pathlib import Path

from lockstep.devcluster.host.layout import default_layout

USERS = {"ada": 2001, "bob": 2002}
"""Name and number of everybody who may log in to every host, by one and the same key. Units of the first one run on without a login."""


class BedLayout:
    """One bed. `index` shifts its network, so that several can be up at once: 10.<70+index>.0.0/24, this machine on .1 and host i on
    .10+i.
    """

    def __init__(self, index: int, root: Path) -> None:
        self.index, self.root = index, root
        self.name = f"hosts{index or ''}"
        self.state = root / "devcluster" / self.name
        self.daemons = self.state / "daemons"
        self.starting = self.state / "starting"
        """The lock that a host holds from its start until it has joined its control group."""
        self.laptop = self.state / "laptop"
        """The key with which people log in, and the hosts' own keys."""
        self.code = self.state / "code"
        """Copy of Lockstep's own code, which every host sees read-only: the bed's own, so that other installations don't change it."""
        self.compiled_code = root / "devcluster" / "code"
        """Code that beds of this machine have used, compiled once for all of them."""
        self.shared = self.state / "shared"
        """A folder that every host sees at /shared, as if it were exported to all."""
        self.cluster_file = self.state / "cluster.yaml"
        self.bridge = f"lh-br{index}"
        self.gateway = f"10.{70 + index}.0.1"
        self.networks = (f"10.{70 + index}.0.0/24",)

    @property
    def identity(self) -> Path:
        return self.laptop / "id_ed25519"

    def host(self, number: int) -> HostLayout:
        return HostLayout(self, number)


class HostLayout:
    """One host: a network namespace, a control group, and a disk of its own over the common tree."""

    def __init__(self, bed: BedLayout, number: int) -> None:
        self.bed, self.number = bed, number
        self.name = f"bed{number}"
        self.disk = bed.state / "disks" / str(number)
        """Folder of what the host has written: `upper` of the overlay. It outlives a loss of power."""
        self.namespace = f"lh{bed.index}-{number}"
        self.link = f"lh{bed.index}v{number}"
        """This machine's end of the host's cable."""
        self.address = f"10.{70 + bed.index}.0.{10 + number}"
        self.cgroup = f"lockstep-{bed.name}-{number}"
        self.log = bed.state / "logs" / f"{number}.log"


def default_bed() -> BedLayout:
    """The bed that $LOCKSTEP_DEVCLUSTER numbers, as it does embedded clusters."""
    cluster = default_layout()
    return BedLayout(cluster.index, cluster.root)
