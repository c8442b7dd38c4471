"""`lockstep adapter export`: a PEFT adapter folder from a run's checkpoint, on a CPU.

The exporter needs torch, which the command line doesn't; so it runs as a process of its own, from the trainer's package.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.api.errors import ConfigError

EXPORTER = "lockstep_train.export"
EXPORTER_CONFIG = 78  # the trainer's exit code for what can't be done as asked
EXIT_FAILED = 1
EXIT_USAGE = 2

app = typer.Typer(help="Work with trained adapters.", no_args_is_help=True)


@app.callback()
def adapter() -> None:
    """Work with trained adapters."""


@app.command("export")
def export(
    source: Annotated[Path, typer.Argument(help="A run's folder (runs/<job>), its checkpoints folder, or one step-N.aM folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The adapter's folder; made if it isn't there.")],
) -> None:
    """Make a PEFT adapter folder from a checkpoint's shards, without a GPU and without the base model."""
    code = subprocess.run(export_command(source, output), check=False).returncode
    if code:
        raise typer.Exit(EXIT_USAGE if code == EXPORTER_CONFIG else EXIT_FAILED)


def export_command(source: Path, output: Path) -> list[str]:
    """The exporter's argument list. Raises ConfigError where the trainer isn't installed."""
    if any(importlib.util.find_spec(package) is None for package in ("lockstep_train", "torch", "safetensors")):
        raise ConfigError(f"{sys.executable} has no trainer to export with; install lockstep[train], or run this in the trainer's image")
    return [sys.executable, "-m", EXPORTER, str(source), "--output", str(output)]
