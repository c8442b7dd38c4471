"""Verbs that change a job: `lockstep resume|stop|scale|retry|delete`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import WORKSPACE as VOLUME
from lockstep.api.objects import Typed, condition, current_status, go_on_words, has_ended, is_run, is_true, typed_command, typed_file
from lockstep.cli.shared.inputs import OptionalFileOption, only, option_words, read_all, read_inputs
from lockstep.cli.shared.jobargs import (
    JobArgument,
    JobsArgument,
    TargetOptions,
    find_cluster_job,
    find_job,
    find_jobs,
    known_names,
    on_cluster,
    on_site,
    stated_place,
)
from lockstep.cli.shared.terminal import confirm
from lockstep.kube.outage import Outage
from lockstep.plan.cluster.finding import Outcome
from lockstep.plan.reasons import Reason
from lockstep.platforms.output import put, say
from lockstep.platforms.places.backends import words_to
from lockstep.platforms.places.orders import IN_NAMESPACE, lack
from lockstep.platforms.places.values import POLL_SECONDS, STOP_SECONDS
from lockstep.programs import output_of
from lockstep_spec.words import number_of

if TYPE_CHECKING:
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.kubernetes.job import KubernetesJob
    from lockstep.platforms.places.backend import Job

NODES_MAX = 1024
REMOVE = "import os, shutil, sys; os.path.isdir(sys.argv[1]) and shutil.rmtree(sys.argv[1])"
REMOVE_SECONDS = 1800.0
"""A run of thousands of files on a slow volume."""


@on_site
def resume(where: TargetOptions, jobs: JobsArgument) -> None:
    """Resume suspended jobs.

    They go on from their last checkpoint, if one was committed. A script starts again, and goes on if it looks for its own checkpoints.

    Example: lockstep resume demo
    """
    for job in _not_ended(jobs, where):
        if job.resume():
            put(f"{job.name}: goes on; see it with: lockstep logs {job.name} -f {job.backend.words.again}")
        else:
            put(f"{job.name} is not suspended")


@on_site
def stop(
    where: TargetOptions,
    jobs: JobsArgument,
    run: Annotated[bool, typer.Option("--run", help="Stop the script that a dev environment runs, and keep its pods.")] = False,
    now: Annotated[bool, typer.Option("--now", help="On hosts and this machine: stop without a save.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Ask jobs to save and stop, and return at once.")] = False,
) -> None:
    """Save jobs, stop them, and free their nodes.

    It waits until they have saved and their pods are gone. Exit code 1 when they are still there after 10 minutes.

    With --run it stops only the script that a dev environment runs, for example one that `lockstep run --detach` started. The effect is
    that of Ctrl-C in the terminal of that run.

    Example: lockstep stop demo

    Example: lockstep stop ml-dev-env --run
    """
    found = _not_ended(jobs, where, hurried=True)
    if run:
        found[0].backend.refuse("--run", **found[0].words)
        raise typer.Exit(max(find_cluster_job(job.name, where).stop_script() for job in found))
    asked = [job.suspend(now=now) for job in found]
    if no_wait:
        for job, is_new in zip(found, asked, strict=True):
            put(f"{job.name}: asked to save and stop; go on with: lockstep resume {job.at}" if is_new else f"{job.name} is stopped already")
        return
    end = time.monotonic() + STOP_SECONDS
    for job in found:
        _until_stopped(job, end)


def _until_stopped(job: Job, end: float) -> None:
    """Wait until the job has stopped, or has ended by itself meanwhile. Raises Failed if it takes too long or the job fails.

    What its status says before the operator has seen that it is to stop says nothing of the stop.
    """
    message, status, outage = "", job.status, Outage(say)
    while True:
        status = outage.ask(job.look_again, status)
        suspended = condition(status, "Suspended")
        if suspended.get("reason", Reason.NOT_SUSPENDED) != Reason.NOT_SUSPENDED and suspended.get("message", message) != message:
            message = suspended["message"]
            put(f"{job.name}: {message}", flush=True)
        if suspended.get("status") == "True":
            return
        if is_true(status, "Failed"):
            raise Failed(f"job {job.name} has failed meanwhile: {condition(status, 'Failed')['message']}")
        if is_true(status, "Complete"):
            put(f"{job.name}: complete meanwhile, so it doesn't go on: {condition(status, 'Complete')['message']}")
            return
        if time.monotonic() > end:
            raise Failed(
                f"job {job.name} has not stopped within {STOP_SECONDS:.0f} s: {message or 'its status says nothing'}; the request to stop"
                " stays"
            )
        time.sleep(POLL_SECONDS)


def _not_ended(jobs: Sequence[str], where: TargetOptions, *, hurried: bool = False) -> list[Job]:
    """Return these jobs. Raises ConfigError where one of them isn't there or has ended: then nothing is done to the others, either."""
    found = find_jobs(jobs, where.backend(hurried=hurried))
    for job in found:
        if is_true(job.status, "Complete"):
            raise ConfigError(
                f"job {job.name} is complete: there is nothing to stop and nothing to go on with (lockstep describe {job.at})"
            )
        if is_true(job.status, "Failed"):
            raise ConfigError(f"job {job.name} has failed: lockstep why {job.at} explains why, lockstep retry {job.at} starts it again")
    return found


