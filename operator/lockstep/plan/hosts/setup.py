"""Parts that each host lacks of an environment for ranks, and what makes up for it (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from posixpath import join
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.hosts import Host
from lockstep.plan.cluster.finding import Finding, failed, warning
from lockstep.plan.hosts.facts import Version, checked
from lockstep.plan.hosts.needs import OLDEST_PYTHON, PYTHON_MIN
from lockstep.plan.hosts.place import absolute
from lockstep.plan.hosts.wheels import HostTarget
from lockstep_spec.codec import from_json

BROUGHT = "3.12"
"""Python that a host gets which has none that will do, where the cluster file names none."""
MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class HostParts:
    """Things that a host has of an environment."""

    name: str
    user: str
    home: str
    system: str
    machine: str
    glibc: Version | None
    """None: its C library is another one."""
    data: str
    """Folder of Lockstep's environments and what they are made of."""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Path of each of its Pythons, by version such as 3.11. The one that `python3` starts is the first."""
    environments: tuple[str, ...] = ()
    """Names of environments that are complete."""
    current: str = ""
    """Name of the environment that new jobs take."""
    used: tuple[str, ...] = ()
    """Environments that the settings of a job name."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Sizes of files that were sent there before, by name."""
    folders: tuple[str, ...] = ()
    """Those of the asked folders that are there."""
    has_units: bool = False
    lingers: bool = False
    gpus: int = 0
    """GPUs that the driver shows."""
    devices: int = 0
    """NVIDIA GPUs on its bus, with a driver or without."""

    @property
    def runs_programs(self) -> bool:
        """True if it has a Python for programs that aren't written for the oldest ones."""
        own = next(iter(self.pythons), "")
        return bool(self.environments) or (own != "" and HostPython(own, "").pair >= OLDEST_PYTHON)


def read_parts(name: str, answer: Mapping[str, Any]) -> HostParts:
    """Read a host's answer. Raises BadAnswer for what is none."""
    with checked(name, answer) as known:
        version = [int(number) for number in str(known["glibc"]).split(".")[:2] if known["glibc"]]
        own = {"name": name, "glibc": version or None, "hasUnits": known["units"], "lingers": known["linger"]}
        return from_json(HostParts, {**known, **own, "pythons": dict(known["pythons"])}, "it")


@dataclass(frozen=True)
class HostPython:
    """Python that an environment is made with."""

    version: str
    path: str
    """Path of the host's own one; '' if one is brought."""

    @property
    def pair(self) -> tuple[int, int]:
        major, minor = self.version.split(".")
        return int(major), int(minor)


@dataclass(frozen=True)
class HostSetup:
    """One host's way to an environment."""

    host: Host
    parts: HostParts
    python: HostPython
    environment: str
    """Name of the environment that its lock, Python and machine call for."""
    folders: tuple[str, ...]
    """Folders to make."""

    @property
    def target(self) -> HostTarget:
        assert self.parts.glibc is not None  # noqa: S101 (setup_of has refused other C libraries)
        return HostTarget(self.python.pair, self.parts.machine, self.parts.glibc)

    @property
    def makes(self) -> bool:
        """True if the environment isn't there yet."""
        return self.environment not in self.parts.environments

    @property
    def lingers(self) -> bool:
        """True if linger is to be switched on: units then survive the end of the login."""
        return self.parts.has_units and not self.parts.lingers

    @property
    def obsolete(self) -> tuple[str, ...]:
        """Environments that no job names."""
        return tuple(name for name in self.parts.environments if name != self.environment and name not in self.parts.used)

    @property
    def is_done(self) -> bool:
        """True if nothing of it is to be changed. Linger is no part of that: the host may refuse it."""
        return not (self.makes or self.folders or self.obsolete or self.parts.current != self.environment)

    @property
    def path(self) -> str:
        """Folder of the environment."""
        return join(self.parts.data, self.environment)


def environment_name(lock: str, python: HostPython, machine: str, trainer: str) -> str:
    """Return the name of an environment: another one for all that changes what is in it. `trainer`: digest of the trainer's code."""
    text = "\0".join((lock, python.version, python.path, machine, trainer))
    return f"env-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def choose_python(parts: HostParts, stated: str | None) -> HostPython:
    """Return the host's own Python if it will do, else one to bring. `stated`: the version of the cluster file."""
    if stated is not None:
        return HostPython(stated, parts.pythons.get(stated, ""))
    for version, path in parts.pythons.items():
        own = HostPython(version, path)
        if own.pair >= PYTHON_MIN:
            return own
    return HostPython(BROUGHT, "")


