"""`lockstep adapter`: make adapters and models from a run's checkpoint, on a CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.shared.jobargs import JobArgument, TargetOptions, find_job, on_cluster
from lockstep.cli.shared.trainer import run_trainer
from lockstep.platforms.output import put, tell

if TYPE_CHECKING:
    from lockstep.platforms.files.results import Adapter
    from lockstep.platforms.places.backend import Job
    from lockstep.programs import Place

app = typer.Typer(help="Work with trained adapters.", no_args_is_help=True)

SourceArgument = Annotated[
    list[Path],
    typer.Argument(
        help="A run's folder (runs/<job>), its checkpoints folder, or one step-N.aM folder. Name several if the shards are spread."
    ),
]


@app.callback()
def adapter() -> None:
    """Work with trained adapters."""


@app.command("export")
def export(
    sources: SourceArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The adapter's folder; made if it isn't there.")],
) -> None:
    """Make a PEFT adapter folder from a checkpoint's shards.

    It needs no GPU and no base model.

    Example: lockstep adapter export runs/demo -o adapter
    """
    run_trainer("export", [*sources, "--output", output])


@app.command("merge")
def merge(
    sources: SourceArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The model's folder: a new or an empty one.")],
    base: Annotated[Path | None, typer.Option("--base", help="The base model's folder. Default: where the run had it.")] = None,
) -> None:
    """Make a full model folder: base model and adapter merged.

    It reads a checkpoint's shards and the base model tensor by tensor, without a GPU.

    Example: lockstep adapter merge runs/demo -o model --base models/tiny-base
    """
    stated: list[str | Path] = [] if base is None else ["--base", base]
    run_trainer("merge", [*sources, "--output", output, *stated])


@app.command("get")
@on_cluster
def get_adapter(
    where: TargetOptions,
    job: JobArgument,
    output: Annotated[Path, typer.Argument(help="The adapter's folder on this machine; made if it isn't there.")] = Path("adapter"),
) -> None:
    """Fetch a job's newest adapter from its volume.

    The job may run or not. If only a commit's shards exist, it exports the adapter from them there.

    Example: lockstep adapter get demo ./demo-adapter
    """
    put(asyncio.run(_get(find_job(job, where), output)))


async def _get(job: Job, output: Path) -> str:
    from lockstep.platforms.files.results import TEMPORARY, adapter_of

    async with (
        job.trainer(0, tell) as volume,
        adapter_of(job.name, volume.place, volume.run_folder(job.name), job.backend.again) as adapter,
    ):
        return await _fetched(adapter, volume.place, [volume.workspace, TEMPORARY], output, job.name) + _base_words(job)


def _base_words(job: Job) -> str:
    """Return what PEFT needs besides the adapter of a job that names its base by a folder; "" where it finds the base by itself."""
    base = job.job["spec"].get("training", {}).get("model", {}).get("name", "")
    return f". PEFT finds no {base} here: load the base model from its folder on this machine, and pass it" if base.startswith("/") else ""


async def _fetched(adapter: Adapter, place: Place, roots: list[str], output: Path, job: str) -> str:
    """Fetch the adapter, and return a sentence about it."""
    from lockstep.platforms.files.meter import Meter
    from lockstep.platforms.files.transfer import TransferProgress, get

    with Meter() as meter:
        progress = TransferProgress(meter.changed)
        meter.transfers = {job: progress}
        await get(place, adapter.folder, str(output), roots, progress, "adapter")
    return f"{output}: {adapter.made_of or adapter.folder} of job {job}" + (", made of its shards" if adapter.made_of else "")
