"""A folder of this machine that is sent to the hosts of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import WORKSPACE
from lockstep.plan.hosts.facts import HostFacts
from lockstep.plan.hosts.place import chosen
from lockstep.plan.hosts.status import seen_jobs
from lockstep.platforms.files.sending import Sending, SentByOthers, send_all, send_once
from lockstep.platforms.files.sync import Receivers, own_folders
from lockstep.platforms.files.transfer import refuse_outside
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.hosts.start import refuse_running
from lockstep.platforms.hosts.volumes import sharing
from lockstep.platforms.output import tell
from lockstep.platforms.places.orders import HostOptions
from lockstep_spec.files import expanded


async def sync(fleet: Fleet, sending: Sending) -> bool:
    """Sync to all hosts of a job, or to all of the file where it has never started. Return True if each has everything; with `watch` never
    return.
    """
    answers, problems = await fleet.look(job=sending.job)
    seen = seen_jobs(answers, problems).get(sending.job)
    hosts = fleet.cluster.names if seen is None else seen.hosts
    return await send_to_hosts(fleet, answers, problems, hosts, sending)


async def send_project(fleet: Fleet, folder: Path, job: str, nodes: int, options: HostOptions) -> str:
    """Send a folder to a folder of its own on the hosts that a job of so many nodes takes. Return that folder, as the job names it. Raises
    ConfigError, Failed.
    """
    if folder in (expanded("~"), Path(folder.anchor)):
        raise ConfigError(f"{folder} would be sent to all hosts, with all that is in it: change to the folder of your program first")
    hosts = [host.name for host in chosen(fleet.cluster, nodes, first=options.first, without=options.without)]
    answers, problems = await fleet.look(hosts, job=job)
    refuse_running(job, answers, fleet.again)
    first, second = (Sending(job, folder, to, fleet.again, alone=True) for to in own_folders(folder))
    try:
        sending, complete = first, await send_to_hosts(fleet, answers, problems, hosts, first)
    except SentByOthers:
        sending, complete = second, await send_to_hosts(fleet, answers, problems, hosts, second)
    if not complete:
        raise Failed(
            f"{folder} was not sent whole to {sending.to}, so nothing was started; {sending.line(sending.to)} --force overwrites what was"
            " changed there"
        )
    tell(f"{folder} is in {sending.to} on {', '.join(hosts)}: ranks work there")
    return sending.to


async def send_to_hosts(
    fleet: Fleet, answers: Mapping[str, HostFacts], problems: Mapping[str, str], hosts: Sequence[str], sending: Sending
) -> bool:
    """Sync to these hosts, whose answers are known. Return True if each has everything; with `watch` never return. Raises ConfigError,
    Failed.
    """
    refuse_outside(sending.to, [WORKSPACE])
    away = [problems[host] for host in hosts if host in problems]
    if away:
        raise Failed(f"{'; '.join(away)}; nothing was sent, so that no host is left behind")
    groups = (await sharing(fleet, {host: answers[host].workspace.path for host in hosts})).groups
    for group in groups:
        if len(group) > 1:
            tell(f"{', '.join(group)} see the same folder: it is sent to {group[0]}")
    places = {f"host {group[0]}": fleet.place(group[0]) for group in groups}
    targets = {f"host {group[0]}": answers[group[0]].workspace.path + sending.to.removeprefix(WORKSPACE) for group in groups}
    async with Receivers(own_umask=True) as receivers:
        return await send_all(sending, receivers, lambda: send_once(receivers, places, targets, sending))
