"""`lockstep stacks JOB`: where every rank is, now."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.jobargs import (
    WORKSPACE,
    Form,
    FormOption,
    JobArgument,
    LocalRunOption,
    TargetOptions,
    WorkspaceOption,
    find_job_or_run,
    on_cluster,
)
from lockstep.platforms.output import put, put_json

if TYPE_CHECKING:
    from lockstep.plan.pages.stacks import RankAnswer

EXIT_NOT_ALL = 1


@on_cluster
def stacks(
    where: TargetOptions,
    job: JobArgument,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank.")] = None,
    output: FormOption = Form.TEXT,
    local: LocalRunOption = False,
    workspace: WorkspaceOption = WORKSPACE,
) -> None:
    """Show the Python stacks of all threads of a running job's ranks; equal ones once. The ranks go on.

    It works whatever holds the interpreter, also for a script that reports no steps, whose hang nobody notices. It needs the right to run programs in pods.

    Exit code 1: not all ranks answered, and the output says which and why; 2: no such job or rank, or none of its ranks runs.

    Example: lockstep stacks demo --rank 3
    """
    from lockstep.plan.pages.stacks import stacks_page

    answers = _on_this_machine(job, workspace, rank) if local else _on_cluster(job, rank, where)
    if output is Form.JSON:
        put_json({"job": job, "ranks": [asdict(answer) for answer in answers]})
    else:
        put(*stacks_page(answers))
    if any(answer.problem for answer in answers):
        raise typer.Exit(EXIT_NOT_ALL)


def _on_cluster(name: str, rank: int | None, where: TargetOptions) -> list[RankAnswer]:
    from lockstep.platforms.jobs.logs import is_run
    from lockstep.platforms.jobs.runs import ask_ranks

    cluster_job = find_job_or_run(name, where)
    answers = cluster_job.run(lambda cluster: ask_ranks(cluster, cluster_job.job, rank))
    return _checked(name, answers, rank, f"lockstep {'logs' if is_run(cluster_job.job) else 'why'} {name} -n {cluster_job.namespace}")


def _on_this_machine(name: str, workspace: Path, rank: int | None) -> list[RankAnswer]:
    from lockstep.plan.pages.stacks import missing, read_ranks
    from lockstep.platforms.inpod import rankstacks
    from lockstep.platforms.local.records import observed_run
    from lockstep_gang.contract.layout import equal_layout

    observed_run(name, workspace)
    folder = str((workspace / "workspace/runs" / name).absolute())
    answer = rankstacks.look(rank, folder)
    answers = read_ranks(answer)
    per_node = max(answer["ranksPerNode"], 1)
    ended = missing(answers, rank, {}, equal_layout(answer["worldSize"] // per_node, per_node))
    return _checked(name, sorted([*answers, *ended], key=lambda one: one.rank), rank, f"lockstep why {name} --local")


def _checked(name: str, answers: list[RankAnswer], rank: int | None, why: str) -> list[RankAnswer]:
    """Raise ConfigError where there is nobody to ask."""
    from lockstep.plan.pages.stacks import NOT_THERE

    if all(answer.problem == NOT_THERE for answer in answers):
        who = "no rank" if rank is None else f"no rank {rank}"
        raise ConfigError(f"{who} of {name} runs now: {why}")
    return answers
