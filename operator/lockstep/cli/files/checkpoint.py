"""`lockstep checkpoint`: list and verify a run's commits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.jobargs import Form, FormOption, TargetOptions, find_job, job_among, on_site
from lockstep.cli.shared.terminal import console
from lockstep.cli.shared.trainer import ask_trainer
from lockstep.platforms.output import put, put_json_text, tell
from lockstep_spec.words import decimal_size, number_of

if TYPE_CHECKING:
    from rich.table import Table

Json = dict[str, Any]

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
    """Answer of the trainer and its exit code, about folders of this machine, or about a job where its files are."""
    job = job_among(sources)
    if job is None:
        return ask_trainer("inspect", [verb, *map(Path, sources), *options])
    return asyncio.run(find_job(job, where).commits(verb, options, tell))


@on_site
def checkpoint(
    where: TargetOptions,
    runs: RunArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every shard of the newest commit with its checksum.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="With --verify: of every commit from which a start might go on, not only of the newest.")
    ] = False,
    output: FormOption = Form.TEXT,
) -> None:
    """List a run's checkpoints, or verify them.

    It shows each commit's step, size and evaluation loss, whether its files exist, and why it is kept. Below it describes the newest one,
    or that of the step-N.aM folder that you name: what it holds, and what it came from.

    --verify reads every shard. For a job it does so in a pod next to the volume, or on the hosts. Exit code 1 then: something is missing
    or damaged.

    Example: lockstep checkpoint demo

    Example: lockstep checkpoint runs/demo/checkpoints/step-40.a1

    Example: lockstep checkpoint demo --verify --all
    """
    if everything and not verify:
        raise ConfigError("--all needs --verify: add that, or leave it out")
    text, code = answer_of("verify" if verify else "list", runs, where, ["--all"] if everything else [])
    if output is Form.JSON:
        put_json_text(text)
    elif verify:
        put(*verdicts(json.loads(text)["commits"]))
    else:
        _show(json.loads(text))
    if verify:
        raise typer.Exit(code)


def _show(answer: Json) -> None:
    if answer["commits"]:
        _print(commits_table(answer["commits"]))
        put(*(line for commit in answer["commits"][:1] if "job" in commit for line in words(commit)))
    else:
        put("no commit is there; what a script saves by itself isn't listed")
    for problem in answer["problems"]:
        put(problem)


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


def words(commit: Json) -> list[str]:
    """Return lines that describe a commit of the list."""
    settings = ", ".join(f"{key} {_value(value)}" for key, value in commit["settings"].items())
    return [
        (
            f"Commit          {commit['name']} of job {commit['job']}: step {commit['step']}, attempt {commit['attempt']},"
            f" {commit['samplesConsumed']} samples seen"
        ),
        f"Base model      {commit['baseModel']}",
        f"Trained         {commit['method']}{': ' + settings if settings else ''}",
        f"Parameters      {commit['trainableParameters']:,}",
        f"Saved by        {number_of(commit['ranks'], 'rank')}, {commit['zeroStage']}, {commit['precision']}",
        f"Batch and seed  global batch {commit['globalBatchSize']}, seed {commit['seed']}",
        f"Before          eval loss {commit['evalLossBefore'] or 'not evaluated'}",
    ]


def _value(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _print(table: Table) -> None:
    console().print(table)
