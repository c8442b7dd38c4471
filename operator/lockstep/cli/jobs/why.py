"""`lockstep why JOB`: why it failed, why it doesn't run, or how it gets on, and what to type next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.shared.jobargs import Form, FormOption, JobArgument, SiteOptions, on_site
from lockstep.platforms.output import put, put_json

EXIT_IN_ITS_WAY = 1


@on_site
def why(
    where: SiteOptions,
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

    site = where.site()
    site.hurried = True
    answer = site.job(job).answer(bundle)
    if output is Form.JSON:
        put_json(answer.as_json())
    else:
        put(*answer_page(answer).splitlines())
    if not answer.is_well:
        raise typer.Exit(EXIT_IN_ITS_WAY)
