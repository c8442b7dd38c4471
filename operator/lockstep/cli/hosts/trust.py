"""`lockstep hosts trust` and `login`: keys of hosts, compared by a person and pinned in the cluster file, and logins that ask."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.shared.jobargs import OptionalClusterArgument
from lockstep.cli.shared.terminal import say, waiting
from lockstep.platforms.output import put

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.api.hosts import Host


def trust(
    cluster: OptionalClusterArgument = "local",
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
    """Pin each host's key after you have compared it.

    It shows the fingerprint, asks, and writes host_key into the cluster file. Every later login checks it.

    Compare it with what the host itself prints at its own screen: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub. An attacker between
    you and the host could answer in its place, so Lockstep takes no key without your word. It sends nothing to a host. Exit code 0: all
    hosts are pinned, 1: some are not.

    Example: lockstep hosts trust lab
    """  # fmt: skip
    from lockstep.cli.shared.target import load
    from lockstep.plan.hosts.keys import read_fingerprints

    file = load(cluster)
    if file.hosts is None:
        raise ConfigError(f"{cluster} is a Kubernetes cluster: only files of hosts have host keys")
    stated = read_fingerprints(fingerprint or [], file.hosts.names)
    hosts = [host for host in file.hosts.hosts if not stated or host.name in stated]
    with waiting(f"asking {len(hosts)} hosts for their keys"):
        offered = asyncio.run(_offered(hosts))
    pinned: dict[str, str] = {}
    unpinned: list[str] = []
    for host in hosts:
        key = offered[host.name]
        if isinstance(key, Exception):
            say(str(key))
        elif _is_trusted(host, key, stated.get(host.name)):
            pinned[host.name] = key
            continue
        unpinned.append(host.name)
    new = {host.name: pinned[host.name] for host in hosts if host.name in pinned and host.host_key != pinned[host.name]}
    if new:
        put(f"Pinned {', '.join(new)} in {_pin(cluster, file, new)}")
    if unpinned:
        raise Failed(f"not pinned: {', '.join(unpinned)}")


async def _offered(hosts: list[Host]) -> dict[str, str | Exception]:
    from lockstep.platforms.hosts.fleet import AT_ONCE, login_of
    from lockstep.platforms.hosts.ssh import control_folder
    from lockstep.platforms.hosts.trust import offered_key

    folder, limit = control_folder(), asyncio.Semaphore(AT_ONCE)

    async def one(host: Host) -> str | Exception:
        async with limit:
            try:
                return await offered_key(login_of(host), folder)
            except (Failed, OSError) as error:
                return error

    return dict(zip([host.name for host in hosts], await asyncio.gather(*map(one, hosts)), strict=True))


def _is_trusted(host: Host, key: str, stated: str | None) -> bool:
    """Show the key, and ask a person, unless they stated its fingerprint, or it is pinned already."""
    from lockstep.cli.shared.terminal import confirm
    from lockstep.plan.hosts.keys import fingerprint

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


def _pin(cluster: str, file: ClusterFile, keys: dict[str, str]) -> str:
    """Write the keys into the cluster file, and return its path as one shows it. Raises ConfigError if anything else would change."""
    from lockstep.api.files.clusterfile import parse_cluster_file
    from lockstep.cli.shared.clusterfiles import path_of, read_text, replace_file
    from lockstep.cli.shared.folders import from_here
    from lockstep.plan.hosts.keys import with_host_keys

    assert file.hosts is not None  # noqa: S101 (`trust` has looked)
    path = path_of(cluster)
    shown = str(from_here(path))
    text = with_host_keys(read_text(path), keys)
    hosts = [host.model_copy(update={"host_key": keys.get(host.name, host.host_key)}) for host in file.hosts.hosts]
    after = parse_cluster_file(text, shown)
    if after.hosts != file.hosts.model_copy(update={"hosts": hosts}) or after.profile != file.profile:
        lines = "; ".join(f"{name}: host_key: {key}" for name, key in keys.items())
        raise ConfigError(f"{shown} can't be changed in these places only; write them by hand: {lines}")
    replace_file(path, text)
    return shown


def login(cluster: OptionalClusterArgument = "local") -> None:
    """Log in to each host here, where ssh may ask you something.

    That may be a password, a one-time code, a passphrase or a touch.

    All verbs use these connections for eight hours. Answers go to ssh itself: Lockstep sees none. ssh checks host keys as always. Exit
    code 0: all hosts are logged in, 1: some are not.

    Example: lockstep hosts login lab
    """
    from lockstep.cli.shared.target import load
    from lockstep.platforms.hosts.ssh import LOGIN_SECONDS

    file = load(cluster)
    if file.hosts is None:
        raise ConfigError(f"{cluster} is a Kubernetes cluster: log in as for kubectl")
    failed = asyncio.run(_log_in(cluster, file))
    if failed:
        raise Failed(f"not logged in: {', '.join(failed)}")
    put(f"Logged in to {', '.join(file.hosts.names)} for {LOGIN_SECONDS // 3600} hours")


async def _log_in(cluster: str, file: ClusterFile) -> list[str]:
    """Log in to one host after the other: two questions at once would have one answer. Return the hosts that let nobody in."""
    from lockstep.cli.shared.hostsite import HostSite

    fleet = HostSite(file, cluster).fleet()
    failed = []
    for name in fleet.cluster.names:
        try:
            say(f"{name}: answer what ssh asks, and touch your key if it blinks")
            await fleet.shared(name).log_in()
        except Failed as error:
            say(str(error))
            failed.append(name)
    return failed
