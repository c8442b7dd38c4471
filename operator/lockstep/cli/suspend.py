"""`lockstep suspend|resume|stop JOB`: give the GPUs back and go on later, from the last checkpoint."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.jobargs import ClusterNameOption, ContextOption, Found, JobArgument, NamespaceOption, find_job
from lockstep.platforms.output import put

POLL_SECONDS = 0.5


def suspend(
    job: JobArgument, cluster: ClusterNameOption = "local", namespace: NamespaceOption = None, context: ContextOption = None
) -> None:
    """Ask a job to save and stop, so that its pods and GPUs go. Returns at once; `lockstep stop` waits.

    Example: lockstep suspend demo
    """
    found = find_job(job, cluster, namespace, context)
    _refuse_ended(found)
    if _set_suspend(found, suspended=True):
        put(f"{job}: asked to save and stop; go on with: lockstep resume {job} -n {found.namespace}")
    else:
        put(f"{job} is suspended already")


def resume(
    job: JobArgument, cluster: ClusterNameOption = "local", namespace: NamespaceOption = None, context: ContextOption = None
) -> None:
    """Let a suspended job go on, from its last checkpoint.

    Example: lockstep resume demo
    """
    found = find_job(job, cluster, namespace, context)
    _refuse_ended(found)
    if _set_suspend(found, suspended=False) or _take_back(found):
        put(f"{job}: goes on; see it with: lockstep logs {job} -f -n {found.namespace}")
    else:
        put(f"{job} is not suspended")


def stop(
    job: JobArgument,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds to wait for the save and the end of the pods.")] = 600,
    cluster: ClusterNameOption = "local",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Suspend a job and wait until it has saved and its pods are gone. Exit code 1 when they are still there after --timeout.

    Example: lockstep stop demo
    """
    from lockstep.plan.readstatus import condition as condition_of
    from lockstep.platforms.kubernetes.jobs import job_status

    found = find_job(job, cluster, namespace, context)
    _refuse_ended(found)
    _set_suspend(found, suspended=True)
    end = time.monotonic() + timeout
    told = ""
    while time.monotonic() < end:
        condition = condition_of(job_status(found.target.client, found.namespace, job), "Suspended")
        if condition.get("message", told) != told:
            told = condition["message"]
            put(f"{job}: {told}", flush=True)
        if condition.get("status") == "True":
            return
        time.sleep(POLL_SECONDS)
    raise Failed(f"job {job} has not stopped within {timeout} s: {told or 'its status says nothing'}; it stays asked to stop")


def _take_back(found: Found) -> bool:
    """Ask for the GPUs of a dev environment that nobody used; whether they had been released."""
    from lockstep.platforms.kubernetes.jobs import patch_spec

    said = (found.job.get("status") or {}).get("interactive") or {}
    if "released" not in said:
        return False
    patch_spec(found.target.client, found.namespace, found.name, {"interactive": {"resume": int(said.get("resume", 0)) + 1}})
    return True


def _refuse_ended(found: Found) -> None:
    from lockstep.plan.readstatus import is_true

    status, place = found.job.get("status", {}), f"{found.name} -n {found.namespace}"
    if is_true(status, "Complete"):
        raise ConfigError(f"job {found.name} is complete: it has no pods to stop and nothing to go on with (lockstep describe {place})")
    if is_true(status, "Failed"):
        raise ConfigError(f"job {found.name} has failed: lockstep why {place} says of what, lockstep retry {place} starts it again")


def _set_suspend(found: Found, *, suspended: bool) -> bool:
    """Whether that changed anything."""
    from lockstep.platforms.kubernetes.jobs import patch_spec

    spec: dict[str, Any] = found.job["spec"]
    if bool(spec.get("suspend", False)) == suspended:
        return False
    patch_spec(found.target.client, found.namespace, found.name, {"suspend": suspended})
    return True
