"""`lockstep get|describe|wait`: what is known of jobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.objects import condition, current_status, has_ended, is_run
from lockstep.cli.shared.jobargs import (
    JobArgument,
    ListForm,
    ListFormOption,
    TargetOptions,
    find_job,
    find_jobs,
    on_site,
)
from lockstep.kube.outage import Outage
from lockstep.plan.pages.table import COLUMNS, WIDE, aligned, row
from lockstep.plan.pages.table import describe as page
from lockstep.plan.times import seconds_of
from lockstep.platforms.output import put, put_json, put_text, say, tell
from lockstep.platforms.places.values import POLL_SECONDS, JobGone

if TYPE_CHECKING:
    from lockstep.cli.shared.places import Verb
    from lockstep.platforms.places.backend import Backend, Job

WATCH_SECONDS = 2.0
EXIT_STALE = 1


class Awaited(StrEnum):
    """Condition that `wait` waits for."""

    RUNNING = "Running"
    CHECKPOINT = "CheckpointCommitted"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    ENDED = "Ended"


@on_site
def get(
    where: TargetOptions,
    jobs: Annotated[list[str] | None, typer.Argument(help="The jobs' names. Default: all.", show_default=False)] = None,
    output: ListFormOption = ListForm.TABLE,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List the jobs of every namespace that you may read.")
    ] = False,
    selector: Annotated[str | None, typer.Option("--selector", "-l", help="Only jobs with these labels: team=nlp,tier!=test.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Print a line for each change, until Ctrl-C or the named jobs' end.")
    ] = False,
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="List the jobs of all clusters and hosts that have a file, and of this machine.")
    ] = False,
) -> None:
    """List jobs: nodes, ranks, step, restarts and state.

    Exit code 1: the operator is silent, so what you see of jobs that have not ended may be old. In json and yaml these jobs then have the
    condition StatusCurrent. With --everywhere, a place that doesn't answer has exit code 1, too.

    Example: lockstep get -o wide

    Example: lockstep get -A -w

    Example: lockstep get --everywhere
    """
    if everywhere:
        if jobs or all_namespaces or selector or watch or where != TargetOptions():
            raise ConfigError("--everywhere lists all jobs of all places: leave out all other words but -o")
        return _everywhere(where.verb, output)
    if jobs and (all_namespaces or selector):
        raise ConfigError("use either names of jobs, or -A and -l")
    if watch and output not in (ListForm.TABLE, ListForm.WIDE):
        raise ConfigError("--watch prints a table: use -o table or wide")
    backend = where.backend(hurried=True)
    backend.refuse("-A and -l", all_namespaces or selector)
    backend.refuse("-l", selector)
    named = find_jobs(jobs or [], backend)  # names those that are not there
    if named and not watch:
        return _show(backend, named, output, single=len(named) == 1)

    def listed() -> list[Job]:
        every = backend.jobs(everywhere=all_namespaces, selector=selector)
        return [job for job in every if (job.name, job.uid) in watched] if named else every

    watched = {(job.name, job.uid) for job in named}
    if watch:
        return _watch(backend, listed, watched, wide=output is ListForm.WIDE, spaces=all_namespaces)
    listed_jobs = listed()
    if not listed_jobs and output in (ListForm.TABLE, ListForm.WIDE) and backend.current([])[1] is None:
        of = f" with labels {selector}" if selector else ""
        return put(f"there is no {backend.words.noun}{of} {'in any namespace' if all_namespaces else backend.words.where}")
    return _show(backend, listed_jobs, output, single=False, spaces=all_namespaces)


def _everywhere(verb: Verb, output: ListForm) -> None:
    """Print the jobs of all places; those that aren't seen as they are now are named, and the exit code is 1."""
    from lockstep.cli.jobs.everywhere import look_everywhere, unasked

    def rows(wide: bool) -> list[tuple[str, ...]]:
        lines = list[tuple[str, ...]]()
        for one in seen:
            if one.backend is not None:
                spaces = one.backend.has_namespaces
                heads, *cells = _rows(one.backend, [*one.jobs.values()], wide=wide, spaces=spaces)
                lines = lines or [("PLACE", *(() if spaces else ("NAMESPACE",)), *heads)]
                lines += [(one.place, *(() if spaces else ("-",)), *line) for line in cells]
        return lines if len(lines) > 1 else [("there is no job in any place that answers",)]

    seen = look_everywhere(verb)
    _print([job for one in seen for job in one.jobs.values()], output, rows, single=False)
    if server := unasked(verb):
        tell(f"note: your kubeconfig's cluster at {server} has no file, and isn't asked: lockstep cluster discover NAME writes one")
    problems = [f"{one.place}: {one.problem}" for one in seen if one.problem]
    for problem in problems:
        tell(f"lockstep: {problem}")
    if problems:
        raise typer.Exit(EXIT_STALE)


def _show(backend: Backend, jobs: list[Job], output: ListForm, *, single: bool, spaces: bool = False) -> None:
    """Print them; what nobody keeps up to date any more is said, and ends with exit code 1. `spaces`: name the namespace of each."""
    current, stale = backend.current(jobs)
    _print(current, output, lambda wide: _rows(backend, current, wide=wide, spaces=spaces), single=single)
    if stale is not None:
        tell(f"lockstep: {stale.text}")
        raise typer.Exit(EXIT_STALE)