@on_cluster
def scale(
    where: TargetOptions,
    job: JobArgument,
    goal: Annotated[int, typer.Argument(metavar="NODES", min=1, max=NODES_MAX, help="The new number of nodes.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask, even if the job would wait for nodes.")] = False,
) -> None:
    """Change a job's number of nodes.

    The job saves, stops, and goes on from there with the same global batch; a script starts again. If too few nodes have room, the verb
    asks you first.

    Example: lockstep scale demo 4
    """
    cluster_job = find_cluster_job(job, where)
    if has_ended(cluster_job.job.get("status", {})):
        raise ConfigError(f"job {job} has ended: give a new job the number of nodes it should have")
    before = cluster_job.job["spec"].get("nodes")
    if before == goal:
        put(f"{job} has {number_of(goal, 'node')} already")
        return
    lack = "" if yes else cluster_job.target.client.run(lambda cluster: _lack_of_nodes(cluster, cluster_job, goal))
    if lack:
        warning = f"{lack}: {job} would stop and wait for them."
        confirm(f"{warning} Scale it anyway?", f"{warning} Use --yes to scale it anyway")
    cluster_job.patch({"nodes": goal})
    was = "the cluster's number of nodes" if before is None else before
    put(f"{job}: {was} → {number_of(goal, 'node')}; see it with: lockstep get {cluster_job.at}")


async def _lack_of_nodes(cluster: Cluster, cluster_job: KubernetesJob, goal: int) -> str:
    """Return why too few nodes have room now; '' where enough have, or where the account may not look, or nothing says what a pod asks
    for.
    """
    from lockstep.plan.cluster.fitting import room
    from lockstep.platforms.clusters.facts import room_facts

    stateful_set = await cluster.get("StatefulSet", cluster_job.namespace, cluster_job.name)
    if stateful_set is None:
        return ""
    findings = room(stateful_set["spec"]["template"], goal, await room_facts(cluster, cluster_job.namespace, cluster_job.name))
    return next((one.message for one in findings if one.outcome is Outcome.WAITS), "")


@on_site
def retry(
    where: TargetOptions,
    job: Annotated[str | None, typer.Argument(help="The job's name.", show_default=False)] = None,
    files: OptionalFileOption = None,
    in_namespace: Annotated[bool, typer.Option("--in-namespace", help="Retry a run of `lockstep run --in-namespace`.")] = False,
) -> None:
    """Start a failed job again.

    It goes on from its last checkpoint, if one was committed. A script starts again, and goes on if it looks for its own checkpoints. The
    failure stays in the job's history.

    Example: lockstep retry demo
    """
    file = only(files, "retry") if files else None
    place = stated_place(where, in_namespace=in_namespace)
    if file is not None and place is not None and job is None:
        raise typer.Exit(_run_again(file, where, place))
    if job is None or file is not None or place == IN_NAMESPACE:
        raise ConfigError("name the failed job: lockstep retry JOB, or use -f FILE with either --local or --in-namespace")
    failed = find_job(job, where)
    _refuse_unless_failed(failed)
    number = failed.raise_retry()
    put(f"{job}: retry {number}, to {go_on_words(failed.job)}; see it with: lockstep logs {job} -f {failed.backend.words.again}")


def _refuse_unless_failed(job: Job) -> None:
    status, name, again = job.status, job.name, job.backend.words.again
    if is_run(job.job):
        raise lack(IN_NAMESPACE, "retry", job=name, again=again)
    if is_true(status, "Complete"):
        is_script = "script" in job.job["spec"]
        own = "remove what the script has saved, then " if is_script else ""
        command = typed_command(job.job, again) if is_script else f"lockstep run -f {typed_file(job.job)} --fresh {again}"
        raise ConfigError(
            f"job {name} is complete: there is nothing to retry (lockstep describe {job.at}); to run it anew: {own}lockstep delete"
            f" {job.at}, then {command}"
        )
    if not is_true(status, "Failed"):
        progress = condition(status, "Progressing")
        state = f"{progress['reason']}: {progress['message']}" if progress else "its status says nothing yet"
        raise ConfigError(f"job {name} has not failed, so there is nothing to retry: {state}")


def _run_again(file: Path, where: TargetOptions, place: str) -> int:
    """Start a failed run without an operator again, and return its exit code."""
    from lockstep.cli.jobs.run import run_job

    inputs = read_inputs(file, where)
    options: dict[str, object] = {"--cluster": where.cluster} if where.workspace is None else words_to(where.workspace)
    typed = Typed(str(file), tuple(option_words(options)), (), where.cluster, where.context)
    return run_job(inputs, inputs.at(where), place, typed, {"-f": file, **options}, retry=True)


