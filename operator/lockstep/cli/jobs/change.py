"""Verbs that change a job: `lockstep suspend|resume|stop|scale|retry|delete`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.shared.inputs import FRESH, OptionalFileOption, only, read_all, read_inputs
from lockstep.cli.shared.jobargs import (
    UNNAMED,
    WORKSPACE,
    ClusterJob,
    ContextOption,
    JobArgument,
    JobsArgument,
    NamespaceOption,
    TargetOptions,
    WorkspaceOption,
    find_job,
    find_jobs,
    known_names,
    no_such_job,
    on_cluster,
)
from lockstep.cli.shared.terminal import confirm
from lockstep.platforms.output import put
from lockstep_spec.words import number_of

if TYPE_CHECKING:
    from lockstep.kube.cluster import Cluster

NODES_MAX = 1024
POLL_SECONDS = 0.5


@on_cluster
def suspend(where: TargetOptions, jobs: JobsArgument) -> None:
    """Ask jobs to save and stop, which frees their pods and GPUs. Returns at once; `lockstep stop` waits.

    Example: lockstep suspend demo
    """
    for cluster_job in _not_ended(jobs, where):
        if _set_suspend(cluster_job, suspended=True):
            put(f"{cluster_job.name}: asked to save and stop; go on with: lockstep resume {cluster_job.name} -n {cluster_job.namespace}")
        else:
            put(f"{cluster_job.name} is suspended already")


@on_cluster
def resume(where: TargetOptions, jobs: JobsArgument) -> None:
    """Resume suspended jobs from their last checkpoint.

    Example: lockstep resume demo
    """
    for cluster_job in _not_ended(jobs, where):
        if _set_suspend(cluster_job, suspended=False) or _take_back(cluster_job):
            put(f"{cluster_job.name}: goes on; see it with: lockstep logs {cluster_job.name} -f -n {cluster_job.namespace}")
        else:
            put(f"{cluster_job.name} is not suspended")


@on_cluster
def stop(
    where: TargetOptions,
    jobs: JobsArgument,
    run: Annotated[bool, typer.Option("--run", help="Stop the script that a dev environment runs, and keep its pods.")] = False,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds to wait for the save and the end of the pods.")] = 600,
) -> None:
    """Suspend jobs and wait until they have saved and their pods are gone. Exit code 1 when they are still there after --timeout.

    With --run, stop only the script that a dev environment runs, such as one of `lockstep run --detach`, as Ctrl-C would where it was started.

    Example: lockstep stop demo

    Example: lockstep stop ml-dev-env --run
    """
    cluster_jobs = _not_ended(jobs, where)
    if run:
        raise typer.Exit(max(map(_stop_run, cluster_jobs)))
    for cluster_job in cluster_jobs:
        _set_suspend(cluster_job, suspended=True)
    end = time.monotonic() + timeout
    for cluster_job in cluster_jobs:
        _until_stopped(cluster_job, end, timeout)


def _until_stopped(cluster_job: ClusterJob, end: float, timeout: int) -> None:
    """Wait until the job has stopped. Raises Failed when it takes too long. What its status says before the operator has seen that it is to stop says nothing of the stop."""
    from lockstep.api.objects import condition as condition_of
    from lockstep.kube.jobs import job_status
    from lockstep.plan.reasons import Reason

    message = ""
    while True:
        condition = condition_of(job_status(cluster_job.target.client, cluster_job.namespace, cluster_job.name), "Suspended")
        if condition.get("reason", Reason.NOT_SUSPENDED) != Reason.NOT_SUSPENDED and condition.get("message", message) != message:
            message = condition["message"]
            put(f"{cluster_job.name}: {message}", flush=True)
        if condition.get("status") == "True":
            return
        if time.monotonic() > end:
            raise Failed(
                f"job {cluster_job.name} has not stopped within {timeout} s: {message or 'its status says nothing'}; it stays asked to stop"
            )
        time.sleep(POLL_SECONDS)


def _stop_run(cluster_job: ClusterJob) -> int:
    """Stop the script as a person would in the job's pod, and return the exit code."""
    from lockstep.api.names import AGENT_PATH
    from lockstep.cli.jobs.run import refuse
    from lockstep.platforms.jobs.terminal import run_on_all_nodes

    refuse(cluster_job)
    command = ["python3", "-I", AGENT_PATH, "stop"]
    return cluster_job.run(lambda cluster: run_on_all_nodes(cluster_job.node(cluster, 0), command))


def _not_ended(jobs: Sequence[str], where: TargetOptions) -> list[ClusterJob]:
    """Return these jobs. Raises ConfigError where one of them isn't there or has ended: then nothing is done to the others, either."""
    cluster_jobs = find_jobs(jobs, where)
    for cluster_job in cluster_jobs:
        _refuse_ended(cluster_job)
    return cluster_jobs


def _take_back(cluster_job: ClusterJob) -> bool:
    """Ask for the GPUs of a dev environment that nobody used. Return True if they had been released."""
    from lockstep.kube.jobs import patch_spec

    session = (cluster_job.job.get("status") or {}).get("interactive") or {}
    if "released" not in session:
        return False
    patch_spec(
        cluster_job.target.client, cluster_job.namespace, cluster_job.name, {"interactive": {"resume": int(session.get("resume", 0)) + 1}}
    )
    return True


