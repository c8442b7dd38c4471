"""`lockstep suspend|resume|stop JOB`: give the GPUs back and go on later, from the last checkpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.shared.jobargs import ClusterNameOption, ContextOption, Found, JobsArgument, NamespaceOption, find_jobs
from lockstep.platforms.output import put

POLL_SECONDS = 0.5


def suspend(
    jobs: JobsArgument, cluster: ClusterNameOption = "local", namespace: NamespaceOption = None, context: ContextOption = None
) -> None:
    """Ask jobs to save and stop, so that their pods and GPUs go. Returns at once; `lockstep stop` waits.

    Example: lockstep suspend demo
    """
    for found in _not_ended(jobs, cluster, namespace, context):
        if _set_suspend(found, suspended=True):
            put(f"{found.name}: asked to save and stop; go on with: lockstep resume {found.name} -n {found.namespace}")
        else:
            put(f"{found.name} is suspended already")


def resume(
    jobs: JobsArgument, cluster: ClusterNameOption = "local", namespace: NamespaceOption = None, context: ContextOption = None
) -> None:
    """Let suspended jobs go on, from their last checkpoint.

    Example: lockstep resume demo
    """
    for found in _not_ended(jobs, cluster, namespace, context):
        if _set_suspend(found, suspended=False) or _take_back(found):
            put(f"{found.name}: goes on; see it with: lockstep logs {found.name} -f -n {found.namespace}")
        else:
            put(f"{found.name} is not suspended")


def stop(
    jobs: JobsArgument,
    run: Annotated[bool, typer.Option("--run", help="Of a dev environment: stop the script that it runs, and leave it its pods.")] = False,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds to wait for the save and the end of the pods.")] = 600,
    cluster: ClusterNameOption = "local",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Suspend jobs and wait until they have saved and their pods are gone. Exit code 1 when they are still there after --timeout.

    With --run only the script that a dev environment runs is stopped, as Ctrl-C would where it was started: for one of `lockstep run --detach`.

    Example: lockstep stop demo

    Example: lockstep stop ml-dev-env --run
    """
    found = _not_ended(jobs, cluster, namespace, context)
    if run:
        raise typer.Exit(max(_stop_run(one, context) for one in found))
    for one in found:
        _set_suspend(one, suspended=True)
    end = time.monotonic() + timeout
    for one in found:
        _until_stopped(one, end, timeout)


def _until_stopped(found: Found, end: float, timeout: int) -> None:
    """Raises Failed. What its status says before the operator has seen that it is to stop says nothing of the stop."""
    from lockstep.api.objects import condition as condition_of
    from lockstep.kube.jobs import job_status
    from lockstep.plan.reasons import Reason

    message = ""
    while True:
        condition = condition_of(job_status(found.target.client, found.namespace, found.name), "Suspended")
        if condition.get("reason", Reason.NOT_SUSPENDED) != Reason.NOT_SUSPENDED and condition.get("message", message) != message:
            message = condition["message"]
            put(f"{found.name}: {message}", flush=True)
        if condition.get("status") == "True":
            return
        if time.monotonic() > end:
            raise Failed(
                f"job {found.name} has not stopped within {timeout} s: {message or 'its status says nothing'}; it stays asked to stop"
            )
        time.sleep(POLL_SECONDS)


def _stop_run(found: Found, context: str | None) -> int:
    """The exit code of what a person would type in its pod."""
    from lockstep.api.names import AGENT_PATH
    from lockstep.cli.jobs.run import refuse
    from lockstep.platforms.jobs.devrun import run_on_all_nodes

    refuse(found)
    return asyncio.run(run_on_all_nodes(context, found.namespace, found.name, ["python3", "-I", AGENT_PATH, "stop"]))


def _not_ended(jobs: Sequence[str], cluster: str, namespace: str | None, context: str | None) -> list[Found]:
    """Raises ConfigError where one of them isn't there or has ended: then nothing is done to the others, either."""
    found = find_jobs(jobs, cluster, namespace, context)
    for one in found:
        _refuse_ended(one)
    return found


def _take_back(found: Found) -> bool:
    """Ask for the GPUs of a dev environment that nobody used; whether they had been released."""
    from lockstep.kube.jobs import patch_spec

    said = (found.job.get("status") or {}).get("interactive") or {}
    if "released" not in said:
        return False
    patch_spec(found.target.client, found.namespace, found.name, {"interactive": {"resume": int(said.get("resume", 0)) + 1}})
    return True


def _refuse_ended(found: Found) -> None:
    from lockstep.api.objects import is_true

    status, place = found.job.get("status", {}), f"{found.name} -n {found.namespace}"
    if is_true(status, "Complete"):
        raise ConfigError(f"job {found.name} is complete: it has no pods to stop and nothing to go on with (lockstep describe {place})")
    if is_true(status, "Failed"):
        raise ConfigError(f"job {found.name} has failed: lockstep why {place} says of what, lockstep retry {place} starts it again")


def _set_suspend(found: Found, *, suspended: bool) -> bool:
    """Whether that changed anything."""
    from lockstep.kube.jobs import patch_spec

    spec: dict[str, Any] = found.job["spec"]
    if bool(spec.get("suspend", False)) == suspended:
        return False
    patch_spec(found.target.client, found.namespace, found.name, {"suspend": suspended})
    return True