@on_site
def delete(
    where: TargetOptions,
    jobs: Annotated[list[str] | None, typer.Argument(help="The jobs' names.", show_default=False, autocompletion=known_names)] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            show_default=False,
            help="Delete the jobs of a job file or a folder of them, instead of names; - reads standard input. May be repeated.",
        ),
    ] = None,
    with_files: Annotated[
        bool,
        typer.Option(
            "--files", help="Also remove each job's folder /workspace/runs/JOB: its checkpoints, logs and adapter. The job must not run."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Delete jobs; a running job saves first.

    Claims and their checkpoints stay: a new job of the same name goes on from them. With --files the checkpoints go, too; you are asked
    first.

    If one of them doesn't exist, none is deleted.

    Example: lockstep delete demo

    Example: lockstep delete demo --files

    Example: lockstep delete -f jobs/
    """
    if bool(jobs) == bool(files):
        raise ConfigError(f"name the jobs, or use -f FILE{', not both' if jobs else ''}")
    found = _of_files(files, where) if files else find_jobs(jobs or [], where.backend())
    places = places_of_files(found, yes=yes) if with_files else [[]] * len(found)
    is_remembered = where.verb.choice is not None and not where.verb.choice.is_typed
    running = [one for one in found if not (has_ended(one.status) or one.job["spec"].get("suspend") or is_true(one.status, "Suspended"))]
    if running and not yes:
        names, them = ", ".join(one.name for one in running), "it" if len(running) == 1 else "them"
        have = f"job {names} has" if len(running) == 1 else f"jobs {names} have"
        there = ", ".join(sorted({one.backend.words.where for one in found}))
        question = f"{have[0].upper()}{have[1:]} not ended ({there}). Save, stop and delete {them}?"
        confirm(question, f"{have} not ended: use --yes to delete {them} anyway")
    elif is_remembered and not (yes or with_files):
        names, there = ", ".join(one.name for one in found), ", ".join(sorted({one.backend.words.where for one in found}))
        confirm(
            f"Delete {names} {there}? No option names this cluster.",
            f"no option names the cluster of {names} ({there}): use --cluster, or --yes to delete {names} there",
        )
    for one, nodes in zip(found, places, strict=True):
        if with_files:
            remove_files(one, nodes)
        stays = one.delete()
        put(f"{one.name} is deleted{' with its files' if with_files else f'; {stays}'}", flush=True)


def _of_files(files: list[Path], where: TargetOptions) -> list[Job]:
    """Return each job of the files once. Raises ConfigError for a mistake in any file, for the wrong cluster, and for a job that isn't
    there.
    """
    jobs: dict[tuple[str, str], Job] = {}
    for inputs in read_all(files, where, unnamed=lambda: where.named):
        name, backend = inputs.job.metadata.name, inputs.at(where).backend()
        try:
            jobs[backend.words.where, name] = backend.job(name)
        except ConfigError as error:
            raise ConfigError(f"{inputs.source}: {error}") from None
    return list(jobs.values())


def places_of_files(jobs: Sequence[Job], *, yes: bool) -> list[list[int]]:
    """Return the nodes of each job that have files, after a question.

    Raises:
        ConfigError: there is no terminal to ask at, a job has no volumes, or one may still write there.
        Failed: a host doesn't answer.
    """
    for one in jobs:
        _refuse_in_use(one)
    nodes = [one.nodes_with_volumes() for one in jobs]
    names = ", ".join(f"{_folder(one)} {one.backend.words.where}" for one in jobs)
    if not yes:
        question = f"Remove {names}, with all checkpoints, logs and adapters? Nothing brings them back."
        confirm(question, f"--files removes {names} for good: use --yes to confirm it")
    return nodes


def remove_files(job: Job, nodes: Sequence[int]) -> None:
    """Remove the job's folder from its volumes. Raises ConfigError if it goes on meanwhile, Failed for a volume that can't be reached: the
    rest stays.
    """
    _refuse_in_use(job.backend.job(job.name))
    for node in nodes:
        asyncio.run(_remove(job, node))
    put(f"{_folder(job)} is removed", flush=True)


def _folder(job: Job) -> str:
    return f"{VOLUME}/runs/{job.name}"


def _refuse_in_use(job: Job) -> None:
    """Raise ConfigError for a job that may still write its files, or is about to."""
    status = current_status(job.job)
    if not (has_ended(status) or is_true(status, "Suspended")):
        raise ConfigError(f"job {job.name} may still write its files, so --files removes none: first lockstep stop {job.at}")


async def _remove(job: Job, node: int) -> None:
    async with job.volume(node, say) as volume:
        await output_of(volume.place, [*volume.place.python, "-I", "-c", REMOVE, volume.run_folder(job.name)], seconds=REMOVE_SECONDS)
