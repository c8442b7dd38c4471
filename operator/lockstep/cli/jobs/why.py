"""`lockstep why JOB`: why it failed, why it doesn't run, or how it gets on, and what to type next."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.jobargs import (
    WORKSPACE,
    ClusterJob,
    Form,
    FormOption,
    JobArgument,
    LocalRunOption,
    TargetOptions,
    WorkspaceOption,
    find_job,
    on_cluster,
)
from lockstep.platforms.output import put, put_json, tell

if TYPE_CHECKING:
    from lockstep.cli.shared.jobargs import ClusterJob
    from lockstep.kube.cluster import Cluster
    from lockstep.plan.observed import Observed
    from lockstep.plan.pages.why import Answer

EXIT_IN_ITS_WAY = 1


@on_cluster
def why(
    where: TargetOptions,
    job: JobArgument,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle", metavar="FILE.tar.gz", help="Also write logs, stacks, events and objects to this archive, without secrets."
        ),
    ] = None,
    output: FormOption = Form.TEXT,
    local: LocalRunOption = False,
    workspace: WorkspaceOption = WORKSPACE,
) -> None:
    """Explain in a few lines why a job failed or doesn't run, or how it is doing: first cause, cost, next command.

    Exit code 0: it is complete, runs, starts or is stopped as asked; 1: it failed, something keeps it from running, or the operator is not heard; 2: no
    such job.

    Example: lockstep why demo --bundle demo.tar.gz
    """
    from lockstep.plan.pages.why import answer_page

    answer = _of_folder(job, workspace) if local else _on_cluster(find_job(job, where), bundle)
    if output is Form.JSON:
        put_json(answer.as_json())
    else:
        put(*answer_page(answer).splitlines())
    if not answer.is_well:
        raise typer.Exit(EXIT_IN_ITS_WAY)


def _on_cluster(cluster_job: ClusterJob, bundle: Path | None) -> Answer:
    return cluster_job.run(lambda connection: _look(connection, cluster_job, bundle))


async def _look(connection: Cluster, cluster_job: ClusterJob, bundle: Path | None) -> Answer:
    from lockstep.plan.pages.why import answer_page, is_awaited
    from lockstep.plan.pages.why import why as answer_of
    from lockstep.platforms.clusters.facts import unserved
    from lockstep.platforms.jobs.logs import unheard_lines
    from lockstep.platforms.jobs.observe import JobObserver, operator_unheard

    look = JobObserver(connection)
    observed, unheard, lacks = await asyncio.gather(
        look.at(cluster_job.job), operator_unheard(connection, cluster_job.namespace), unserved(connection, cluster_job.namespace)
    )
    answer = answer_of(observed, tuple(look.not_seen), time.time(), lacks, unheard)
    if is_awaited(observed) or answer.stale:
        answer = replace(answer, says=tuple(await unheard_lines(connection, cluster_job.namespace, observed.pods)))
    if bundle is not None:
        await _write(bundle, connection, observed, answer_page(answer))
    return answer


async def _write(path: Path, connection: Cluster, observed: Observed, answer: str) -> None:
    from lockstep.platforms.jobs.bundle import write_bundle

    try:
        missing = await write_bundle(path, connection, observed, answer)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    tell(f"wrote {path}" + (f"; not in it: {'; '.join(missing)}" if missing else ""))


def _of_folder(job: str, workspace: Path) -> Answer:
    from lockstep.plan.pages.remedies import Step, advice
    from lockstep.plan.pages.why import Where
    from lockstep.plan.pages.why import why as answer_of
    from lockstep.platforms.local.records import observed_run

    observed = observed_run(job, workspace)
    answer = answer_of(observed, (), time.time())
    failure = observed.status_part("failure")
    help_ = f"; {advice(failure, job, '--local')}" if answer.state is Where.FAILED and failure else ""
    again = Step(f"lockstep run -f {job}.yaml --local", f"again, from the last commit{help_}")
    return replace(answer, next=() if answer.state in (Where.COMPLETE, Where.RUNNING) else (again,))
