"""`lockstep diff-runs A B`: what two runs were told, and what came of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.jobargs import TargetOptions, find_cluster_job, on_cluster
from lockstep.cli.shared.terminal import say
from lockstep.platforms.output import put, put_json

if TYPE_CHECKING:
    from lockstep.cli.shared.site import SiteJob
    from lockstep.plan.pages.diffruns import Side

JOB_FILES = (".yaml", ".yml", ".json")
RunArgument = Annotated[
    str, typer.Argument(help="A job of the cluster by its name, a run's folder (runs/<job>), or a job file.", show_default=False)
]


class ComparisonForm(StrEnum):
    TABLE = "table"
    JSON = "json"


@on_cluster
def diff_runs(
    where: TargetOptions,
    one: RunArgument,
    other: RunArgument,
    output: Annotated[
        ComparisonForm, typer.Option("-o", "--output", help="table or json; json has every step that both have.")
    ] = ComparisonForm.TABLE,
) -> None:
    """Compare the settings and results of two runs.

    It shows where their configuration differs, and their loss at the same steps, evaluation, speed and goodput.

    It reads a job's measurements from its volume, through one of its pods, or through a short-lived pod if none runs. On hosts it reads
    them on node 0. Exit code 0, whether the runs differ or not.

    Example: lockstep diff-runs rank8 rank16
    """
    from lockstep.plan.pages.diffruns import compare, comparison_page

    sides = [_side(run, where) for run in (one, other)]
    if sides[0].name == sides[1].name:
        sides = [replace(side, name=name) for side, name in zip(sides, (one, other), strict=True)]
    comparison = compare(*sides)
    if output is ComparisonForm.JSON:
        put_json(comparison)
    else:
        put(*comparison_page(comparison))


def _side(run: str, where: TargetOptions) -> Side:
    path = Path(run)
    if path.is_dir():
        return _of_folder(path)
    if path.suffix in JOB_FILES:
        return _of_file(path, where.cluster)
    if "/" in run:
        raise ConfigError(f"there is no folder {run}: give a run's folder (runs/<job>), a job file, or the name of a job")
    return _of_job(run, where)


def _of_file(path: Path, cluster: str) -> Side:
    """Settings that the job would get; it has no results."""
    from lockstep.cli.shared.inputs import read_inputs, resolve_inputs
    from lockstep.plan.pages.diffruns import Side, settings_of, spec_of
    from lockstep.plan.render.run import build_run, pod_placement
    from lockstep_gang.contract.run import run_text

    inputs = read_inputs(path, None if _names_cluster(path) else cluster, None)
    resolved = resolve_inputs(inputs)
    settings = settings_of(json.loads(run_text(build_run(resolved, pod_placement(resolved, None)))))
    return Side(path.name, settings, spec_of(inputs.job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)))


def _names_cluster(path: Path) -> bool:
    from lockstep.api.files.jobfile import parse_job_file
    from lockstep.cli.shared.clusterfiles import read_text

    return parse_job_file(read_text(path), str(path)).spec.cluster is not None


def _of_folder(path: Path) -> Side:
    from lockstep.plan.pages.answers import read_summary
    from lockstep.plan.reconcile.measures import percentage_of
    from lockstep.platforms.inpod import runfolder

    summary = read_summary(runfolder.summary(str(path)))  # (a folder may have come from a pod)
    if not (summary["run"] or summary["steps"] or summary["attempts"]):
        raise ConfigError(f"{path} is not a run's folder: it has neither logs/ nor gang/ of a run")
    newest = summary["attempts"][-1] if summary["attempts"] else {}
    book = summary["goodput"].get("goodput") or {}
    percentage = percentage_of(book.get("spent") or {}, book.get("furthestStep") or 0)
    restarts = newest.get("restarts")
    status = {
        "restarts": restarts if isinstance(restarts, int) else None,
        "goodput": {} if percentage is None else {"percentage": percentage},
    }
    return _side_of(path.resolve().name, summary, status)


def _of_job(name: str, where: TargetOptions) -> Side:
    from lockstep.plan.pages.diffruns import spec_of
    from lockstep.platforms.jobs.runs import frozen_run

    job: SiteJob
    run: dict[str, Any] = {}
    if (site := where.hosts()) is not None:
        job = site.job(name)
    else:
        job = cluster_job = find_cluster_job(name, where)
        run = cluster_job.run(lambda cluster: frozen_run(cluster, cluster_job.job))
    summary = asyncio.run(_summary(job)) | ({"run": run} if run else {})
    return replace(_side_of(name, summary, job.status), spec=spec_of(job.job["spec"]))


async def _summary(job: SiteJob) -> dict[str, Any]:
    """Summary of the job's folder on the volume of node 0; {} where it can't be read."""
    from lockstep.api.errors import Failed
    from lockstep.platforms.jobs.runs import summary

    try:
        async with job.volume(0, say) as volume:
            return await summary(volume.place, job.name, root=volume.run_folder(job.name))
    except (Failed, OSError) as error:
        say(f"the measurements of {job.name} can't be read, only its status: {error}")
        return {}


def _side_of(name: str, summary: dict[str, Any], status: dict[str, Any]) -> Side:
    from lockstep.plan.pages.diffruns import Side, curve, results_of, settings_of

    steps, evaluations = curve(summary.get("steps", {}), "loss"), curve(summary.get("evaluations", {}), "evalLoss")
    return Side(name, settings_of(summary.get("run", {})), None, results_of(summary, status), steps, evaluations)
