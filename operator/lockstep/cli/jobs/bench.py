"""`lockstep bench scaling`: speed of a job's training on 1, 2, … n nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import Failed
from lockstep.api.names import HOSTS
from lockstep.cli.shared.hostsite import fleet_of
from lockstep.cli.shared.inputs import FileOption, SetOption, only, read_inputs
from lockstep.cli.shared.jobargs import Form, FormOption, TargetOptions, limit_option, on_site
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.cli.shared.trainer import TORCH, in_full_environment
from lockstep.platforms.output import put, put_json, tell
from lockstep_spec.words import number_of

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.api.job import TrainingJob
    from lockstep.api.objects import Object
    from lockstep.cli.shared.inputs import Inputs
    from lockstep.plan.ahead.scaling import Measured

app = typer.Typer(help="Measure a job's training.", no_args_is_help=True)
EXIT_FAILED = 1
Run = Callable[["TrainingJob"], tuple[dict[str, "Object"], str]]


@app.callback()
def bench() -> None:
    """Measure a job's training."""


@app.command("scaling")
@on_site
def scaling(
    where: TargetOptions,
    file: FileOption,
    nodes: Annotated[
        str | None,
        typer.Option("--nodes", help="Numbers of nodes, such as 1,2,4. Default: 1 up to the job's, doubled beyond 4.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=2, max=10000, help="Number of steps to measure, after 3 steps that warm up.")] = 20,
    changes: SetOption = None,
    timeout: Annotated[int | None, limit_option("Seconds for each number of nodes.")] = None,
    output: FormOption = Form.TEXT,
) -> None:
    """Measure what each further node brings to a job.

    It trains a few steps on 1, 2, … n nodes, one run after the other.

    TOKENS/S is the speed of all ranks together. EFFICIENCY compares a node's speed with that of a node in the smallest run. WAITING is
    the share of a step in which ranks wait for each other.

    Each run loads the job's model and data, but has its own name and folder. It is removed afterwards, also on Ctrl-C. Exit code 0: all
    were measured, 1: some failed, 2: the job can't run as written, 130: interrupted.

    Example: lockstep bench scaling -f job.yaml --nodes 1,2,4

    Example: lockstep bench scaling -f job.yaml --local

    Example: lockstep bench scaling -f job.yaml --cluster lab
    """
    from lockstep.plan.ahead.scaling import as_json, batch_line, closing, scaling_job, sizes

    inputs = read_inputs(only(file, "bench scaling"), where, changes)
    numbers = sizes(nodes, inputs.job.spec.nodes or inputs.cluster.profile.spec.gpus.default_nodes)
    jobs = [scaling_job(inputs.job, number, steps) for number in numbers]
    in_full_environment(TORCH if where.local else ())
    run = _runner(inputs, where, timeout)
    quiet = output is Form.JSON
    if not quiet:
        on = f"{', '.join(map(str, numbers))} {'node' if numbers == (1,) else 'nodes'}"
        put(f"{number_of(steps, 'step')} of {inputs.job.metadata.name} on {on}; {batch_line(inputs.job)}", flush=True)
    with exiting_on_ctrl_c("lockstep: interrupted; the run that was measured is removed"):
        measured = list(_table(inputs, run, jobs, quiet=quiet))
    if quiet:
        put_json(as_json(measured), indent=1)
    elif lines := list(closing(measured, one_machine=where.local)):
        put(*lines)
    raise typer.Exit(EXIT_FAILED if any(one.problem for one in measured) else 0)


def _table(inputs: Inputs, run: Run, jobs: list[TrainingJob], *, quiet: bool) -> Iterator[Measured]:
    """Run the jobs one after the other, and print a row for each as soon as it is there. Raises ConfigError when one can't run as
    written.
    """
    from lockstep.plan.ahead.scaling import base_of, failed, heading, measure, row
    from lockstep.plan.render.resolve import resolve
    from lockstep.plan.render.resolved import PlatformDefaults

    measured: list[Measured] = []
    defaults = PlatformDefaults() if inputs.cluster.hosts is None else PlatformDefaults(image=HOSTS)
    for job in jobs:
        resolved = resolve(job, inputs.cluster.profile, defaults)
        records, why = run(job)
        nodes, ranks = resolved.nodes, resolved.world_size
        one = failed(nodes, ranks, why) if why else measure(records, nodes, ranks)
        measured.append(one)
        if not quiet:
            put(*([heading()] if len(measured) == 1 else []), row(one, base_of(measured)), flush=True)
        yield one


def _runner(inputs: Inputs, where: TargetOptions, timeout: int | None) -> Run:
    from lockstep.kube.cluster import ApiError, Unreachable
    from lockstep.plan.ahead.scaling import RECORDED

    if where.local:
        return _here(inputs, where.workspace)
    profile = inputs.cluster.profile
    is_of_hosts, options = inputs.cluster.hosts is not None, {"namespace": where.namespace, "context": where.context}
    fleet = fleet_of(inputs.cluster, where.cluster, **options) if is_of_hosts else None

    async def measured(job: TrainingJob) -> tuple[dict[str, Object], str]:
        if fleet is not None:
            from lockstep.platforms.hosts.shortruns import SECONDS, measured_on_hosts

            return await measured_on_hosts(fleet, job, profile, RECORDED, timeout or SECONDS)
        from lockstep.platforms.in_namespace.run import TimeLimit
        from lockstep.platforms.in_namespace.shortruns import measured_on_cluster

        return await measured_on_cluster(job, profile, inputs.namespace, where.connections, tell, TimeLimit.of(timeout), RECORDED)

    def run(job: TrainingJob) -> tuple[dict[str, Object], str]:
        try:
            return asyncio.run(measured(job))
        except (ApiError, Unreachable):
            raise
        except Failed as error:  # another number of nodes may do
            return {}, str(error)

    return run


def _here(inputs: Inputs, workspace: Path) -> Run:
    from lockstep.plan.ahead.scaling import RECORDED
    from lockstep.platforms.local.run import Interrupted, measured_local

    def run(job: TrainingJob) -> tuple[dict[str, Object], str]:
        try:
            return measured_local(job, inputs.cluster.profile, workspace, RECORDED)
        except Interrupted:
            raise KeyboardInterrupt from None

    return run
