"""Copies between this machine, or a host, and all hosts of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from posixpath import dirname

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import DATASETS, WORKSPACE
from lockstep.plan.hosts.facts import HostFacts
from lockstep.plan.hosts.place import addresses_of
from lockstep.plan.hosts.status import seen_jobs
from lockstep.plan.hosts.volumes import listening_ports
from lockstep.platforms.files.copies import Copy, CopyWish, place_of, tell_result
from lockstep.platforms.files.meter import Meter
from lockstep.platforms.files.transfer import Carried, Sender, TransferProgress, get, refuse_outside
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.hosts.spread import Spread, Stop
from lockstep.platforms.hosts.volumes import sharing
from lockstep.platforms.output import put, tell


async def copy_on_hosts(copy: Copy, fleet: Fleet, wish: CopyWish) -> bool:
    """Copy to all hosts of a job, or from one of them. A job that has never started may have all of the file's hosts. Return True if
    everything arrived. Raises ConfigError.
    """
    node, origin = wish.node, wish.origin
    refuse_outside(copy.remote.path, [WORKSPACE, DATASETS])
    answers, problems = await fleet.look(job=copy.remote.job)
    job = seen_jobs(answers, problems).get(copy.remote.job)
    hosts = list(fleet.cluster.names if job is None else job.hosts)
    if node is not None and node >= len(hosts):
        raise ConfigError(f"{fleet.name} has no node {node}: its {len(hosts)} nodes are 0 to {len(hosts) - 1}")
    if origin is not None and origin not in hosts:
        raise ConfigError(f"--from {origin} is none of the hosts {', '.join(hosts)}")
    if origin is not None and node is not None:
        raise ConfigError("--from copies to all hosts: leave out --node")
    chosen = [hosts[node]] if node is not None else sorted(hosts, key=lambda host: host != origin) if copy.up else hosts[:1]
    there = {host: answers[host] for host in chosen if host in answers}
    results: dict[str, Carried | Exception] = {host: Failed(problems[host]) for host in chosen if host in problems}
    with Meter() as meter:
        progress = {host: TransferProgress(meter.changed) for host in there}
        meter.transfers = {f"host {host}": one for host, one in progress.items()}
        if not copy.up:
            results |= {host: await _fetch(copy, fleet, host, facts, progress[host]) for host, facts in there.items()}
            groups: Sequence[Sequence[str]] = [[host] for host in there]
        elif origin is not None and origin not in there:
            results |= {host: Failed(f"its files were to come from host {origin}") for host in there}
            groups = [[host] for host in there]
        else:
            paths = {host: _path(copy, facts) for host, facts in there.items()}
            groups = (await sharing(fleet, {host: _folder(path, there[host]) for host, path in paths.items()})).groups
            firsts = {group[0]: there[group[0]] for group in groups}
            results |= await _send(copy, fleet, firsts, paths, progress, origin, copy.sender(origin, force=wish.force))
    leader = {host: group[0] for group in groups for host in group[1:]}
    arrived = {host: tell_result(copy, f"host {host}", results[host]) for host in chosen if host not in leader}
    return all([*arrived.values(), *(_tell_shared(copy, host, first, arrived=arrived[first]) for host, first in leader.items())])


def _tell_shared(copy: Copy, host: str, first: str, *, arrived: bool) -> bool:
    if arrived:
        put(f"host {host}: sees the same folder as host {first}, at {place_of(copy)}")
    else:
        tell(f"host {host}: not copied: it sees the same folder as host {first}")
    return arrived


def _roots(facts: HostFacts) -> list[str]:
    return [facts.workspace.path, facts.datasets.path]


def _path(copy: Copy, facts: HostFacts) -> str:
    """Path of the job's volumes, as this host has it."""
    return next(
        own + copy.remote.path.removeprefix(of_job)
        for of_job, own in zip((WORKSPACE, DATASETS), _roots(facts), strict=True)
        if copy.remote.path.startswith(of_job)
    )


def _folder(path: str, facts: HostFacts) -> str:
    """Folder that the copy is made in: it tells whether hosts share it."""
    return path if path.endswith("/") or path in _roots(facts) else dirname(path)


async def _fetch(copy: Copy, fleet: Fleet, host: str, facts: HostFacts, progress: TransferProgress) -> Carried | Exception:
    try:
        return await get(fleet.place(host), _path(copy, facts), copy.local, _roots(facts), progress)
    except (Failed, OSError) as error:
        return error


async def _send(
    copy: Copy,
    fleet: Fleet,
    hosts: Mapping[str, HostFacts],
    paths: Mapping[str, str],
    progress: Mapping[str, TransferProgress],
    origin: str | None,
    sender: Sender,
) -> Mapping[str, Carried | Exception]:
    """Send to hosts that see nothing of each other's folders."""
    addresses = stated_addresses(fleet, hosts) if len(hosts) > 1 else [None]  # (one alone listens nowhere)
    stops = [
        Stop(host, fleet.place(host), paths[host], _roots(facts), address, progress[host])
        for (host, facts), address in zip(hosts.items(), addresses, strict=True)
    ]
    ports = listening_ports(fleet.cluster, hosts.values())
    return await Spread(stops, copy.local, ports, tell, sender, is_there=origin is not None).run()


def stated_addresses(fleet: Fleet, hosts: Mapping[str, HostFacts]) -> Sequence[str | None]:
    """Return the address of each host as others reach it; None: nobody knows one."""
    try:
        return addresses_of([fleet.cluster.host(host) for host in hosts], hosts)
    except ConfigError:  # (said for every host that this concerns)
        return [fleet.cluster.host(host).address for host in hosts]
