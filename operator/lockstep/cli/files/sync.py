"""`lockstep sync JOB [FOLDER]`: send code from this machine to the pods of a job."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import DEV_ENVIRONMENT
from lockstep.api.objects import claim_names
from lockstep.cli.shared.jobargs import TargetOptions, known_names, on_cluster
from lockstep.cli.shared.sending import Sending, send_all, send_once, send_to_hosts
from lockstep.cli.shared.signals import exiting_on_ctrl_c

if TYPE_CHECKING:
    from lockstep.kube.cluster import Cluster
    from lockstep.kube.exec import PodPlace
    from lockstep.platforms.files.sync import Synced
    from lockstep.platforms.hosts.backend import HostsBackend


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
            "--force", help="Overwrite files that were changed in a pod since the last sync or sent from other folders, and remove those."
        ),
    ] = False,
) -> None:
    """Send a folder to all pods of a job: only what differs.

    It removes there what an earlier sync sent and you have deleted here, and nothing else.

    A volume that all pods share gets each file once. `.lockstepignore` in the folder says what stays here, or else `.gitignore` does.

    If another folder sent one of the files, and it differs, nothing is sent: give this folder one of its own with --to.

    Example: lockstep sync ml-dev-env workspace --watch
    """
    from lockstep.platforms.hosts.backend import HostsBackend

    backend = where.backend()
    sending = Sending(job, folder, to, backend.again, force=force, watch=watch)
    with exiting_on_ctrl_c():
        complete = asyncio.run(_run_on_hosts(backend, sending) if isinstance(backend, HostsBackend) else _run_in_pods(where, sending))
    if not complete:
        raise typer.Exit(1)


async def _run_on_hosts(backend: HostsBackend, sending: Sending) -> bool:
    """Sync to all hosts of a job, or to all of the file where it has never started. Return True if each has everything; with `watch` never
    return.
    """
    from lockstep.plan.hosts.status import seen_jobs

    fleet = backend.fleet()
    answers, problems = await fleet.look(job=sending.job)
    seen = seen_jobs(answers, problems).get(sending.job)
    hosts = backend.hosts.names if seen is None else seen.hosts
    return await send_to_hosts(fleet, answers, problems, hosts, sending)


async def _run_in_pods(where: TargetOptions, sending: Sending) -> bool:
    """Sync to all pods of a job. Return True if each has everything; with `watch` return never."""
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.files.sync import Receivers

    namespace = where.chosen_namespace()

    async def send() -> list[Synced]:
        places = await _places(cluster, namespace, sending.job)
        return await send_once(receivers, places, dict.fromkeys(places, sending.to), sending)

    async with await Cluster.connect(where.connections) as cluster, Receivers() as receivers:
        return await send_all(sending, receivers, send, lambda: _is_over(cluster, namespace, sending.job))


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
    has_own = any(claim.endswith(pods[0]["metadata"]["name"]) for claim in claim_names(pods[0]))  # a claim of one pod ends with its name
    chosen = running if has_own else running[:1]
    return {name: PodPlace(cluster, namespace, name, CONTAINER) for name in chosen}
