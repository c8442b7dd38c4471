"""Hosts that ssh reaches, as a cluster file with `platform: hosts` lists them. No part of any CRD."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from lockstep.api.cluster import INTERFACE_PATTERN, InterfaceName
from lockstep.api.model import DnsName, Model, Rule, RulesBroken, list_map
from lockstep.api.shared import PlainVariable

HOST_NAME_PATTERN = r"^[A-Za-z0-9_]([-A-Za-z0-9_.]*[A-Za-z0-9_])?$"
USER_PATTERN = r"^[a-z_][-a-z0-9_.]*\$?$"
JUMP_PATTERN = r"^[A-Za-z0-9_][-A-Za-z0-9_.@:,]*$"
HOST_KEY_PATTERN = (
    r"^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(256|384|521)|sk-(ssh-ed25519|ecdsa-sha2-nistp256)@openssh\.com) [A-Za-z0-9+/]{40,1200}={0,2}$"
)
HOST_PATH_PATTERN = r"^(~|~/[^\x00-\x1f]*|/[^\x00-\x1f]*)$"
GPU_PATTERN = r"^([0-9]{1,3}|GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})$"
PORTS_PATTERN = r"^[0-9]{1,5}-[0-9]{1,5}$"
PYTHON_PATTERN = r"^3\.1[0-9]$"
INDEX_PATTERN = r"^https://[^\s@]+$"
GPU_WORDS = "a number of GPUs, or a list of their indexes and UUIDs such as [0, 1]"
GPUS_MAX = 64
PORTS_MIN = 16
"""Fewest ports of a range: the coordinator's, and one of each attempt's rendezvous, whose last one may still be closing."""
WORKSPACE_FOLDER, DATASETS_FOLDER = "~/lockstep/workspace", "~/lockstep/datasets"


def cluster_words(named: str) -> tuple[str, str]:
    """Return a cluster, as it was given on a command line, as one word of another one, and the option that leads there again."""
    typed = shlex.quote(named)
    return typed, f"--cluster {typed}"


def _numeric_address(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        address = ip_address(text)
        if not re.fullmatch(INTERFACE_PATTERN, text.partition("%")[2] or "none"):  # (of a link-local address)
            raise ValueError(text)
    except ValueError:
        raise PydanticCustomError("address", "must be a numeric address such as 192.168.1.100") from None
    if address.is_unspecified or address.is_multicast:
        raise PydanticCustomError("address", "must be an address of the host itself")
    return str(address)


def _count_or_gpus(value: Any) -> Any:
    """A number of GPUs, or a list of indexes and UUIDs, none twice."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= GPUS_MAX:
        return value
    if not isinstance(value, list) or not all(isinstance(item, int | str) and re.fullmatch(GPU_PATTERN, str(item)) for item in value):
        raise PydanticCustomError("gpus", "must be {words}", {"words": GPU_WORDS})
    names = [str(item) for item in value]
    if len(names) > GPUS_MAX or len(set(names)) < len(names):
        raise PydanticCustomError("gpus", "must name each GPU once, and at most {most}", {"most": GPUS_MAX})
    return names


HostPath = Annotated[str, Field(pattern=HOST_PATH_PATTERN, max_length=512)]
LocalPath = Annotated[str, Field(min_length=1, max_length=512)]
Port = Annotated[int, Field(ge=1, le=65535)]
GpuName = Annotated[str, Field(pattern=GPU_PATTERN)]


class HostsSection(Model):
    """Section `cluster` of a file of hosts: they have no API server and no namespace."""

    name: DnsName
    """Name of the file."""
    description: Annotated[str, Field(max_length=1024)] = ""
    """One line for `lockstep cluster list`."""


class HostDefaults(Model):
    """Keys of every host that doesn't say otherwise. What is left out here, too, is ssh's own configuration to say."""

    user: Annotated[str | None, Field(pattern=USER_PATTERN, max_length=64)] = None
    """User to log in as."""
    port: Port | None = None
    """Port of its sshd."""
    jump: Annotated[str | None, Field(pattern=JUMP_PATTERN, max_length=512)] = None
    """Host to go through, as ssh's ProxyJump takes it."""
    identity: HostPath | None = None
    """File of the private key on this machine. It never leaves it."""
    interface: InterfaceName | None = None
    """Interface that the ranks use. Left out: the one with the route to the other hosts."""
    python: HostPath | None = None
    """Python with the packages of the trainer, 3.11 or newer; for scripts alone 3.10 or newer. Left out: the environment that `lockstep
    hosts setup` makes.
    """
    workspace: HostPath = WORKSPACE_FOLDER
    """Folder that stands for /workspace."""
    datasets: HostPath = DATASETS_FOLDER
    """Folder that stands for /datasets."""


def login_words(name: str, *, user: str | None, port: int | None, jump: str | None = None, identity: str | None = None) -> str:
    """Words after `ssh` that lead to a host as its file states it, for a person to type: `-p 2222 ada@lab0`."""
    stated = (("-p", port), ("-J", jump), ("-i", identity))
    options = [
        f"{flag} {value if str(value).startswith('~/') and ' ' not in str(value) else shlex.quote(str(value))}"
        for flag, value in stated
        if value is not None
    ]
    return " ".join([*options, f"{user}@{name}" if user else name])


