"""Answers about each host for `hosts check`: its facts, its condition, its way from here, and knocks between hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.api.hosts import Host
from lockstep.plan.hosts.facts import HostFacts, checked

TEXT_MAX, LIST_MAX = 300, 64


@dataclass(frozen=True)
class Libraries:
    """Packages of the Python that a host's ranks use."""

    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Package → version, for those that ranks need."""
    problem: str = ""
    """Reason why that Python tells nothing; '' if it does."""


@dataclass(frozen=True)
class Torch:
    """Devices that a host's torch was built for."""

    cuda: str = ""
    """Version of CUDA; '' for a build without it."""
    architectures: tuple[str, ...] = ()
    """Such as sm_90, or compute_90 for code that a newer GPU's driver translates."""
    problem: str = ""


@dataclass(frozen=True)
class GpuError:
    """First line of one error (Xid) of one GPU in the kernel's log."""

    bus: str
    """PCI address without the function, such as 0000:3b:00."""
    number: int
    text: str


@dataclass(frozen=True)
class HostCondition:
    """HostCondition of a host beyond what a start asks for."""

    firewall: str = ""
    """`ufw` or `firewalld` where one is on; '' where none is known to be."""
    battery: bool = False
    discharging: bool = False
    sleeps: str = ""
    """Cause that puts it to sleep by itself, in words; '' if nothing is known to."""
    passwords: bool | None = None
    """True if sshd takes passwords; None: its files can't be read."""
    root_login: str = ""
    """sshd's PermitRootLogin."""
    open_files: int = -1
    """Files that a process may have open, at most; -1: as many as it likes."""
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
    with checked(name, answer) as known:
        return _read(known)


def _read(answer: dict[str, Any]) -> HostCondition:
    power, sshd, torch, libraries = answer["power"], answer["sshd"], answer["torch"], answer["libraries"]
    return HostCondition(
        firewall=str(answer["firewall"]) if answer["firewall"] in ("ufw", "firewalld") else "",
        battery=bool(power["battery"]),
        discharging=bool(power["discharging"]),
        sleeps=_sleeps(power),
        passwords=bool(sshd["passwords"]) if sshd["readable"] else None,
        root_login=_text(sshd["root"]) if sshd["readable"] else "",
        open_files=int(answer["nofile"]),
        shm=None if answer["shm"] is None else int(answer["shm"]),
        has_rdma=int(answer["rdma"]) > 0,
        nvidia_cards=int(answer["nvidiaCards"]),
        gpu_errors=read_gpu_errors(answer["gpuErrors"]),
        libraries=None if libraries is None else _libraries(libraries),
        torch=None if torch is None else _torch(torch),
    )


def read_gpu_errors(answer: list[list[Any]] | None) -> tuple[GpuError, ...] | None:
    """Read the errors of GPUs; None where the kernel's log wasn't read."""
    return None if answer is None else tuple(GpuError(_text(bus), int(number), _text(line)) for bus, number, line in answer)


def _sleeps(power: dict[str, Any]) -> str:
    """Reason why systemd would put the machine to sleep: a lid that is shut, or nobody at it."""
    if power["sleepMasked"]:
        return ""
    if power["lid"] and power["lidAction"] not in ("ignore", "lock"):
        return "its lid is shut"
    if power["idleAction"] in ("suspend", "hibernate", "hybrid-sleep", "suspend-then-hibernate", "sleep"):
        return "nobody uses it for a while"
    return ""


def _libraries(answer: dict[str, Any]) -> Libraries:
    if "problem" in answer:
        return Libraries(problem=_text(answer["problem"]))
    packages = {_text(name): _text(version) for name, version in list(answer["packages"].items())[:LIST_MAX]}
    return Libraries(_text(answer["python"]), packages)


def _torch(answer: dict[str, Any]) -> Torch:
    if "problem" in answer:
        return Torch(problem=_text(answer["problem"]))
    return Torch(_text(answer["cuda"]), tuple(map(_text, answer["architectures"][:LIST_MAX])))


def _text(value: object) -> str:
    return str(value)[:TEXT_MAX]
