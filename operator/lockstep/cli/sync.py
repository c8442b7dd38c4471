"""`lockstep sync JOB [FOLDER]`: code from this machine to the pods of a job."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError, Failed, LockstepError
from lockstep.api.names import DEV_ENVIRONMENT
from lockstep.cli.jobargs import ClusterNameOption, ContextOption, NamespaceOption

if TYPE_CHECKING:
    from lockstep.platforms.kubernetes.cluster import Cluster
    from lockstep.platforms.kubernetes.sync import Synced

WATCH_SECONDS = 0.5
AGAIN_SECONDS = 2.0
"""Until a pod that lacks something is tried again."""
INTERRUPTED = 130


def sync(
    job: Annotated[str, typer.Argument(help="The job's name.")] = DEV_ENVIRONMENT,
    folder: Annotated[Path, typer.Argument(help="The folder to send.")] = Path("workspace"),
    to: Annotated[str, typer.Option("--to", help="Where to, in the pods.")] = "/workspace",
    watch: Annotated[bool, typer.Option("--watch", help="Go on sending whatever changes, until Ctrl-C.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also over files that were changed in a pod since the last sync.")] = False,
    cluster: ClusterNameOption = "local",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Send a folder to all pods of a job: only what differs, with deletions of what an earlier sync had sent. Nothing else there is touched.

    A volume that all pods share gets it once. `.lockstepignore`, else `.gitignore`, in the folder says what stays here.

    Example: lockstep sync ml-dev-env workspace --watch
    """
    from lockstep.cli.target import namespace_of

    place = namespace_of(cluster, namespace, context)
    try:
        complete = asyncio.run(
            _sync(
                job, place, context, partial(_once, job=job, namespace=place, folder=folder, to=to, force=force), folder if watch else None
            )
        )
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if not complete:
        raise typer.Exit(1)


async def _sync(job: str, namespace: str, context: str | None, once: Callable[[Cluster], Awaitable[bool]], watched: Path | None) -> bool:
    """Whether every pod has everything. With `watched` it never returns: what a pod lacks is sent again, also when nothing changes here."""
    from lockstep.cli.cp import known_job
    from lockstep.platforms.kubernetes.cluster import Cluster
    from lockstep.platforms.kubernetes.sync import stamps

    async with await Cluster.connect(context) as cluster:
        await known_job(cluster, namespace, job)
        sent = stamps(watched) if watched is not None else {}
        complete = await once(cluster)
        while watched is not None:
            await asyncio.sleep(WATCH_SECONDS if complete else AGAIN_SECONDS)
            now = stamps(watched)
            if complete and now == sent:
                continue
            sent = now
            try:
                complete = await once(cluster)
            except (LockstepError, OSError) as error:  # (a pod that is away for a moment, a file that is half saved)
                print(f"not sent: {error}", file=sys.stderr, flush=True)
                complete = False
    return complete


async def _once(cluster: Cluster, *, job: str, namespace: str, folder: Path, to: str, force: bool) -> bool:
    from lockstep.platforms.kubernetes.sync import send

    return _tell(await send(cluster, namespace, await _pods(cluster, namespace, job), folder, to, force=force))


async def _pods(cluster: Cluster, namespace: str, job: str) -> list[str]:
    """Those that run; of a job whose pods share their volumes, one. Raises ConfigError when none runs."""
    from lockstep.api.names import LABEL_JOB
    from lockstep.plan.pods import is_running

    pods: list[dict[str, Any]] = (await cluster.list("Pod", namespace, {"labelSelector": f"{LABEL_JOB}={job}"}))["items"]
    running = sorted(pod["metadata"]["name"] for pod in pods if is_running(pod) and "deletionTimestamp" not in pod["metadata"])
    if not running:
        raise ConfigError(f"no pod of job {job} runs: lockstep why {job} -n {namespace}")
    if len(running) < len(pods):
        waiting = sorted({pod["metadata"]["name"] for pod in pods} - set(running))
        raise Failed(f"{', '.join(waiting)} of job {job} doesn't run yet; nothing was sent, so that no pod is left behind")
    return running[:1] if _is_shared(pods[0]) else running


def _is_shared(pod: dict[str, Any]) -> bool:
    """A claim that every pod of a StatefulSet has for itself ends with its pod's name."""
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    return not any(claim.endswith(pod["metadata"]["name"]) for claim in claims)


def _tell(results: list[Synced]) -> bool:
    """Whether every pod has everything."""
    for result in results:
        if result.problem is not None:
            print(f"{result.pod}: not sent: {result.problem}", flush=True)
            continue
        done = f"{result.sent} sent ({result.bytes} bytes), {result.removed} removed" if result.sent or result.removed else "nothing to do"
        print(f"{result.pod}: {done}", flush=True)
        for name in result.changed:
            print(f"{result.pod}: {name} was changed there since the last sync and stays as it is; --force writes over it", flush=True)
    return all(result.problem is None and not result.changed for result in results)
