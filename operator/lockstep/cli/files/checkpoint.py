"""`lockstep checkpoint`: list, verify and inspect a run's commits."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.names import JOB_NAME_PATTERN
from lockstep.cli.shared.jobargs import Form, FormOption, TargetOptions, on_cluster
from lockstep.cli.shared.trainer import ask_trainer
from lockstep.platforms.output import put, put_json_text, tell
from lockstep_spec.words import decimal_size, number_of

if TYPE_CHECKING:
    from rich.table import Table

Json = dict[str, Any]

app = typer.Typer(help="Look at a run's checkpoints.", no_args_is_help=True)

RunArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB|FOLDER...",
        help=(
            "A job's name; or, on this machine, a run's folder (runs/<job>), its checkpoints folder, or one step-N.aM folder. Name several"
            " if the shards are spread."
        ),
    ),
]


def answer_of(verb: str, sources: list[str], where: TargetOptions, options: Sequence[str] = ()) -> tuple[str, int]:
    """Answer of the trainer and its exit code, about folders of this machine, or about a job: on its hosts, or in a pod that mounts its
    volume.
    """
    jobs = [source for source in sources if re.fullmatch(JOB_NAME_PATTERN, source) and not Path(source).exists()]
    if not jobs:
        return ask_trainer("inspect", [verb, *map(Path, sources), *options])
    if len(sources) > 1:
        raise ConfigError(
            f"{jobs[0]} is not a folder of this machine: name one job of the cluster, or only folders (./{jobs[0]} is a folder)"
        )
    if (site := where.hosts()) is not None:
        return asyncio.run(site.job(jobs[0]).commits(verb, options))
    return asyncio.run(_in_pod(verb, jobs[0], where, options))


async def _in_pod(verb: str, job: str, where: TargetOptions, options: Sequence[str]) -> tuple[str, int]:
    from lockstep.cli.files.cp import known_job
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.files.results import inspect_commits

    namespace = where.chosen_namespace()
    async with await Cluster.connect(where.context) as cluster:
        await known_job(cluster, namespace, job)
        return await inspect_commits(cluster, namespace, job, verb, options, tell)


@app.command("list")
@on_cluster
def list_commits(
    where: TargetOptions,
    runs: RunArgument,
    output: FormOption = Form.TEXT,
) -> None:
    """List a run's checkpoints.

    It shows each commit's step, size and evaluation loss, whether its files exist, and why it is kept.

    Example: lockstep checkpoint list demo

    Example: lockstep checkpoint list runs/demo
    """
    text, _ = answer_of("list", runs, where)
    if output is Form.JSON:
        put_json_text(text)
        return
    answer = json.loads(text)
    if answer["commits"]:
        _print(commits_table(answer["commits"]))
    else:
        put("no commit is there; what a script saves by itself isn't listed")
    for problem in answer["problems"]:
        put(problem)


@app.command("verify")
@on_cluster
def verify(
    where: TargetOptions,
    runs: RunArgument,
    everything: Annotated[
        bool, typer.Option("--all", help="Verify every commit from which a start might go on, not only the newest.")
    ] = False,
    output: FormOption = Form.TEXT,
) -> None:
    """Compare every shard with its checksum.

    It reads every shard. For a job it does so in a pod next to the volume, or on the hosts. Exit code 1: something is missing or damaged.

    Example: lockstep checkpoint verify demo --all
    """
    text, code = answer_of("verify", runs, where, ["--all"] if everything else [])
    if output is Form.JSON:
        put_json_text(text)
    else:
        put(*verdicts(json.loads(text)["commits"]))
    raise typer.Exit(code)


@app.command("inspect")
@on_cluster
def inspect(
    where: TargetOptions,
    runs: RunArgument,
    output: FormOption = Form.TEXT,
) -> None:
    """Describe a checkpoint: what it holds, and what it came from.

    Example: lockstep checkpoint inspect runs/demo/checkpoints/step-40.a1
    """
    text, _ = answer_of("show", runs, where)
    if output is Form.JSON:
        put_json_text(text)
        return
    answer = json.loads(text)
    put(*words(answer))
    _print(shards_table(answer["manifest"]["shards"]))


def commits_table(commits: list[Json]) -> Table:
    from rich.table import Table

    table = Table("commit", "saved", "eval loss", "size", "content", "files", "kept because")
    for commit in commits:
        reason = ", ".join(commit["kept"]) or "checkpoint.keep" if commit["onChain"] else "not on the chain: no start chooses it"
        table.add_row(
            commit["name"],
            datetime.fromtimestamp(commit["savedAt"]).astimezone().strftime("%Y-%m-%d %H:%M:%S") if "savedAt" in commit else "",
            _loss(commit),
            decimal_size(commit["bytes"]) if "bytes" in commit else "",
            commit.get("content", ""),
            _files(commit),
            reason,
        )
    return table


def _loss(commit: Json) -> str:
    loss = commit.get("evalLoss")
    return "" if loss is None else f"{loss:.4f} (step {commit['evalStep']})"


def _files(commit: Json) -> str:
    return "; ".join(commit["problems"]) or "complete"


def verdicts(commits: list[Json]) -> list[str]:
    """One line for each commit, and one for each damaged file (pure)."""
    lines: list[str] = []
    for commit in commits:
        if not commit["problems"]:
            lines.append(f"{commit['name']}: whole ({decimal_size(commit['bytes'])} read)")
        else:
            lines += [f"{commit['name']}: {problem}" for problem in commit["problems"]]
    return lines


def words(answer: Json) -> list[str]:
    """Lines that describe a commit's manifest (pure)."""
    summary, parameters = answer["summary"], answer["parameters"]
    fragments = [parameter["fragments"] for parameter in parameters]
    least, most = min(fragments), max(fragments)
    each = number_of(least, "fragment") if least == most else f"{least} to {most} fragments"
    settings = ", ".join(f"{key} {_value(value)}" for key, value in summary["settings"].items())
    loss = "not evaluated" if summary["evalLoss"] is None else f"{summary['evalLoss']:.4f} at step {summary['evalStep']}"
    return [
        (
            f"Commit          {answer['name']} of job {summary['job']}: step {summary['step']}, attempt {summary['attempt']},"
            f" {summary['samplesConsumed']} samples seen"
        ),
        f"Base model      {summary['baseModel']}",
        f"Trained         {summary['method']}{': ' + settings if settings else ''}",
        f"Parameters      {summary['trainableParameters']:,} in {len(parameters)} tensors, each in {each}",
        f"Saved by        {number_of(summary['ranks'], 'rank')}, {summary['zeroStage']}, {summary['precision']}",
        f"Content         {summary['content']}, {decimal_size(summary['bytes'])}",
        f"Batch and seed  global batch {summary['globalBatchSize']}, seed {summary['seed']}",
        f"Eval loss       {loss}; before training: {summary['evalLossBefore'] or 'not evaluated'}",
    ]


def _value(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def shards_table(shards: list[Json]) -> Table:
    from rich.table import Table

    table = Table("shard", "size", "fragments", "where")
    for shard in shards:
        table.add_row(shard["file"], decimal_size(shard["bytes"]), str(len(shard["fragments"])), shard["problem"] or shard["path"])
    return table


def _print(table: Table) -> None:
    from lockstep.cli.shared.terminal import console

    console().print(table)
