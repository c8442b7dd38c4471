"""`lockstep why|stacks JOB`: why it failed, why it doesn't run, or how it gets on; and where every rank is, now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.jobargs import Form, FormOption, JobArgument, TargetOptions, find_job, on_site
from lockstep.plan.pages.logs import node_of_rank
from lockstep.plan.pages.stacks import NOT_THERE, stacks_page
from lockstep.platforms.output import put, put_json

EXIT_IN_ITS_WAY = 1
EXIT_NOT_ALL = 1


@on_site
def why(
    where: TargetOptions,
    job: JobArgument,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="FILE.tar.gz",
            help="Also write logs, stacks, events and objects to this archive, without secrets that it knows.",
        ),
    ] = None,
    output: FormOption = Form.TEXT,
) -> None:
    """Explain why a job failed, waits or goes on badly.

    A few lines name the first cause, what it cost, and the next command.

    Exit code 0: it is complete, runs, starts or is stopped as asked; 1: it failed, something keeps it from running, or the operator is
    silent; 2: no such job.

    Example: lockstep why demo --bundle demo.tar.gz
    """
    from lockstep.plan.pages.why import answer_page

    backend = where.backend(hurried=True)
    found = backend.job(job)
    backend.refuse("--bundle", bundle, **found.words)
    answer = found.answer(bundle)
    if output is Form.JSON:
        put_json(answer.as_json())
    else:
        put(*answer_page(answer).splitlines())
    if not answer.is_well:
        raise typer.Exit(EXIT_IN_ITS_WAY)


@on_site
def stacks(
    where: TargetOptions,
    job: JobArgument,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
) -> None:
    """Show what every thread of a job's ranks is doing.

    It prints Python stacks; equal stacks appear once. The ranks go on.

    It works even if a rank's Python is blocked. Use it for a script that reports no steps, because Lockstep can't notice when such a
    script hangs. It needs the right to run programs in pods.

    Exit code 1: not all ranks answered, and the output says which and why; 2: no such job or rank, or none of its ranks runs.

    Example: lockstep stacks demo --rank 3
    """
    found = find_job(job, where)
    answers = found.stacks(rank)
    if all(answer.problem == NOT_THERE for answer in answers):
        if rank is not None and (found.status.get("ranks") or {}).get("desired"):
            node_of_rank(found.layout(), rank)
        raise ConfigError(f"{'no rank' if rank is None else f'no rank {rank}'} of {job} runs now: lockstep why {found.at}")
    put(*stacks_page(answers))
    if any(answer.problem for answer in answers):
        raise typer.Exit(EXIT_NOT_ALL)
