"""`lockstep get|describe|events|wait`: what is known of jobs."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated, Any

import typer

from lockstep.api.errors import Failed
from lockstep.cli.jobargs import ClusterNameOption, ContextOption, JobArgument, NamespaceOption, Output, OutputOption, find_job
from lockstep.platforms.output import put, put_json, put_text

POLL_SECONDS = 0.5


class Awaited(StrEnum):
    """What `wait` waits for."""

    RUNNING = "Running"
    CHECKPOINT = "CheckpointCommitted"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    ENDED = "Ended"


def get(
    job: Annotated[str | None, typer.Argument(help="A job's name. Default: every job of the namespace.", show_default=False)] = None,
    output: OutputOption = Output.TABLE,
    cluster: ClusterNameOption = "local",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """List jobs: nodes, ranks, step, restarts and the one word that says how each is.

    Example: lockstep get -o wide
    """
    from lockstep.cli.target import target_of
    from lockstep.platforms.kubernetes.jobs import list_jobs

    if job is not None:
        found = find_job(job, cluster, namespace, context)
        return _print([found.job], output, single=True)
    target = target_of(cluster, namespace, context)
    jobs = list_jobs(target.client, target.namespace)
    if not jobs and output in (Output.TABLE, Output.WIDE):
        return put(f"there is no TrainingJob in namespace {target.namespace}")
    return _print(jobs, output, single=False)


def _print(jobs: list[dict[str, Any]], output: Output, *, single: bool) -> None:
    from lockstep.api.yamltext import dump_all_yaml

    if output is Output.JSON:
        put_json(jobs[0] if single else {"apiVersion": "v1", "kind": "List", "items": jobs})
    elif output is Output.YAML:
        put_text(dump_all_yaml(jobs))
    elif output is Output.NAME:
        for job in jobs:
            put(f"trainingjob.lockstep.dev/{job['metadata']['name']}")
    else:
        _table(jobs, wide=output is Output.WIDE)


def _table(jobs: list[dict[str, Any]], *, wide: bool) -> None:
    from lockstep.plan.columns import aligned
    from lockstep.plan.table import COLUMNS, WIDE, row

    for line in aligned([COLUMNS + WIDE if wide else COLUMNS, *(row(job, time.time(), wide=wide) for job in jobs)]):
        put(line)


def describe(
    job: JobArgument, cluster: ClusterNameOption = "local", namespace: NamespaceOption = None, context: ContextOption = None
) -> None:
    """Show all that is known of a job: work, place, step, checkpoint, failure, restarts, conditions, events.

    Example: lockstep describe demo
    """
    from lockstep.plan.table import describe as page
    from lockstep.platforms.kubernetes.jobs import job_events

    found = find_job(job, cluster, namespace, context)
    for line in page(found.job, job_events(found.target.client, found.job), time.time()):
        put(line)


def events(
    job: JobArgument, cluster: ClusterNameOption = "local", namespace: NamespaceOption = None, context: ContextOption = None
) -> None:
    """Print the events about a job that the cluster still keeps, the oldest first.

    Example: lockstep events demo
    """
    from lockstep.plan.table import age
    from lockstep.platforms.kubernetes.jobs import job_events

    found = find_job(job, cluster, namespace, context)
    for event in job_events(found.target.client, found.job):
        when = age(event.get("lastTimestamp") or event.get("eventTime"), time.time())
        put(f"{when:>6}  {event.get('type', ''):8} {event.get('reason', ''):24} {event.get('message', '')}")


def wait(
    job: JobArgument,
    until: Annotated[
        Awaited, typer.Option("--for", case_sensitive=False, help="What to wait for; Ended is Complete or Failed.")
    ] = Awaited.ENDED,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds.")] = 3600,
    cluster: ClusterNameOption = "local",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Wait for a job. Exit code 0: it is so; 1: it failed, or the time is over, or it can't come any more.

    Example: lockstep wait demo --for Complete --timeout 7200
    """
    from lockstep.plan.readstatus import condition
    from lockstep.platforms.kubernetes.jobs import has_ended, job_status

    found = find_job(job, cluster, namespace, context)
    end, told = time.monotonic() + timeout, ""
    while True:
        status = job_status(found.target.client, found.namespace, job)
        summary = condition(status, "Progressing")
        line = (
            f"{summary.get('reason', 'Unknown')}: {summary.get('message', 'no status yet: does an operator work here? (lockstep doctor)')}"
        )
        if line != told:
            told = line
            put(f"{job}: {line}", flush=True)
        if _is_so(status, until):
            break
        if has_ended(status):
            raise Failed(f"job {job} has ended, so {until.value} will not come: {line}")
        if time.monotonic() > end:
            raise Failed(f"job {job} is not {until.value} after {timeout} s: {line}")
        time.sleep(POLL_SECONDS)
    if condition(status, "Failed").get("status") == "True":
        raise typer.Exit(1)


def _is_so(status: dict[str, Any], until: Awaited) -> bool:
    from lockstep.plan.readstatus import condition
    from lockstep.platforms.kubernetes.jobs import has_ended

    if until is Awaited.ENDED:
        return has_ended(status)
    if until is Awaited.RUNNING:
        return bool(condition(status, "Progressing").get("reason") == "Running")
    return bool(condition(status, until.value).get("status") == "True")
