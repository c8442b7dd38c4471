"""Facts of this machine that a launch needs of every node: its address on the way to the others, interface, GPUs, variables, Python and
folders. A machine that joins imports nothing of the job's model.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lockstep.api.errors import ConfigError
from lockstep_machine.gpus import gpu_devices
from lockstep_machine.network import addresses, interface_of
from lockstep_spec.codec import at_least

if TYPE_CHECKING:
    from lockstep.api.job import TrainingJobSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
KEPT = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", VISIBLE)
"""Variables that the launch would set and that count as the person at this machine has set them."""


@dataclass(frozen=True)
class NodeMachine:
    """One machine, as it tells the launch."""

    hostname: str
    version: str
    """Lockstep's."""
    python: str
    """The interpreter of its ranks."""
    workspace: str
    """Absolute folder in which `workspace` stands for /workspace and `datasets` for /datasets."""
    address: str
    interface: str = ""
    """Interface that has the address; '' if none is known."""
    gpus: tuple[str, ...] = ()
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Those of KEPT that are set there."""

    @property
    def title(self) -> str:
        return f"{self.hostname} ({self.address})"


@dataclass(frozen=True)
class Joining:
    """Wish to take part: who, and as which node if the person said so."""

    machine: NodeMachine
    node: int | None = None
    attempts: Annotated[int, at_least(0)] = 0
    """Highest attempt of the job that its folder tells."""

    @property
    def identity(self) -> tuple[str, str]:
        """The same for a machine that comes back."""
        return self.machine.address, self.machine.workspace


def visible_gpus(named: str | None, present: Iterable[str]) -> tuple[str, ...]:
    """Return the GPUs that a CUDA_VISIBLE_DEVICES of this value names; those that are present where there is none."""
    return tuple(name for name in (present if named is None else map(str.strip, named.split(","))) if name not in {"", "-1"})


def stated_gpus(spec: TrainingJobSpec) -> str | None:
    """Return CUDA_VISIBLE_DEVICES as the job's own variables have it; None where they don't."""
    return next((variable.value for variable in spec.env if variable.name == VISIBLE and variable.value is not None), None)


def require_variables(names: Iterable[str], environment: Container[str], where: str = "") -> None:
    """Raise ConfigError for those that this shell lacks. `where`: words for the place, in which there is no cluster."""
    missing = [name for name in names if name not in environment]
    if missing:
        raise ConfigError(f"spec.env takes {', '.join(missing)} from the cluster, which is not there{where}: set it in this shell instead")


def machine_facts(address: str, workspace: Path, version: str, environment: Mapping[str, str] = os.environ) -> NodeMachine:
    """This machine, which the others reach at `address`."""
    return NodeMachine(
        hostname=socket.gethostname(),
        version=version,
        python=sys.executable,
        workspace=str(workspace.resolve()),
        address=address,
        interface=interface_of(address),
        gpus=visible_gpus(environment.get(VISIBLE), map(str, range(gpu_devices()))),
        variables={name: environment[name] for name in KEPT if name in environment},
    )


def own_addresses() -> list[str]:
    """Addresses of this machine, loopback last."""
    return sorted((address for _, address, _ in addresses()), key=lambda address: ipaddress.ip_address(address).is_loopback)


def parse_place(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, with [] around an IPv6 address. Raises ConfigError."""
    host, mark, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (
        not mark
        or not host
        or not port.isascii()
        or not port.isdecimal()
        or not 1 <= int(port) <= 65535
        or (":" in host and "[" not in text)
    ):
        raise ConfigError(f"{text!r} is no ADDRESS:PORT, such as 10.11.7.50:29600 or [fd00::1]:29600")
    return host, int(port)


def place_text(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def own_address(host: str) -> str:
    """The address of this machine that `host` names, as a number. Raises ConfigError when it is not this machine's, or not one that others
    reach.
    """
    own = own_addresses()
    usable = ", ".join(address for address in own if not ipaddress.ip_address(address).is_loopback and not address.startswith("fe80:"))
    offer = f"this machine has {usable}" if usable else "this machine has no address but loopback"
    try:
        number = str(ipaddress.ip_address(host))
        is_name = False
    except ValueError:
        is_name = True
        try:
            number = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise ConfigError(f"--at: the name {host} can't be resolved ({error.strerror}): {offer}") from None
    known = ipaddress.ip_address(number)
    if known.is_unspecified:
        raise ConfigError(f"--at: {host} means every interface: name the one address that the other machines reach; {offer}")
    if is_name and known.is_loopback:
        raise ConfigError(
            f"--at: {host} is {number} on this machine (/etc/hosts), which no other reaches: give the address as a number; {offer}"
        )
    if number not in own and not known.is_loopback:
        raise ConfigError(f"--at: {number} is no address of this machine: lockstep launch listens on its own; {offer}")
    return number
