"""`lockstep sync JOB [FOLDER]`: send code from this machine to the pods of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError, Failed, LockstepError
from lockstep.api.names import DEV_ENVIRONMENT
from lockstep.api.objects import claim_names
from lockstep.cli.shared.jobargs import TargetOptions, known_names, on_cluster
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.platforms.output import put, tell

if TYPE_CHECKING:
    from lockstep.cli.shared.hostsite import HostSite
    from lockstep.kube.cluster import Cluster
    from lockstep.kube.exec import PodPlace
    from lockstep.platforms.files.sync import Receivers, Synced

Stamps = dict[str, tuple[int, int]]
WATCH_SECONDS = 0.2
NAMES_MAX, NAME_MAX = 50, 500
"""Limits of the names that are shown: it is the pod that sends them."""
AGAIN_SECONDS = 2.0
"""Seconds until a pod that lacks something is tried again."""


@on_cluster
def sync(
    where: TargetOptions,
    job: Annotated[str, typer.Argument(help="The job's name.", autocompletion=known_names)] = DEV_ENVIRONMENT,
    folder: Annotated[Path, typer.Argument(help="The folder to send.")] = Path("workspace"),
    to: Annotated[str, typer.Option("--to", help="The target folder in the pods.")] = "/workspace",
    watch: Annotated[bool, typer.Option("--watch", help="Keep sending changes until Ctrl-C.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Overwrite files that were changed in a pod since the last sync, and remove files that other folders sent."
        ),
    ] = False,
) -> None:
    """Send a folder to all pods of a job: only what differs.

    It removes there what an earlier sync sent and you have deleted here, and nothing else.

    A volume that all pods share gets each file once. `.lockstepignore` in the folder says what stays here, or else `.gitignore` does.

    Example: lockstep sync ml-dev-env workspace --watch
    """
    from lockstep.cli.shared.hostsite import HostSite

    site = where.site()
    with exiting_on_ctrl_c():
        if isinstance(site, HostSite):
            complete = asyncio.run(_run_on_hosts(site, job, folder, to, force=force, watch=watch))
        else:
            complete = asyncio.run(_run_in_pods(where, job, folder, to, force=force, watch=watch))
    if not complete:
        raise typer.Exit(1)


async def _run_on_hosts(site: HostSite, job: str, folder: Path, to: str, *, force: bool, watch: bool) -> bool:
    """Sync to all hosts of a job, or to all of the file where it has never started. Return True if each has everything; with `watch` never return."""
    from lockstep.api.names import WORKSPACE
    from lockstep.plan.hosts.status import seen_jobs
    from lockstep.platforms.files.sync import Receivers
    from lockstep.platforms.files.transfer import refuse_outside
    from lockstep.platforms.hosts.volumes import sharing

    refuse_outside(to, [WORKSPACE])
    fleet = site.fleet()
    answers, problems = await fleet.look(job=job)
    seen = seen_jobs(answers, problems).get(job)
    hosts = site.hosts.names if seen is None else seen.hosts
    away = [problems[host] for host in hosts if host in problems]
    if away:
        raise Failed(f"{'; '.join(away)}; nothing was sent, so that no host is left behind")
    every = {host: answers[host].workspace.path + to.removeprefix(WORKSPACE) for host in hosts}
    groups = (await sharing(fleet, {host: answers[host].workspace.path for host in hosts})).groups
    folders_of = {group[0]: every[group[0]] for group in groups}
    for group in groups:
        if len(group) > 1:
            tell(f"{', '.join(group)} see the same folder: it is sent to {group[0]}")
    folders = set(folders_of.values())

    async def send() -> list[Synced]:
        results: list[Synced] = []
        for target in sorted(folders):
            places = {f"host {host}": fleet.place(host) for host, own in folders_of.items() if own == target}
            results += await receivers.send(places, folder, target, force=force)
        return results

    async def is_over() -> bool:
        return False  # (hosts keep their workspace without a job)

    async with Receivers(own_umask=True) as receivers:
        return await _send_all(folder, receivers, send, is_over, watch=watch)


async def _run_in_pods(where: TargetOptions, job: str, folder: Path, to: str, *, force: bool, watch: bool) -> bool:
    """Sync to all pods of a job. Return True if each has everything; with `watch` return never."""
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.files.sync import Receivers

    namespace = where.chosen_namespace()

    async def send() -> list[Synced]:
        return await receivers.send(await _places(cluster, namespace, job), folder, to, force=force)

    async with await Cluster.connect(where.context) as cluster, Receivers() as receivers:
        return await _send_all(folder, receivers, send, lambda: _is_over(cluster, namespace, job), watch=watch)


async def _send_all(
    folder: Path, receivers: Receivers, send: Callable[[], Awaitable[list[Synced]]], is_over: Callable[[], Awaitable[bool]], *, watch: bool
) -> bool:
    """Send the folder, and return True if everything arrived; with `watch` send whatever changes, until nothing can be sent any more, and again what
    a place lacks: one that couldn't be reached, or that was restarted meanwhile.
    """
    from lockstep.platforms.files.sync import stamps

    report, is_begun = SyncReporter(), False
    sent: Stamps | None = None  # (what every place has; an empty folder is sent once, too)
    while True:
        now = await asyncio.to_thread(stamps, folder)
        if now != sent or not receivers.are_there:
            try:
                complete = report.all_have_everything(await send())
            except (LockstepError, OSError) as error:  # (a pod that is away for a moment, a folder that is being replaced)
                if not is_begun or await is_over():
                    raise
                report.problem(str(error))
                complete = False
            if not watch:
                return complete
            is_begun, sent = True, now if complete else None
        await asyncio.sleep(AGAIN_SECONDS if sent is None else WATCH_SECONDS)


async def _is_over(cluster: Cluster, namespace: str, job: str) -> bool:
    """Return True if the job was deleted or has ended, so that nothing can be sent to it any more."""
    from lockstep.api.names import pod_name
    from lockstep.api.objects import current_status, has_ended
    from lockstep.kube.cluster import ApiError

    try:
        found = await cluster.get("TrainingJob", namespace, job)
        if found:
            return has_ended(current_status(found))
        names = {"StatefulSet": job, "Pod": pod_name(job, 0)}
        return not any([await cluster.get(kind, namespace, name) for kind, name in names.items()])
    except (ApiError, OSError):
        return False


async def _places(cluster: Cluster, namespace: str, job: str) -> dict[str, PodPlace]:
    """Return the pods that run, by name; one of them where all share their volumes. Raises ConfigError when none runs."""
    from lockstep.api.names import CONTAINER, LABEL_JOB
    from lockstep.api.objects import is_running
    from lockstep.cli.files.cp import known_job
    from lockstep.kube.exec import PodPlace

    pods: list[dict[str, Any]] = (await cluster.list("Pod", namespace, {"labelSelector": f"{LABEL_JOB}={job}"}))["items"]
    running = sorted(pod["metadata"]["name"] for pod in pods if is_running(pod) and "deletionTimestamp" not in pod["metadata"])
    if not running:
        await known_job(cluster, namespace, job)
        raise ConfigError(f"no pod of job {job} runs: lockstep why {job} -n {namespace}")
    if len(running) < len(pods):
        waiting = sorted({pod["metadata"]["name"] for pod in pods} - set(running))
        raise Failed(f"{', '.join(waiting)} of job {job} doesn't run yet; nothing was sent, so that no pod is left behind")
    chosen = running[:1] if _is_shared(pods[0]) else running
    return {name: PodPlace(cluster, namespace, name, CONTAINER) for name in chosen}


def _is_shared(pod: dict[str, Any]) -> bool:
    """Return True if all pods share their volumes: a claim of one pod of a StatefulSet ends with that pod's name."""
    return not any(claim.endswith(pod["metadata"]["name"]) for claim in claim_names(pod))


