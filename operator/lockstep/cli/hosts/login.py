"""`lockstep hosts login`: log in once where ssh asks for a code, a touch or a passphrase; later commands ride on that connection."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.shared.jobargs import OptionalClusterArgument
from lockstep.cli.shared.terminal import say
from lockstep.platforms.output import put

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile


def login(cluster: OptionalClusterArgument = "local") -> None:
    """Open the connection to each host in this terminal, where ssh may ask for a password, a one-time code, a passphrase or a touch.

    All verbs use these connections for eight hours. Answers go to ssh itself: Lockstep sees none. Host keys are checked as ever. Exit code 0: all hosts are logged in,
    1: some are not.

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
