"""`lockstep generate JOB PROMPT`: generate text with a job's newest adapter on its base model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.shared.clusterfiles import is_path
from lockstep.cli.shared.jobargs import TargetOptions, find_job, on_site
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.platforms.output import ProgramOutput, tell

if TYPE_CHECKING:
    from lockstep.platforms.files.results import Adapter
    from lockstep.platforms.places.backend import Job
    from lockstep.programs import Place


@on_site
def generate(
    where: TargetOptions,
    job: Annotated[
        str,
        typer.Argument(help="The job's name, or the folder of a run or of an adapter on this machine, with a slash.", show_default=False),
    ],
    prompt: Annotated[str, typer.Argument(help="The beginning of the text.", show_default=False)],
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Largest number of tokens to add.")] = 100,
    base: Annotated[bool, typer.Option("--base", help="First print what the base model writes without the adapter.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="The base model's folder. Default: what the job or the adapter names.")
    ] = None,
    gpus: Annotated[
        int,
        typer.Option(
            "--gpus",
            min=0,
            help="GPUs to ask for. With 0, the default, it runs on CPUs and gets the memory of one of the job's pods, or of the host.",
        ),
    ] = 0,
) -> None:
    """Continue a prompt with a job's newest adapter.

    It loads the adapter on its base model, and prints token by token.

    It runs in a pod of the job if that pod is idle (an interactive job, or one held after a failure), else in a short-lived pod with the
    job's volumes and image. On hosts it runs on node 0, and a run of --local or a folder on this machine.

    Example: lockstep generate demo 'The value of' --max-tokens 60 --base
    """
    arguments = ["--prompt", prompt, "--tokens", str(max_tokens), "--stream", *(["--compare"] if base else [])]
    arguments += [] if model is None else ["--model", model]
    if is_path(job):
        from lockstep.cli.shared.trainer import run_trainer

        run_trainer("generate", ["--adapter", _adapter_in(Path(job)), *arguments])
        return
    with exiting_on_ctrl_c():
        code = asyncio.run(_generate(find_job(job, where), arguments, gpus, named=model is not None))
    if code:
        raise typer.Exit(1)


def _adapter_in(folder: Path) -> Path:
    """Folder of the adapter: `folder` itself or its newest one. Raises ConfigError when there is none."""
    from lockstep.api.errors import ConfigError
    from lockstep.platforms.inpod.newest import CONFIG, newest

    if (folder / CONFIG).is_file():
        return folder
    adapter = newest(folder)["adapter"]
    if adapter is None:
        raise ConfigError(
            f"{folder} holds no adapter: name a run's folder (runs/<job>) or an adapter's, or export one: lockstep adapter export RUN -o"
            " adapter"
        )
    return Path(adapter)


async def _generate(job: Job, arguments: list[str], gpus: int, *, named: bool) -> int:
    """Generate beside the adapter. `named`: the model's folder is among the arguments; else it is the one that the job names, or the
    adapter.
    """
    from lockstep.platforms.files.results import adapter_of

    async with (
        job.beside_ranks(gpus, tell) as volume,
        adapter_of(job.name, volume.place, volume.run_folder(job.name), job.backend.again) as adapter,
    ):
        stated = job.job["spec"].get("training", {}).get("model", {}).get("name", "")
        model = ["--model", volume.path(stated)] if stated.startswith("/") and not named else []
        return await _write(volume.place, adapter, [*arguments, *model])


async def _write(place: Place, adapter: Adapter, arguments: list[str]) -> int:
    from lockstep.cli.shared.terminal import waiting
    from lockstep.platforms.files.results import write_on

    tell(f"{adapter.made_of or adapter.folder} in {place.name}: the model is loading")
    shown = ProgramOutput()
    with waiting(f"{place.name} imports torch and peft, and loads the model") as heard:

        def show(text: bytes) -> None:
            heard()
            shown.put(text)

        return await write_on(place, ["--adapter", adapter.folder, *arguments], show)