class Host(HostDefaults):
    """One machine: a node of every job that runs there."""

    name: Annotated[str, Field(pattern=HOST_NAME_PATTERN, max_length=64)]
    """Name of the host, as `ssh NAME` takes it."""
    address: Annotated[str | None, Field(max_length=64), AfterValidator(_numeric_address)] = None
    """Numeric address at which the other hosts reach it. State at least one, if there are several hosts: the others' are found by their
    route to it.
    """
    host_key: Annotated[str | None, Field(pattern=HOST_KEY_PATTERN, max_length=2048)] = None
    """The one key that it may have: type and base64, as known_hosts has it. `lockstep hosts setup` writes it. Left out: your known_hosts
    counts.
    """
    gpus: Annotated[Annotated[int, Field(ge=0, le=GPUS_MAX)] | list[GpuName] | None, BeforeValidator(_count_or_gpus)] = None
    """Indexes or UUIDs of its GPUs that jobs may take, or a number: so many free ones. Left out: all."""
    micro_batch: Annotated[int | None, Field(ge=1, le=4096)] = None
    """Samples that each of its ranks takes at once. Left out: the job's microBatchSize, or measured with balance Measured."""
    env: Annotated[list[PlainVariable], Field(max_length=64, json_schema_extra=list_map())] = []
    """Variables of its ranks. A job's own win."""

    RULES = (
        Rule(
            "",
            "env may not set variables that begin with LOCKSTEP_: those are Lockstep's own",
            lambda host: not any(variable.name.startswith("LOCKSTEP_") for variable in host.env),
            field="env",
        ),
    )


class HostEnvironment(Model):
    """Python packages of ranks, the same on every host."""

    lock: LocalPath = "requirements/train.lock"
    """File of pinned packages with their hashes, on this machine. `lockstep hosts setup` makes an environment of it on every host."""
    python: Annotated[str | None, Field(pattern=PYTHON_PATTERN, max_length=4)] = None
    """Version of Python of the environments: the host's own where it has that one, else one is brought. Left out: the host's own from 3.11
    on, else 3.12.
    """
    index: Annotated[str | None, Field(pattern=INDEX_PATTERN, max_length=512)] = None
    """Package index that the hosts reach, by https. Left out: PyPI. Its certificate is checked against those that each host trusts."""
    wheelhouse: LocalPath | None = None
    """Folder of wheels on this machine, sent to hosts that reach no index. What it lacks is downloaded into it."""


class HostsCluster(Model):
    """Hosts in the order of their nodes. The first has the coordinator, so choose one that stays on."""

    hosts: Annotated[list[Host], Field(min_length=1, max_length=256, json_schema_extra=list_map())]
    """The hosts."""
    ports: Annotated[str, Field(pattern=PORTS_PATTERN, max_length=11)] = "29400-29499"
    """Ports of the coordinator and of the ranks' rendezvous, first and last. NCCL and gloo take any port between hosts."""
    environment: HostEnvironment = HostEnvironment()
    away_seconds: Annotated[int, Field(ge=0, le=30 * 86400)] = 86400
    """Seconds for which a host that was there, and is off, is waited for."""

    RULES = (
        Rule(
            "",
            f"ports must be FIRST-LAST with at least {PORTS_MIN} ports from 1024 to 65535",
            lambda cluster: 1024 <= cluster.port_range[0] <= cluster.port_range[1] - PORTS_MIN + 1 <= 65536 - PORTS_MIN,
            field="ports",
        ),
    )

    @model_validator(mode="after")
    def _addresses_differ(self) -> Self:
        if problems := tuple(_address_problems(self.hosts)):
            raise RulesBroken(problems)
        return self

    @property
    def port_range(self) -> tuple[int, int]:
        """First and last port."""
        first, _, last = self.ports.partition("-")
        return int(first), int(last)

    @property
    def names(self) -> list[str]:
        """Names of the hosts, in the order of their nodes."""
        return [host.name for host in self.hosts]

    @property
    def gpu_counts(self) -> dict[str, int | None]:
        """GPUs of each host that jobs may take, by its name. None: not stated."""
        return {host.name: len(host.gpus) if isinstance(host.gpus, list) else host.gpus for host in self.hosts}

    @property
    def least_gpus(self) -> int | None:
        """GPUs that a job may take on every host. None: some host doesn't state its own."""
        counts = self.gpu_counts.values()
        stated = [count for count in counts if count is not None]
        return min(stated) if len(stated) == len(counts) else None

    def host(self, name: str) -> Host:
        """Return the host of this name. Raises KeyError."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)


def _address_problems(hosts: list[Host]) -> Iterator[Rule]:
    """Two hosts at one address, and a loopback address that other machines can't reach."""
    first: dict[str, str] = {}
    for host in hosts:
        if host.address is None:
            continue
        if host.address in first:
            yield Rule("", f"hosts {first[host.address]} and {host.name} have the same address {host.address}", None, "hosts")
        first.setdefault(host.address, host.name)
    loopback = [name for address, name in first.items() if ip_address(address).is_loopback]
    if loopback and len(loopback) < len(first):
        message = f"the address of {', '.join(loopback)} is the loopback, which the other hosts can't reach: state the one that they can"
        yield Rule("", message, None, "hosts")
