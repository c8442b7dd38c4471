"""`lockstep hosts setup`: an environment for ranks on every host, made of a lock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.assets import asset
from lockstep.cli.shared.clusterfiles import read_text
from lockstep.cli.shared.folders import from_here
from lockstep.cli.shared.jobargs import OptionalClusterArgument, TargetOptions, acts_on
from lockstep.cli.shared.target import load
from lockstep.plan.hosts.setup import HostSetup, mixed_pythons, plan_lines, root_steps, setup_of
from lockstep.plan.hosts.wheels import Pin, read_lock
from lockstep.platforms.hosts.backend import HostsBackend
from lockstep.platforms.hosts.environment import Packages, look, set_up, spread, trainer_file, try_gpus
from lockstep.platforms.hosts.wheelhouse import WheelFile, cache_folder, gather, index_here
from lockstep.platforms.output import put, say
from lockstep_spec import VERSION
from lockstep_spec.files import expanded

if TYPE_CHECKING:
    from lockstep.api.hosts import HostEnvironment
    from lockstep.platforms.hosts.fleet import Fleet

BOOTSTRAP = Path("requirements/bootstrap.lock")
"""Lock of uv, which makes the environments."""


@acts_on()
def setup(
    where: TargetOptions,
    cluster: OptionalClusterArgument = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what each host lacks, and change nothing.")] = False,
    fingerprint: Annotated[
        list[str] | None,
        typer.Option(
            "--fingerprint",
            metavar="NAME=SHA256:…",
            show_default=False,
            help="Pin this host's key without asking if it has this fingerprint, and fail if it has another. May be repeated.",
        ),
    ] = None,
) -> None:
    """Let yourself in, and install the ranks' Python environment.

    It shows the key of a host that your ssh doesn't know, asks, and writes host_key into the cluster file; every later login checks it.
    Compare it with what the host itself prints at its own screen: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub. An attacker between
    you and the host could answer in its place, so Lockstep takes no key without your word. Where ssh asks for a code, a touch or a
    passphrase, your answer serves all verbs for eight hours. It goes to ssh itself.

    Then it installs environment.lock with its hashes.

    It needs no root, and prints the steps that only root can take. Running jobs keep the environment that they started with. Run it again
    if it broke off, or if the lock or Lockstep has changed. It changes nothing on a host that lacks nothing.

    Example: lockstep hosts setup lab --dry-run
    """
    file = load(where.verb, cluster)
    every = file.its_hosts(cluster)
    if not dry_run:
        from lockstep.cli.clusters.hostaccess import let_in

        file = let_in(cluster, file, every, fingerprint or [])
    fleet = HostsBackend(file, cluster).fleet()
    asyncio.run(_set_up(fleet, fleet.cluster.environment, dry_run=dry_run))


@dataclass(frozen=True)
class Wanted:
    """Lock, tools and code that the environments are made of."""

    text: str
    pins: Sequence[Pin]
    uv: Sequence[Pin]
    trainer: WheelFile


async def _set_up(fleet: Fleet, stated: HostEnvironment, *, dry_run: bool) -> None:
    wanted, house = wanted_of(stated), None if stated.wheelhouse is None else _local(stated.wheelhouse)
    names = [host.name for host in fleet.cluster.hosts if not host.python]
    for host in fleet.cluster.hosts:
        if host.python:
            put(f"{host.name}: left alone: the cluster file states its python, {host.python}")
    setups, problems = await setups_of(fleet, names, stated, wanted)
    origin = f"from {house}" if house else f"from {stated.index or 'PyPI'}"
    for ready in setups:
        put(*plan_lines(ready, len(wanted.pins), origin))
    if warning := mixed_pythons(setups):
        say(f"warning: {warning}")
    if dry_run:
        if problems:
            raise Failed("; ".join(problems.values()))
        return
    problems |= await _make(fleet, setups, wanted, stated, house)
    if problems:
        raise Failed("; ".join(problems.values()))


async def setups_of(fleet: Fleet, names: Iterable[str], stated: HostEnvironment, wanted: Wanted) -> tuple[list[HostSetup], dict[str, str]]:
    """Ask the hosts what they have of an environment, and return each one's way to it; by host why there is none."""
    parts, problems = await look(fleet, names)
    setups = []
    for name, one in parts.items():
        try:
            setups.append(setup_of(fleet.cluster.host(name), one, stated.python, wanted.text, wanted.trainer.sha256))
        except ConfigError as error:
            problems[name] = str(error)
    return setups, problems


async def _make(fleet: Fleet, setups: Sequence[HostSetup], wanted: Wanted, stated: HostEnvironment, house: Path | None) -> dict[str, str]:
    """Make each host ready; by host why it isn't. A host that lacks nothing isn't asked again."""
    by_name = {one.host.name: one for one in setups if not one.is_done or one.lingers}
    makers = [one for one in setups if one.makes]
    packages = await _packages(makers, wanted, stated, house)
    if house is not None:
        by_name |= {one.host.name: one for one in await spread(fleet, makers, packages, _tell)}

    async def ready(name: str) -> None:
        one = by_name[name]
        lingers = await set_up(fleet, one, packages, _tell)
        if not one.is_done:
            _tell(f"{name}: ready: {one.path}")
        for line in root_steps(one, refused=one.parts.has_units and not lingers):
            _tell(f"{name}: only root can {line}")
        if one.makes and one.parts.gpus:
            for line in await try_gpus(fleet, one):
                _tell(f"{name}: {line}")

    _, problems = await fleet.all(by_name, ready)
    return problems


def _tell(line: str) -> None:
    put(line, flush=True)


async def _packages(makers: Sequence[HostSetup], wanted: Wanted, stated: HostEnvironment, house: Path | None) -> Packages:
    """Gather on this machine what the hosts don't fetch themselves: uv, and with a wheelhouse all packages."""
    index, folder = index_here(stated.index), house or cache_folder()
    targets = {one.host.name: one.target for one in makers}
    uv: dict[str, WheelFile] = {}
    files: dict[str, list[WheelFile]] | None = None if house is None else {}
    if makers:
        tools = await gather(wanted.uv, targets.values(), folder, index, say)
        uv = {name: tools[target][0] for name, target in targets.items()}
        if house is not None:
            found = await gather(wanted.pins, targets.values(), folder, index, say)
            files = {name: found[target] for name, target in targets.items()}
    return Packages(wanted.pins, wanted.trainer, uv, files, stated.index)


def wanted_of(stated: HostEnvironment) -> Wanted:
    """Read the locks, and pack the trainer. Raises ConfigError for a lock that isn't there, or pins without hashes."""
    path, bootstrap = _local(stated.lock), _local(str(BOOTSTRAP))
    text = read_text(path)
    pins, tools = read_lock(text, str(path)), read_lock(read_text(bootstrap), str(bootstrap))
    return Wanted(text, pins, tools, trainer_file(cache_folder(), VERSION))


def _local(stated: str) -> Path:
    """Return a path of the cluster file on this machine: below the current folder if it is there, else one that ships with Lockstep."""
    path = expanded(stated)
    if path.is_absolute() or path.exists():
        return path
    return from_here(asset(stated)) if asset(stated).exists() else path
