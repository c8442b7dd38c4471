"""`lockstep sync JOB [FOLDER]`: code from this machine to the pods of a job."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.jobargs import ClusterNameOption, ContextOption, Found, JobArgument, NamespaceOption, find_job

if TYPE_CHECKING:
    from lockstep.platforms.kubernetes.sync import Synced

WATCH_SECONDS = 0.5


def sync(
    job: JobArgument,
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
    from lockstep.platforms.kubernetes.client import connect
    from lockstep.platforms.kubernetes.sync import send

    found = find_job(job, cluster, namespace, context)
    pods = _pods(found)
    send_now = partial(send, partial(connect, context), found.namespace, pods, folder, to, force=force)
    complete = _tell(send_now())
    while watch:
        before = _stamps(folder)
        while _stamps(folder) == before:
            time.sleep(WATCH_SECONDS)
        _tell(send_now())
    if not complete:
        raise typer.Exit(1)


def _pods(found: Found) -> list[str]:
    """Those that run; of a job whose pods share their volumes, one. Raises ConfigError when none runs."""
    from kubernetes.client import CoreV1Api

    from lockstep.api.names import LABEL_JOB
    from lockstep.plan.pods import is_running

    client = found.target.client
    listed = CoreV1Api(client).list_namespaced_pod(found.namespace, label_selector=f"{LABEL_JOB}={found.name}")
    pods: list[dict[str, Any]] = client.sanitize_for_serialization(listed)["items"]
    running = sorted(pod["metadata"]["name"] for pod in pods if is_running(pod) and "deletionTimestamp" not in pod["metadata"])
    if not running:
        raise ConfigError(f"no pod of job {found.name} runs: lockstep why {found.name} -n {found.namespace}")
    if len(running) < len(pods):
        waiting = sorted({pod["metadata"]["name"] for pod in pods} - set(running))
        raise Failed(f"{', '.join(waiting)} of job {found.name} doesn't run yet; nothing was sent, so that no pod is left behind")
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


def _stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (found.st_mtime_ns, found.st_size) for path in folder.rglob("*") if (found := path.lstat())}
