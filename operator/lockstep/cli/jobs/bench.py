"""`lockstep bench scaling`: speed of a job's training on 1, 2, … n nodes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import Failed
from lockstep.cli.shared.inputs import FileOption, Inputs, SetOption, only, read_inputs
from lockstep.cli.shared.jobargs import Form, FormOption, TargetOptions, limit_option, on_site
from lockstep.cli.shared.terminal import result_of
from lockstep.kube.cluster import ApiError, Unreachable
from lockstep.plan.ahead.scaling import (
    RECORDED,
    Measured,
    as_json,
    base_of,
    batch_line,
    closing,
    heading,
    measure,
    row,
    scaling_job,
    sizes,
)
from lockstep.platforms.jobs.resolved import resolve_with_warnings
from lockstep.platforms.jobs.shortresults import ShortRuns, measured_steps
from lockstep.platforms.output import put, put_json
from lockstep.platforms.places.backends import backend_of
from lockstep_spec.exits import FAILED
from lockstep_spec.words import number_of

if TYPE_CHECKING:
    from lockstep.api.job import TrainingJob
    from lockstep.api.objects import Object


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
    inputs = read_inputs(only(file, "bench scaling"), where, changes)
    numbers = sizes(nodes, inputs.job.spec.nodes or inputs.cluster.profile.spec.gpus.default_nodes)
    jobs = [scaling_job(inputs.job, number, steps) for number in numbers]
    place = inputs.at(where)
    backend = backend_of(place.kind, place)
    runs = backend.short_runs(inputs.cluster.profile, timeout)
    place.tell_of(backend)
    quiet = output is Form.JSON
    if not quiet:
        on = f"{', '.join(map(str, numbers))} {'node' if numbers == (1,) else 'nodes'}"
        put(f"{number_of(steps, 'step')} of {inputs.job.metadata.name} on {on}; {batch_line(inputs.job)}", flush=True)
    measured = list(_table(inputs, runs, jobs, quiet=quiet))
    if quiet:
        put_json(as_json(measured), indent=1)
    elif lines := list(closing(measured, one_machine=runs.on_one_machine)):
        put(*lines)
    raise typer.Exit(FAILED if any(one.problem for one in measured) else 0)


def _table(inputs: Inputs, runs: ShortRuns, jobs: list[TrainingJob], *, quiet: bool) -> Iterator[Measured]:
    """Run the jobs one after the other, and print a row for each as soon as it is there. Raises ConfigError when one can't run as
    written.
    """
    measured: list[Measured] = []
    for job in jobs:
        resolved = resolve_with_warnings(job, inputs.cluster, inputs.namespace, quiet=True)
        records, why = result_of(runs, partial(_measured, job))
        nodes, ranks = resolved.nodes, resolved.world_size
        one = Measured(nodes, ranks, problem=why) if why else measure(records, nodes, ranks)
        measured.append(one)
        if not quiet:
            put(*([heading()] if len(measured) == 1 else []), row(one, base_of(measured)), flush=True)
        yield one


async def _measured(job: TrainingJob, runs: ShortRuns) -> tuple[dict[str, Object], str]:
    try:
        return await measured_steps(runs, job, RECORDED)
    except (ApiError, Unreachable):
        raise
    except Failed as error:  # another number of nodes may do
        return {}, str(error)
