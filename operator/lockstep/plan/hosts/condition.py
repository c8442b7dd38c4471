"""Answers about each host for `doctor`: its facts, its condition, its way from here, and knocks between hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from lockstep.api.hosts import Host
from lockstep.plan.hosts.facts import HostFacts, read_answer
from lockstep_spec.codec import no_longer

TEXT_MAX, LIST_MAX = 300, 64
Text = Annotated[str, no_longer(TEXT_MAX)]
FEW = no_longer(LIST_MAX)


@dataclass(frozen=True)
class Libraries:
    """Packages of the Python that a host's ranks use."""

    python: Text = ""
    packages: Annotated[Mapping[str, Text], FEW] = field(default_factory=dict)
    """Package → version, for those that ranks need."""
    problem: Text = ""
    """Reason why that Python tells nothing; '' if it does."""


@dataclass(frozen=True)
class Torch:
    """Devices that a host's torch was built for."""

    cuda: Text = ""
    """Version of CUDA; '' for a build without it."""
    architectures: Annotated[tuple[Text, ...], FEW] = ()
    """Such as sm_90, or compute_90 for code that a newer GPU's driver translates."""
    problem: Text = ""


class GpuError(NamedTuple):
    """First line of one error (Xid) of one GPU in the kernel's log."""

    bus: Text
    """PCI address without the function, such as 0000:3b:00."""
    number: int
    text: Text


@dataclass(frozen=True)
class HostCondition:
    """HostCondition of a host beyond what a start asks for."""

    open_files: int
    """Files that a process may have open, at most; -1: as many as it likes."""
    firewall: Text = ""
    """`ufw` or `firewalld` where one is on; '' where none is known to be."""
    discharging: bool = False
    sleeps: Text = ""
    """Cause that puts it to sleep by itself, in words; '' if nothing is known to."""
    passwords: bool | None = None
    """True if sshd takes passwords; None: its files can't be read."""
    root_login: Text = ""
    """sshd's PermitRootLogin."""
    shm: int | None = None
    """Bytes of /dev/shm."""
    has_rdma: bool = False
    nvidia_cards: int = 0
    """NVIDIA's cards on the PCI bus, whether a driver has them or not."""
    gpu_errors: tuple[GpuError, ...] | None = ()
    """Errors of GPUs since the host's start, in their order; None: its kernel's log may not be read."""
    libraries: Libraries | None = None
    """None: the host has no environment for ranks."""
    torch: Torch | None = None
    """None: not asked, since there is no GPU."""


@dataclass(frozen=True)
class HostLook:
    """A host as it was found."""

    host: Host
    facts: HostFacts | None = None
    condition: HostCondition | None = None
    problem: str = ""
    """Reason why it could not be looked at; '' if it could."""
    noise: str = ""
    """Output of its login shell before any program runs."""
    seconds: float = 0.0
    """Seconds to the start of a program there, over the open connection."""
    clock_seconds: float = 0.0
    """Seconds by which its clock is ahead of this machine's, for certain; negative: behind; 0.0: not more than the answer took."""

    @property
    def name(self) -> str:
        return self.host.name


@dataclass(frozen=True)
class Knock:
    """A connection that one host tried to open to another."""

    sender: int
    receiver: int
    """Numbers of hosts, in the order of the file."""
    port: int
    purpose: str
    """Use of such a port by a job: `coordinator`, `rendezvous`, or `any`."""
    reason: str = ""
    """Reason why nobody answered; '' if the other host did."""


def read_condition(name: str, answer: Mapping[str, Any]) -> HostCondition:
    """Read the answer of `onhost/condition.py`. Raises BadAnswer for what is none."""
    return read_answer(HostCondition, name, answer)
