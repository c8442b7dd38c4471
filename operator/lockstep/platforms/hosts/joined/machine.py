"""Facts of this machine that a launch needs of every node: its address on the way to the others, interface, GPUs, Python and folders."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import json
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.platforms.jobs.machine import VISIBLE, gpus_here
from lockstep_spec.kernel import file_words

SIOCGIFCONF = 0x8912
IFREQ_BYTES, ADDRESS = 40, slice(20, 24)
"""A `struct ifreq` of 64-bit Linux: the interface's name, then its socket address, whose IPv4 address is here."""
INTERFACES_MAX = 1024
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


def machine_facts(address: str, workspace: Path, version: str, environment: Mapping[str, str] = os.environ) -> NodeMachine:
    """This machine, which the others reach at `address`."""
    named = environment.get(VISIBLE)
    gpus = map(str, range(gpus_here())) if named is None else (name.strip() for name in named.split(","))
    return NodeMachine(
        hostname=socket.gethostname(),
        version=version,
        python=sys.executable,
        workspace=str(workspace.resolve()),
        address=address,
        interface=interface_of(address),
        gpus=tuple(name for name in gpus if name not in {"", "-1"}),
        variables={name: environment[name] for name in KEPT if name in environment},
    )


_ATTEMPT = re.compile(r"(?:step-\d{1,12}\.)?a(\d{1,9})(?:\.json)?")
"""Names of commits, step-100.a3, and of the records from which commit an attempt started, a3.json."""


def highest_attempt(run_dir: Path) -> int:
    """Highest attempt of a job that this machine's folder of it tells; 0 if none. A number is never given twice, whichever machine is node
    0.
    """
    numbers = [0]
    for folder in (run_dir / "checkpoints", run_dir / "checkpoints" / "chain"):
        with contextlib.suppress(OSError):
            numbers += [int(match[1]) for path in folder.iterdir() if (match := _ATTEMPT.fullmatch(path.name))]
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        lines = (run_dir / "gang" / "attempts.jsonl").read_text(encoding="utf-8").splitlines()
        numbers += [int(json.loads(line)["attempt"]) for line in lines]
    return max(numbers)


def own_addresses() -> dict[str, str]:
    """Address → interface of this machine, loopback last."""
    pairs = [*_ipv4(), *_ipv6()]
    return dict(sorted(pairs, key=lambda pair: ipaddress.ip_address(pair[0]).is_loopback))


def interface_of(address: str) -> str:
    """Name of the interface that has this address; '' if none has."""
    return own_addresses().get(address, "")


def _ipv4() -> Iterator[tuple[str, str]]:
    answers = array.array("B", bytes(INTERFACES_MAX * IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(probe.fileno(), SIOCGIFCONF, struct.pack("iP", len(answers), answers.buffer_info()[0]))
    data = answers.tobytes()[: struct.unpack("iP", packed)[0]]
    for start in range(0, len(data), IFREQ_BYTES):
        request = data[start : start + IFREQ_BYTES]
        name = request.split(b"\0", 1)[0].decode(errors="replace")
        yield socket.inet_ntoa(request[ADDRESS]), name.partition(":")[0]


def _ipv6() -> Iterator[tuple[str, str]]:
    for line in file_words(Path("/proc/net/if_inet6")).splitlines():
        digits, *_, name = line.split()
        yield str(ipaddress.IPv6Address(bytes.fromhex(digits))), name


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
