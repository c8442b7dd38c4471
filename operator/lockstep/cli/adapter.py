"""`lockstep adapter`: from a run's checkpoint to what others load, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.trainer import run_trainer

app = typer.Typer(help="Work with trained adapters.", no_args_is_help=True)

SourceArgument = Annotated[
    list[Path],
    typer.Argument(help="A run's folder (runs/<job>), its checkpoints folder, or one step-N.aM folder; several where shards are spread."),
]


@app.callback()
def adapter() -> None:
    """Work with trained adapters."""


@app.command("export")
def export(
    sources: SourceArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The adapter's folder; made if it isn't there.")],
) -> None:
    """Make a PEFT adapter folder from a checkpoint's shards, without a GPU and without the base model.

    Example: lockstep adapter export runs/demo -o adapter
    """
    run_trainer("export", [*sources, "--output", output])


@app.command("merge")
def merge(
    sources: SourceArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The model's folder: a new or an empty one.")],
    base: Annotated[Path | None, typer.Option("--base", help="The base model's folder. Default: where the run had it.")] = None,
) -> None:
    """Make a full model folder from a checkpoint's shards and the base model, without a GPU, tensor by tensor.

    Example: lockstep adapter merge runs/demo -o model --base models/tiny-base
    """
    stated: list[str | Path] = [] if base is None else ["--base", base]
    run_trainer("merge", [*sources, "--output", output, *stated])
