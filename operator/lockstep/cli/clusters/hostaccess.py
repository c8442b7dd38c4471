"""Access of `lockstep hosts setup` to its hosts: keys that ssh doesn't know, compared by a person and pinned in the cluster file, and
logins that ask.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.cli.shared.clusterfiles import path_of, read_text, replace_file
from lockstep.cli.shared.folders import from_here
from lockstep.cli.shared.terminal import confirm, waiting
from lockstep.plan.hosts.keys import asks_at_login, fingerprint, is_of_host_key, read_fingerprints, with_host_keys
from lockstep.platforms.hosts.backend import HostsBackend
from lockstep.platforms.hosts.ssh import LOGIN_SECONDS, offered_key
from lockstep.platforms.output import put, say

if TYPE_CHECKING:
    from lockstep.api.hosts import Host, HostsCluster


def let_in(cluster: str, file: ClusterFile, every: HostsCluster, fingerprints: list[str]) -> ClusterFile:
    """Ask a person for each key that ssh doesn't know, and let ssh ask what it wants for a login. Return the file with the pinned keys.

    Raises Failed where a key is not trusted, ConfigError where it can't be asked for.
    """
    stated = read_fingerprints(fingerprints, every.names)
    problems = _problems(cluster, file, every)
    unknown = [host for host in every.hosts if host.name in stated or is_of_host_key(problems.get(host.name, ""))]
    if unknown and (pinned := _trust(cluster, file, every, unknown, stated)) is not file:
        file, problems = pinned, _problems(cluster, pinned, every)
    if sys.stdin.isatty():
        asyncio.run(_log_in(cluster, file, [name for name, problem in problems.items() if asks_at_login(problem)]))
    return file


def _problems(cluster: str, file: ClusterFile, hosts: HostsCluster) -> dict[str, str]:
    """Return by host why it can't be asked."""
    with waiting(f"asking {len(hosts.hosts)} hosts"):
        return asyncio.run(HostsBackend(file, cluster).fleet().look())[1]


def _trust(cluster: str, file: ClusterFile, every: HostsCluster, unknown: list[Host], stated: Mapping[str, str]) -> ClusterFile:
    """Pin the keys of these hosts that a person trusts. Return the file as it is then. Raises Failed if one is not trusted."""
    fleet, pinned = HostsBackend(file, cluster).fleet(), dict[str, str]()

    async def ask(name: str) -> str:
        return await offered_key(fleet.shared(name).login, fleet.shared(name).folder)

    offered, silent = asyncio.run(fleet.all([host.name for host in unknown], ask))
    for host in unknown:
        if host.name in silent:
            say(silent[host.name])
        elif _is_trusted(host, offered[host.name], stated.get(host.name)):
            pinned[host.name] = offered[host.name]
    new = {host.name: pinned[host.name] for host in unknown if host.name in pinned and host.host_key != pinned[host.name]}
    if new:
        file, shown = _pin(cluster, file, every, new)
        put(f"Pinned {', '.join(new)} in {shown}")
    if unpinned := [host.name for host in unknown if host.name not in pinned]:
        raise Failed(f"not pinned: {', '.join(unpinned)}")
    return file


def _is_trusted(host: Host, key: str, stated: str | None) -> bool:
    """Show the key, and ask a person, unless they stated its fingerprint, or it is pinned already."""
    kind, own = key.split(maxsplit=1)[0], fingerprint(key)
    put(f"{host.name}  {kind}  {own}")
    if stated is not None:
        if stated != own:
            put(f"{'':{len(host.name)}}  NOT the one that --fingerprint states, {stated}: another machine may answer in its place")
        return stated == own
    if host.host_key == key:
        put(f"{'':{len(host.name)}}  is pinned")
        return True
    if host.host_key is not None:
        put(
            f"{'':{len(host.name)}}  NOT the pinned one, {fingerprint(host.host_key)}: was the host set up anew, or does another machine"
            " answer in its place?"
        )
    try:
        confirm(
            f"Does {host.name} itself show this fingerprint?",
            f"there is no terminal to ask you at: compare the fingerprint, then state it: --fingerprint {host.name}={own}",
        )
    except typer.Abort:
        return False
    return True


def _pin(cluster: str, file: ClusterFile, every: HostsCluster, keys: dict[str, str]) -> tuple[ClusterFile, str]:
    """Write the keys into the cluster file. Return it, and its path as one shows it. Raises ConfigError if anything else would change."""
    path = path_of(cluster)
    shown = str(from_here(path))
    text = with_host_keys(read_text(path), keys)
    hosts = [host.model_copy(update={"host_key": keys.get(host.name, host.host_key)}) for host in every.hosts]
    after = parse_cluster_file(text, shown)
    if after.hosts != every.model_copy(update={"hosts": hosts}) or after.profile != file.profile:
        lines = "; ".join(f"{name}: host_key: {key}" for name, key in keys.items())
        raise ConfigError(f"{shown} can't be changed in these places only; write them by hand: {lines}")
    replace_file(path, text)
    return after, shown


async def _log_in(cluster: str, file: ClusterFile, names: list[str]) -> None:
    """Log in to one host after the other: two questions at once would have one answer. A host that refuses the login is named."""
    fleet = HostsBackend(file, cluster).fleet()
    for name in names:
        try:
            say(f"{name}: answer what ssh asks, and touch your key if it blinks; it serves for {LOGIN_SECONDS // 3600} hours")
            await fleet.shared(name).log_in()
        except Failed as error:
            say(str(error))
