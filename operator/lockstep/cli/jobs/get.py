"""`lockstep get|describe|events|wait`: what is known of jobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.shared.jobargs import JobArgument, ListForm, ListFormOption, TargetOptions, find_job, find_jobs, on_cluster
from lockstep.plan.pages.table import aligned
from lockstep.platforms.output import put, put_json, put_text, tell

if TYPE_CHECKING:
    from lockstep.cli.shared.target import Target
    from lockstep.plan.pages.table import Unheard

POLL_SECONDS = 0.5
WATCH_SECONDS = 2.0
EXIT_STALE = 1


class Awaited(StrEnum):
    """Condition that `wait` waits for."""

    RUNNING = "Running"
    CHECKPOINT = "CheckpointCommitted"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    ENDED = "Ended"


@on_cluster
def get(
    where: TargetOptions,
    jobs: Annotated[list[str] | None, typer.Argument(help="The jobs' names. Default: all.", show_default=False)] = None,
    output: ListFormOption = ListForm.TABLE,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of every namespace that you may read.")] = False,
    selector: Annotated[str | None, typer.Option("--selector", "-l", help="Only jobs with these labels: team=nlp,tier!=test.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep printing a line for each job that changes, until Ctrl-C.")] = False,
) -> None:
    """List jobs: nodes, ranks, step, restarts and state.

    Exit code 1: the operator is not heard, so what is shown of jobs that have not ended may be old; json and yaml then have the condition StatusCurrent.

    Example: lockstep get -o wide

    Example: lockstep get -A -w
    """
    from lockstep.kube.jobs import list_jobs

    if jobs and (all_namespaces or selector):
        raise ConfigError("use either names of jobs, or -A and -l")
    if watch and output not in (ListForm.TABLE, ListForm.WIDE):
        raise ConfigError("--watch prints a table: use -o table or wide")
    named = find_jobs(jobs, where) if jobs else []  # names those that are not there
    if named and not watch:
        return _show([one.job for one in named], named[0].target, output, single=len(named) == 1)
    target = where.target()
    place = None if all_namespaces else target.namespace

    def listed() -> list[dict[str, Any]]:
        every = list_jobs(target.client, place, selector)
        return [job for job in every if job["metadata"]["name"] in jobs] if jobs else every

    if watch:
        return _watch(lambda: _current(listed(), target), wide=output is ListForm.WIDE, spaces=all_namespaces)
    listed_jobs = listed()
    if not listed_jobs and output in (ListForm.TABLE, ListForm.WIDE):
        of = f" with labels {selector}" if selector else ""
        return put(f"there is no TrainingJob{of} in {'any namespace' if place is None else f'namespace {place}'}")
    return _show(listed_jobs, target, output, single=False, spaces=all_namespaces)


def _show(jobs: list[dict[str, Any]], target: Target, output: ListForm, *, single: bool, spaces: bool = False) -> None:
    """Print them; what nobody keeps up to date any more is said, and ends with exit code 1. `spaces`: name the namespace of each."""
    current, unheard = _current(jobs, target)
    _print(current, output, single=single, spaces=spaces)
    if unheard is not None:
        tell(f"lockstep: {unheard.text(time.time())}")
        raise typer.Exit(EXIT_STALE)


def _current(jobs: list[dict[str, Any]], target: Target) -> tuple[list[dict[str, Any]], Unheard | None]:
    """The jobs, those marked whose status nobody keeps up to date, and why nobody does."""
    from lockstep.plan.pages.table import is_open, marked
    from lockstep.platforms.jobs.observe import operator_unheard

    unheard = target.client.run(lambda cluster: operator_unheard(cluster, target.namespace)) if any(map(is_open, jobs)) else None
    return [marked(job, unheard, time.time()) for job in jobs], unheard


def _print(jobs: list[dict[str, Any]], output: ListForm, *, single: bool, spaces: bool) -> None:
    from lockstep.api.files.yamltext import dump_all_yaml

    if output is ListForm.JSON:
        put_json(jobs[0] if single else {"apiVersion": "v1", "kind": "List", "items": jobs})
    elif output is ListForm.YAML:
        put_text(dump_all_yaml(jobs))
    elif output is ListForm.NAME:
        for job in jobs:
            put(f"trainingjob.lockstep.dev/{job['metadata']['name']}")
    else:
        for line in aligned(_rows(jobs, wide=output is ListForm.WIDE, spaces=spaces)):
            put(line)


def _rows(jobs: list[dict[str, Any]], *, wide: bool, spaces: bool) -> list[tuple[str, ...]]:
    """The heads first."""
    from lockstep.plan.pages.table import COLUMNS, WIDE, row

    heads = COLUMNS + WIDE if wide else COLUMNS
    cells = [row(job, time.time(), wide=wide) for job in jobs]
    if not spaces:
        return [heads, *cells]
    return [("NAMESPACE", *heads), *((str(job["metadata"]["namespace"]), *one) for job, one in zip(jobs, cells, strict=True))]


def _watch(look: Callable[[], tuple[list[dict[str, Any]], Unheard | None]], *, wide: bool, spaces: bool) -> None:
    """Print the table, then, for ever, the line of each job that has changed."""
    from lockstep.plan.pages.table import COLUMNS

    shown: dict[str, tuple[str, ...]] | None = None
    age, stale = COLUMNS.index("AGE") + spaces, ""
    while True:
        jobs, unheard = look()
        rows = _rows(jobs, wide=wide, spaces=spaces)
        heads, *lines = aligned(rows)
        if shown is None:
            put(heads, flush=True)
        since = unheard.since if unheard is not None else ""
        if unheard is not None and since != stale:
            tell(f"lockstep: {unheard.text(time.time())}")
        now = {str(job["metadata"]["uid"]): (*cells[:age], *cells[age + 1 :]) for job, cells in zip(jobs, rows[1:], strict=True)}
        for (uid, cells), line in zip(now.items(), lines, strict=True):
            if (shown or {}).get(uid) != cells:
                put(line, flush=True)
        shown, stale = now, since
        time.sleep(WATCH_SECONDS)


@on_cluster
def describe(where: TargetOptions, job: JobArgument) -> None:
    """Show everything known about a job: work, place, step, checkpoint, failure, restarts, conditions, events.

    Example: lockstep describe demo
    """
    from lockstep.kube.jobs import job_events
    from lockstep.plan.pages.table import describe as page
    from lockstep.plan.pages.table import is_open
    from lockstep.platforms.jobs.observe import operator_unheard

    cluster_job = find_job(job, where)
    client, now = cluster_job.target.client, time.time()
    unheard = client.run(lambda cluster: operator_unheard(cluster, cluster_job.namespace)) if is_open(cluster_job.job) else None
    if unheard is not None:
        put(f"Stale       {unheard.text(now)}")
    for line in page(cluster_job.job, job_events(client, cluster_job.job), now):
        put(line)
    if unheard is not None:
        raise typer.Exit(EXIT_STALE)


@on_cluster
def events(where: TargetOptions, job: JobArgument) -> None:
    """Print the events of a job that the cluster still keeps, oldest first.

    Example: lockstep events demo
    """
    from lockstep.kube.jobs import job_events
    from lockstep.plan.pages.table import age

    cluster_job = find_job(job, where)
    for event in job_events(cluster_job.target.client, cluster_job.job):
        when = age(event.get("lastTimestamp") or event.get("eventTime"), time.time())
        put(f"{when:>6}  {event.get('type', ''):8} {event.get('reason', ''):24} {event.get('message', '')}")


@on_cluster
def wait(
    where: TargetOptions,
    job: JobArgument,
    until: Annotated[
        Awaited, typer.Option("--for", case_sensitive=False, help="The condition to wait for; Ended is Complete or Failed.")
    ] = Awaited.ENDED,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds to wait at most.")] = 3600,
) -> None:
    """Wait until a condition of a job holds. Exit code 0: it holds; 1: the job failed, the time is over, or it can't hold any more.

    Example: lockstep wait demo --for Complete --timeout 7200
    """
    from lockstep.api.objects import condition, has_ended
    from lockstep.kube.jobs import job_status

    cluster_job = find_job(job, where)
    end, shown = time.monotonic() + timeout, ""
    while True:
        status = job_status(cluster_job.target.client, cluster_job.namespace, job)
        summary = condition(status, "Progressing")
        line = (
            f"{summary.get('reason', 'Unknown')}: {summary.get('message', 'no status yet: does an operator work here? (lockstep doctor)')}"
        )
        if line != shown:
            shown = line
            put(f"{job}: {line}", flush=True)
        if _is_so(status, until):
            break
        if has_ended(status):
            raise Failed(f"job {job} has ended, so it will not become {until.value}: {line}")
        if time.monotonic() > end:
            raise Failed(f"job {job} is not {until.value} after {timeout} s: {line}")
        time.sleep(POLL_SECONDS)
    if condition(status, "Failed").get("status") == "True":
        raise typer.Exit(1)


def _is_so(status: dict[str, Any], until: Awaited) -> bool:
    from lockstep.api.objects import condition, has_ended

    if until is Awaited.ENDED:
        return has_ended(status)
    if until is Awaited.RUNNING:
        return bool(condition(status, "Progressing").get("reason") == "Running")
    return bool(condition(status, until.value).get("status") == "True")