def _print(jobs: list[dict[str, Any]], output: ListForm, rows: Callable[[bool], list[tuple[str, ...]]], *, single: bool) -> None:
    from lockstep.api.files.yamltext import dump_all_yaml

    if output is ListForm.JSON:
        put_json(jobs[0] if single else {"apiVersion": "v1", "kind": "List", "items": jobs})
    elif output is ListForm.YAML:
        put_text(dump_all_yaml(jobs))
    elif output is ListForm.NAME:
        for job in jobs:
            put(f"configmap/{job['status']['run']['name']}" if is_run(job) else f"trainingjob.lockstep.dev/{job['metadata']['name']}")
    else:
        for line in aligned(rows(output is ListForm.WIDE)):
            put(line)


def _rows(backend: Backend, jobs: list[dict[str, Any]], *, wide: bool, spaces: bool) -> list[tuple[str, ...]]:
    """The heads first."""
    heads = WIDE if wide else COLUMNS
    defaults = [None if job["spec"].get("nodes") else backend.default_nodes(job) for job in jobs]
    cells = [row(job, time.time(), heads, nodes) for job, nodes in zip(jobs, defaults, strict=True)]
    if not spaces:
        return [heads, *cells]
    return [("NAMESPACE", *heads), *((str(job["metadata"]["namespace"]), *one) for job, one in zip(jobs, cells, strict=True))]


def _watch(backend: Backend, listed: Callable[[], list[Job]], named: set[tuple[str, str]], *, wide: bool, spaces: bool) -> None:
    """Print the table, then the line of each job that has changed, until all `named` (name, uid), if any, have ended. Raises JobGone for
    deleted ones.
    """
    shown: dict[tuple[str, str], tuple[str, ...]] | None = None
    age, stale = COLUMNS.index("AGE") + spaces, ""
    while True:
        jobs, silence = backend.current(listed())
        rows = _rows(backend, jobs, wide=wide, spaces=spaces)
        heads, *lines = aligned(rows)
        if shown is None:
            put(heads, flush=True)
        since = silence.since if silence is not None else ""
        if silence is not None and since != stale:
            tell(f"lockstep: {silence.text}")
        keys = [(str(job["metadata"]["name"]), str(job["metadata"]["uid"])) for job in jobs]
        now = {key: (*cells[:age], *cells[age + 1 :]) for key, cells in zip(keys, rows[1:], strict=True)}
        for (key, cells), line in zip(now.items(), lines, strict=True):
            if (shown or {}).get(key) != cells:
                put(line, flush=True)
        shown, stale = now, since
        if named and silence is None and all(has_ended(current_status(job)) for job in jobs):
            if gone := sorted(name for name, _ in named - now.keys()):
                raise JobGone(", ".join(gone))
            return
        time.sleep(WATCH_SECONDS)


@on_site
def describe(where: TargetOptions, job: JobArgument) -> None:
    """Show everything that is known about a job.

    It shows the job's work, place, step, checkpoint, failure, restarts, conditions and events.

    Example: lockstep describe demo
    """
    from lockstep.kube.jobs import job_events

    found = where.backend(hurried=True).job(job)
    _, stale = found.backend.current([found])
    if stale is not None:
        put(f"Stale       {stale.text}")
    events = [] if found.pods is None else job_events(found.pods.client, found.job)
    for line in page(found.job, events, time.time(), found.backend.words.where):
        put(line)
    if stale is not None:
        raise typer.Exit(EXIT_STALE)


@on_site
def wait(
    where: TargetOptions,
    job: JobArgument,
    until: Annotated[
        Awaited,
        typer.Option(
            "--for",
            metavar="CONDITION",
            case_sensitive=False,
            help="Running, CheckpointCommitted, Suspended, Complete or Ended (Complete or Failed).",
        ),
    ] = Awaited.ENDED,
    timeout: Annotated[int, typer.Option(min=1, help="Longest wait in seconds.")] = 3600,
) -> None:
    """Wait until a condition of a job holds.

    CheckpointCommitted is a commit that is newer than the job's last start, restart or stop.

    Exit code 0: it holds; 1: the job failed, the timeout passed, or the condition can no longer hold.

    Example: lockstep wait demo --for Complete --timeout 7200
    """
    from lockstep.plan.ahead.submission import standstill

    waited = find_job(job, where)
    end, shown = time.monotonic() + timeout, ""
    status, outage = waited.status, Outage(say)
    before: dict[str, Any] = {}
    while True:
        status = before = outage.ask(partial(waited.look_again, before), status)
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
        if until is not Awaited.SUSPENDED and (still := standstill(status)):
            raise Failed(f"job {job} will not become {until.value} by itself: {still}")
        if time.monotonic() > end:
            raise Failed(f"job {job} is not {until.value} after {timeout} s: {line}")
        time.sleep(POLL_SECONDS)
    if condition(status, "Failed").get("status") == "True":
        raise typer.Exit(1)


def _is_so(status: dict[str, Any], until: Awaited) -> bool:
    if until is Awaited.ENDED:
        return has_ended(status)
    if until is Awaited.RUNNING:
        return bool(condition(status, "Progressing").get("reason") == "Running")
    holds = bool(condition(status, until.value).get("status") == "True")
    return holds and (until is not Awaited.CHECKPOINT or has_ended(status) or _is_of_this_start(status))


def _is_of_this_start(status: dict[str, Any]) -> bool:
    """Return True if the newest commit is newer than the last start, restart and stop, as far as anybody knows of them."""
    committed = (status.get("checkpoint") or {}).get("lastCommitTime")
    restarts = status.get("restartHistory") or []
    starts = [status.get("startTime"), (status.get("active") or {}).get("since"), (status.get("stop") or {}).get("time")]
    starts += [one.get("time") for one in restarts[-1:]]
    return committed is None or all(seconds_of(committed) > seconds_of(start) for start in starts if start)
