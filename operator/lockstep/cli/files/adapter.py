"""`lockstep adapter`: make adapters and models from a run's checkpoint, on a CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.files.generate import base_folder
from lockstep.cli.shared.jobargs import JobArgument, TargetOptions, find_job, job_among, on_cluster, on_site
from lockstep.cli.shared.terminal import confirm
from lockstep.cli.shared.trainer import NEEDS, ask_trainer, raise_for, run_trainer
from lockstep.platforms.files.meter import Meter
from lockstep.platforms.files.transfer import TransferProgress, get
from lockstep.platforms.local.environment import in_full_environment
from lockstep.platforms.output import ProgramOutput, put, tell
from lockstep.platforms.places.values import Use

if TYPE_CHECKING:
    from lockstep.platforms.places.backend import Job
    from lockstep.programs import Place


class ReadBy(StrEnum):
    """Reader of an exported adapter."""

    PEFT = "peft"
    VLLM = "vllm"
    MERGED = "merged"
    GGUF = "gguf"


SourceArgument = Annotated[
    list[Path],
    typer.Argument(
        help="A run's folder (runs/<job>), its checkpoints folder, or one step-N.aM folder. Name several if the shards are spread."
    ),
]


def export(
    sources: SourceArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The adapter's folder; made if it isn't there.")],
    engine: Annotated[
        ReadBy,
        typer.Option(
            "--for",
            help="What is to read it: PEFT, vLLM, llama.cpp (gguf), or whatever reads a model (merged), which takes the base's size.",
        ),
    ] = ReadBy.PEFT,
    verify: Annotated[
        bool, typer.Option("--verify", help="Load it there, and compare with the model that was trained. Exit code 1 if it isn't equal.")
    ] = False,
    base: Annotated[Path | None, typer.Option("--base", help="The base model's folder. Default: where the run had it.")] = None,
) -> None:
    """Make an adapter's folder from a checkpoint's shards.

    It needs no GPU, and for PEFT no base model unless you verify. GGUF files, and proofs in vLLM and llama.cpp, need these engines: make
    engines.

    Example: lockstep adapter export runs/demo -o adapter

    Example: lockstep adapter export runs/demo -o adapter --for vllm --verify
    """
    options: list[str | Path] = ["--output", output, "--for", engine.value]
    options += [] if base is None else ["--base", base]
    options += ["--verify"] if verify else []
    run_trainer("proof", [*sources, *options, *_programs(engine, verify=verify)])


def _programs(engine: ReadBy, *, verify: bool) -> list[str]:
    """Return options that name the engine's programs. Raises ConfigError where it isn't installed."""
    if engine not in (ReadBy.VLLM, ReadBy.GGUF):
        return []
    from lockstep.platforms.engines.environments import Engine, converter, reader

    reading = ["--reader", *reader(Engine.VLLM if engine is ReadBy.VLLM else Engine.LLAMA_CPP)] if verify else []
    return [*map(str, reading), *(["--converter", *map(str, converter())] if engine is ReadBy.GGUF else [])]


@on_site
def merge(
    where: TargetOptions,
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB|FOLDER...",
            help=(
                "A job's name; or, on this machine, an adapter's folder, a run's folder (runs/<job>), its checkpoints folder, or one"
                " step-N.aM folder. Name several if the shards are spread."
            ),
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The model's folder: a new or an empty one.")],
    base: Annotated[
        Path | None, typer.Option("--base", help="The base model's folder on this machine. Default: where the run had it.")
    ] = None,
) -> None:
    """Make a full model folder: base model and adapter merged.

    It reads the adapter or a checkpoint's shards, and the base model tensor by tensor, without a GPU.

    A job is merged where its base model is, beside its run, and the result is fetched. With --base, only its adapter is fetched, and merged
    here.

    Example: lockstep adapter merge demo -o model

    Example: lockstep adapter merge runs/demo -o model --base models/tiny-base
    """
    name = job_among(source)
    stated: list[str | Path] = [] if base is None else ["--base", base]
    if name is None:
        run_trainer("merge", [*map(Path, source), "--output", output, *stated])
        return
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; give a new folder")
    if base is None:
        put(asyncio.run(_merged(find_job(name, where), output)))
        return
    with _adapter_here(name, where, "merge") as adapter:
        run_trainer("merge", [adapter, "--output", output, *stated])


@contextmanager
def _adapter_here(job: str, where: TargetOptions, module: str) -> Iterator[Path]:
    """Yield a folder with a job's newest adapter, for a module of the trainer. It goes at the end."""
    in_full_environment(NEEDS[module], lambda: find_job(job, where))
    with TemporaryDirectory() as folder:
        asyncio.run(_get(find_job(job, where), Path(folder) / "adapter"))
        yield Path(folder) / "adapter"


async def _merged(job: Job, output: Path) -> str:
    from lockstep.platforms.files.results import merged_of

    async with job.volume(0, tell, Use.TRAINER) as volume:
        stated = base_folder(job)
        base = ["--base", volume.path(stated)] if stated else []
        run, shown = volume.run_folder(job.name), ProgramOutput(error=True)
        async with merged_of(job.name, volume.place, run, job.backend.words.again, base, shown.put) as folder:
            await _copy(volume.place, folder, [volume.workspace], output, job.name)
    return f"{output}: the model of job {job.name}"


@on_site
def push(
    where: TargetOptions,
    source: Annotated[
        str, typer.Argument(metavar="JOB|FOLDER", help="A job's name, or an adapter's folder on this machine.", show_default=False)
    ],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository of the hub.", show_default=False)],
    public: Annotated[bool, typer.Option("--public", help="Let everyone read it. Default: a private repository.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Send an adapter to the hub, with its tokenizer and card.

    It lists the files with their sizes, asks, and sends them in one commit, but no shards and no data. It makes the repository if it isn't
    there. The token is that of HF_TOKEN, or of a login on this machine, and needs the right to write.

    Example: lockstep adapter push demo my-org/my-adapter
    """
    name = job_among([source])
    with nullcontext(Path(source)) if name is None else _adapter_here(name, where, "push") as adapter:
        arguments: list[str | Path] = [adapter, repository, *(["--public"] if public else [])]
        text, code = ask_trainer("push", arguments)
        raise_for(code)
        put(*text.splitlines())
        if not yes:
            confirm("Send these files?", "nobody can be asked whether to send these files: use --yes to send them")
        run_trainer("push", [*arguments, "--send"])


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
        job.volume(0, tell, Use.TRAINER) as volume,
        adapter_of(job.name, volume.place, volume.run_folder(job.name), job.backend.words.again) as adapter,
    ):
        await _copy(volume.place, adapter.folder, [volume.workspace, TEMPORARY], output, job.name)
        made = ", made of its shards" if adapter.made_of else ""
        return f"{output}: {adapter.made_of or adapter.folder} of job {job.name}{made}{_base_words(job)}"


def _base_words(job: Job) -> str:
    """Return what PEFT needs besides the adapter of a job that names its base by a folder; "" where it finds the base by itself."""
    if not (base := base_folder(job)):
        return ""
    if Path(base).is_dir():
        return f". Its base model is {base}: load it from there, and pass it to PEFT"
    return f". PEFT finds no {base} here: load the base model from its folder on this machine, and pass it"


async def _copy(place: Place, folder: str, roots: list[str], output: Path, job: str) -> None:
    with Meter() as meter:
        progress = TransferProgress(meter.changed)
        meter.transfers = {job: progress}
        await get(place, folder, str(output), roots, progress, "adapter")