class SyncReporter:
    """Prints what became of each sync: the same trouble once, not every two seconds."""

    def __init__(self) -> None:
        self._last: list[str] = []

    def problem(self, text: str) -> None:
        if self._last != [text]:
            tell(f"not sent: {text}")
        self._last = [text]

    def all_have_everything(self, results: list[Synced]) -> bool:
        lines = [line for result in results for line in _lines(result)]
        if lines != self._last or any(result.sent or result.removed for result in results):
            put(*lines, flush=True)
        self._last = lines
        return all(result.problem is None and not result.changed for result in results)


def _lines(result: Synced) -> list[str]:
    if result.problem is not None:
        return [f"{result.node}: not sent: {result.problem}"]
    done = f"{result.sent} sent ({result.bytes} bytes), {len(result.removed)} removed" if result.sent or result.removed else "nothing to do"
    groups = (
        (result.removed, "was removed: it is not in the folder any more", "were removed"),
        (result.changed, "was changed there since the last sync and stays as it is; --force overwrites it", "were changed there"),
        (result.others, "was sent from another folder and stays; --force removes it", "were sent from another folder"),
    )
    return [f"{result.node}: {line}" for line in (done, *(line for group in groups for line in _named(*group)))]


def _named(names: tuple[str, ...], each: str, more: str) -> list[str]:
    lines = [f"{name[:NAME_MAX]} {each}" for name in names[:NAMES_MAX]]
    return lines if len(names) <= NAMES_MAX else [*lines, f"{len(names) - NAMES_MAX} more files {more}, too"]