def setup_of(host: Host, parts: HostParts, stated: str | None, lock: str, trainer: str) -> HostSetup:
    """Return what makes the host ready. Raises ConfigError for a machine that has no wheels, and for a Python that is too old."""
    if stated is not None and HostPython(stated, "").pair < PYTHON_MIN:
        raise ConfigError(f"environment.python is {stated}, and the trainer needs 3.11 or newer: name one of those")
    if parts.system != "Linux" or parts.machine not in MACHINES or parts.glibc is None:
        what = f"{parts.system} on {parts.machine}" + ("" if parts.glibc else " without glibc")
        raise ConfigError(f"host {host.name} has {what}: hosts are Linux with glibc on {' or '.join(MACHINES)}")
    if host.python:
        raise ConfigError(
            f"host {host.name} has python {host.python} in the cluster file, which is yours: remove that key to let setup make one"
        )
    python = choose_python(parts, stated)
    wanted = (host.workspace, host.datasets)
    folders = tuple(path for path in wanted if absolute(path, parts.home) not in parts.folders)
    return HostSetup(host, parts, python, environment_name(lock, python, parts.machine, trainer), folders)


def plan_lines(setup: HostSetup, packages: int, origin: str) -> Iterator[str]:
    """Lines of the plan of one host, as they are shown. `origin`: where the packages come from."""
    python, parts = setup.python, setup.parts
    whose = f"its own ({python.path})" if python.path else "brought"
    yield f"{setup.host.name}: {parts.machine}, Python {python.version} {whose}"
    if setup.is_done:
        yield f"  ready: {setup.path}"
    if setup.makes:
        if not python.path:
            yield f"  bring   Python {python.version}"
        yield f"  make    {setup.path}: {packages} packages {origin}, and Lockstep's trainer"
    elif parts.current != setup.environment:
        yield f"  use     {setup.path}, which is there"
    for folder in setup.folders:
        yield f"  make    {folder}"
    for name in setup.obsolete:
        yield f"  remove  {join(parts.data, name)}, which no job names"
    if setup.lingers:
        yield "  linger  switch on, so that jobs survive the end of a login and a reboot"
    for line in root_steps(setup):
        yield f"  root    {line}"


def root_steps(setup: HostSetup, *, refused: bool = False) -> Iterator[str]:
    """Steps that only root can take, and that are never taken here. `refused`: the host did not let its user linger."""
    parts = setup.parts
    if parts.devices > parts.gpus:
        what = f"{parts.devices} NVIDIA GPUs are on its bus and the driver shows {parts.gpus}"
        yield f"install NVIDIA's driver ({what}): on Ubuntu `sudo ubuntu-drivers install`, then reboot"
    if refused:
        yield f"`sudo loginctl enable-linger {parts.user}`: until then a job ends with a reboot"


def environment_findings(setups: Sequence[HostSetup], lock: str, name: str) -> list[Finding]:
    """Compare the environment that each host's jobs take with the one that the lock and this Lockstep's trainer make there.

    It fails where hosts that would have the same one don't: their ranks would differ. `lock`: its path in messages. `name`: of the cluster,
    as one types it.
    """
    made = [setup for setup in setups if setup.parts.current in setup.parts.environments]
    behind = [setup for setup in made if setup.parts.current != setup.environment]
    fix = f"lockstep hosts setup {name}"
    if len(behind) == len(made) and len({(setup.environment, setup.parts.current) for setup in made}) == len(
        {setup.environment for setup in made}
    ):
        message = f"{lock} or this Lockstep's trainer has changed since their environments were made: jobs take the older ones"
        return [warning(", ".join(setup.host.name for setup in behind), message, fix)] if behind else []
    return [
        failed(
            setup.host.name,
            f"its environment {setup.parts.current} is not of {lock} and this Lockstep's trainer, and other hosts have another one",
            fix,
        )
        for setup in behind
    ]


def mixed_pythons(setups: Sequence[HostSetup]) -> str:
    """Return a sentence if the hosts don't have the same Python; else ''."""
    by_version: dict[str, list[str]] = {}
    for setup in setups:
        by_version.setdefault(setup.python.version, []).append(setup.host.name)
    if len(by_version) < 2:
        return ""
    words = "; ".join(f"{version} on {', '.join(names)}" for version, names in sorted(by_version.items()))
    return f"the hosts have unlike Pythons ({words}): environment.python in the cluster file gives all of them one"