def _refuse_ended(cluster_job: ClusterJob) -> None:
    from lockstep.api.objects import is_true

    status, place = cluster_job.job.get("status", {}), f"{cluster_job.name} -n {cluster_job.namespace}"
    if is_true(status, "Complete"):
        raise ConfigError(
            f"job {cluster_job.name} is complete: it has no pods to stop and nothing to go on with (lockstep describe {place})"
        )
    if is_true(status, "Failed"):
        raise ConfigError(f"job {cluster_job.name} has failed: lockstep why {place} explains why, lockstep retry {place} starts it again")


def _set_suspend(cluster_job: ClusterJob, *, suspended: bool) -> bool:
    """Return True if that changed anything."""
    from lockstep.kube.jobs import patch_spec

    spec: dict[str, Any] = cluster_job.job["spec"]
    if bool(spec.get("suspend", False)) == suspended:
        return False
    patch_spec(cluster_job.target.client, cluster_job.namespace, cluster_job.name, {"suspend": suspended})
    return True


@on_cluster
def scale(
    where: TargetOptions,
    job: JobArgument,
    number: Annotated[int | None, typer.Argument(metavar="NODES", min=1, max=NODES_MAX, help="How many nodes it should have.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, max=NODES_MAX, help="The same.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask, also where the job would wait for nodes.")] = False,
) -> None:
    """Change a job's number of nodes: it saves, stops and goes on from there, with the same global batch. Asks first where too few nodes have room.

    Example: lockstep scale demo 4
    """
    from lockstep.api.objects import has_ended
    from lockstep.kube.jobs import patch_spec

    if (number is None) == (nodes is None):
        raise ConfigError("give the number of nodes once: lockstep scale JOB 4")
    goal = number or nodes or 0
    cluster_job = find_job(job, where)
    if has_ended(cluster_job.job.get("status", {})):
        raise ConfigError(f"job {job} has ended: give a new job the number of nodes it should have")
    before = cluster_job.job["spec"].get("nodes")
    if before == goal:
        put(f"{job} has {number_of(goal, 'node')} already")
        return
    _ask_to_wait(cluster_job, goal, yes=yes)
    patch_spec(cluster_job.target.client, cluster_job.namespace, job, {"nodes": goal})
    was = "the cluster's number of nodes" if before is None else before
    put(f"{job}: {was} → {number_of(goal, 'node')}; see it with: lockstep get {job} -n {cluster_job.namespace}")


def _ask_to_wait(cluster_job: ClusterJob, goal: int, *, yes: bool) -> None:
    """Ask where the job would wait for nodes. Raises ConfigError where nobody can be asked; typer's Abort when the answer is no."""
    lack = "" if yes else cluster_job.target.client.run(lambda cluster: _lack_of_nodes(cluster, cluster_job, goal))
    if not lack:
        return
    warning = f"{lack}: {cluster_job.name} would stop and wait for them."
    confirm(f"{warning} Scale it anyway?", f"{warning} Use --yes to scale it anyway")


async def _lack_of_nodes(cluster: Cluster, cluster_job: ClusterJob, goal: int) -> str:
    """Return why too few nodes have room now; '' where enough have, or where the account may not look, or nothing says what a pod asks for."""
    from lockstep.plan.cluster.finding import Outcome
    from lockstep.plan.cluster.fitting import room
    from lockstep.platforms.clusters.facts import room_facts

    stateful_set = await cluster.get("StatefulSet", cluster_job.namespace, cluster_job.name)
    if stateful_set is None:
        return ""
    findings = room(stateful_set["spec"]["template"], goal, await room_facts(cluster, cluster_job.namespace, cluster_job.name))
    return next((one.message for one in findings if one.outcome is Outcome.WAITS), "")


def retry(
    job: Annotated[str | None, typer.Argument(help="The job's name.", show_default=False)] = None,
    files: OptionalFileOption = None,
    local: Annotated[bool, typer.Option("--local", help="Retry a run of `lockstep run --local`.")] = False,
    in_namespace: Annotated[bool, typer.Option("--in-namespace", help="Retry a run of `lockstep run --in-namespace`.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help=f"The cluster file that names the namespace, and the API server that must answer. {UNNAMED}"),
    ] = None,
    namespace: Annotated[str | None, typer.Option("-n", "--namespace", help="The namespace. Default: the cluster's.")] = None,
    context: ContextOption = None,
    workspace: WorkspaceOption = WORKSPACE,
) -> None:
    """Start a failed job again from its last checkpoint. What failed stays in its history.

    Example: lockstep retry demo
    """
    file = only(files, "retry") if files else None
    if file is not None and local != in_namespace and job is None:
        raise typer.Exit(_run_again(file, cluster, namespace, context, workspace if local else None))
    if job is None or file is not None or local or in_namespace:
        raise ConfigError("name the failed job: lockstep retry JOB, or use -f FILE with either --local or --in-namespace")
    number = _raise_retry(job, TargetOptions.of(cluster, namespace, context))
    put(
        f"{job}: retry {number} goes on from its last checkpoint; see it with: lockstep logs {job} -f"
        + (f" -n {namespace}" if namespace else "")
    )


def _raise_retry(job: str, where: TargetOptions) -> int:
    from lockstep.kube.jobs import patch_spec

    cluster_job = find_job(job, where)
    _refuse_unless_failed(job, cluster_job.job.get("status", {}))
    number = int(cluster_job.job["spec"].get("restart", {}).get("retry", 0)) + 1
    patch_spec(cluster_job.target.client, cluster_job.namespace, job, {"restart": {"retry": number}})
    return number


def _refuse_unless_failed(job: str, status: dict[str, object]) -> None:
    from lockstep.api.objects import condition, is_true

    if is_true(status, "Complete"):
        raise ConfigError(
            f"job {job} is complete: there is nothing to retry (lockstep describe {job}); to train anew: lockstep delete {job}, then lockstep render -f FILE --set {FRESH} -o job | kubectl apply -f -"
        )
    if not is_true(status, "Failed"):
        progress = condition(status, "Progressing")
        state = f"{progress['reason']}: {progress['message']}" if progress else "its status says nothing yet"
        raise ConfigError(f"job {job} has not failed, so there is nothing to retry: {state}")


def _run_again(file: Path, cluster: str | None, namespace: str | None, context: str | None, workspace: Path | None) -> int:
    """Start a failed run without an operator again, and return its exit code. `workspace`: of a local run; None: in a namespace."""
    from lockstep.cli.jobs.run import LOCAL_CLUSTER, refuse_interactive
    from lockstep.platforms.in_namespace.run import StartMode, run_in_namespace
    from lockstep.platforms.local.records import failed_run
    from lockstep.platforms.local.run import run_local

    inputs = read_inputs(file, cluster or (LOCAL_CLUSTER if workspace is not None else None), None if workspace is not None else namespace)
    refuse_interactive(inputs.job)
    if workspace is None:
        return run_in_namespace(inputs.job, inputs.cluster.profile, inputs.namespace, context, StartMode.RETRY)
    return run_local(inputs.job, inputs.cluster.profile, workspace, failed_run(inputs.job.metadata.name, workspace))


def delete(
    jobs: Annotated[list[str] | None, typer.Argument(help="The jobs' names.", show_default=False, autocompletion=known_names)] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            show_default=False,
            help="The jobs of a job file, or of a folder of them, instead of names; - reads what is piped in. May be repeated.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            help=f"The cluster file that names the namespace, and the API server that must answer. Default: with -f the job's cluster, else as follows. {UNNAMED}",
        ),
    ] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Delete jobs; a running job saves first. Claims and their checkpoints stay: a job created again under the same name goes on.

    If one of them doesn't exist, none is deleted.

    Example: lockstep delete demo

    Example: lockstep delete -f jobs/
    """
    from lockstep.api.objects import has_ended
    from lockstep.kube.jobs import delete_job

    if bool(jobs) == bool(files):
        raise ConfigError(f"name the jobs, or use -f FILE{', not both' if jobs else ''}")
    cluster_jobs = (
        _of_files(files, cluster, namespace, context) if files else find_jobs(jobs or [], TargetOptions.of(cluster, namespace, context))
    )
    running = [one.name for one in cluster_jobs if not has_ended(one.job.get("status", {})) and not one.job["spec"].get("suspend", False)]
    if running and not yes:
        listed, them = ", ".join(running), "it" if len(running) == 1 else "them"
        have = f"job {listed} has" if len(running) == 1 else f"jobs {listed} have"
        where = ", ".join(sorted({one.namespace for one in cluster_jobs}))
        question = f"{have[0].upper()}{have[1:]} not ended (namespace {where}). Save, stop and delete {them}?"
        confirm(question, f"{have} not ended: use --yes to delete {them} anyway")
    for one in cluster_jobs:
        try:
            delete_job(one.target.client, one.namespace, one.name)
        except TimeoutError as error:
            raise Failed(str(error)) from error
        put(f"{one.name} is deleted; its claims stay", flush=True)


def _of_files(files: list[Path], cluster: str | None, namespace: str | None, context: str | None) -> list[ClusterJob]:
    """Return each job of the files once. Raises ConfigError for a mistake in any file, for the wrong cluster, and for a job that isn't there."""
    from lockstep.cli.shared.target import Target, unnamed_cluster
    from lockstep.kube.cluster import Client
    from lockstep.kube.jobs import get_job

    jobs: dict[tuple[str, str], ClusterJob] = {}
    for inputs in read_all(files, cluster, namespace, unnamed=lambda: unnamed_cluster(context)):
        inputs.aim()
        target, name = Target(Client(context), inputs.namespace, inputs.cluster.cluster.name), inputs.job.metadata.name
        job = get_job(target.client, inputs.namespace, name)
        if job is None:
            raise ConfigError(f"{inputs.source}: {no_such_job(target, name)}")
        jobs[inputs.namespace, name] = ClusterJob(target, job)
    return list(jobs.values())
