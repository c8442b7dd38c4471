"""`lockstep generate JOB PROMPT`: generate text with a job's newest adapter on its base model; and what it has in common with `chat`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import Failed
from lockstep.cli.shared.clusterfiles import is_path
from lockstep.cli.shared.jobargs import TargetOptions, find_job, on_site
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.cli.shared.terminal import waiting
from lockstep.cli.shared.trainer import AT_FIRST, trainer_command
from lockstep.platforms.jobs.processes import LocalPlace
from lockstep.platforms.output import ProgramOutput, put, put_text, tell
from lockstep.platforms.places.values import Use
from lockstep.programs import ProgramFailed

if TYPE_CHECKING:
    from lockstep.platforms.files.chat import TunedModel
    from lockstep.platforms.places.backend import Job
    from lockstep.platforms.places.values import Volume

TunedArgument = Annotated[
    str,
    typer.Argument(help="The job's name, or the folder of a run or of an adapter on this machine, with a slash.", show_default=False),
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", min=1, help="Largest number of tokens to write.")]
BaseOption = Annotated[bool, typer.Option("--base", help="First show what the base model writes without the adapter.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="The base model's folder. Default: what the job or the adapter names.")]
GpusOption = Annotated[
    int,
    typer.Option(
        "--gpus",
        min=0,
        help="GPUs to ask for. With 0, the default, it runs on CPUs and gets the memory of one of the job's pods, or of the host.",
    ),
]


@on_site
def generate(
    where: TargetOptions,
    job: TunedArgument,
    prompt: Annotated[
        str, typer.Argument(help="The beginning of the text, or a message to a job that has learned chats.", show_default=False)
    ],
    max_tokens: MaxTokensOption = 100,
    base: BaseOption = False,
    plain: Annotated[bool, typer.Option("--plain", help="Continue the prompt as it stands, also if the job has learned chats.")] = False,
    model: ModelOption = None,
    gpus: GpusOption = 0,
) -> None:
    """Continue a prompt with a job's newest adapter.

    It loads the adapter on its base model, and prints token by token. If the job has learned chats, the prompt is a message in its chat
    template, and the text is the answer.

    It runs in a pod of the job if that pod is idle (an interactive job, or one held after a failure), else in a short-lived pod with the
    job's volumes and image. On hosts it runs on node 0, and a run of --local or a folder on this machine.

    Example: lockstep generate demo 'The value of' --max-tokens 60 --base
    """
    with exiting_on_ctrl_c():
        tuned = tuned_model(where, job, gpus, {"--model": model})
        asyncio.run(_generate(tuned, prompt, max_tokens, with_base=base, plain=plain))


async def _generate(tuned: AbstractAsyncContextManager[TunedModel], prompt: str, tokens: int, *, with_base: bool, plain: bool) -> None:
    async with tuned as model:
        chats = model.facts.get("chats") and not plain
        said = {"messages": [{"role": "user", "content": prompt}]} if chats else {"prompt": prompt}
        for base in (True, False) if with_base else (False,):
            if with_base:
                put(f"--- {model.facts.get('model' if base else 'adapter')}", flush=True)
            await model.answer(said | {"tokens": tokens, "base": base}, shown())
            put_text("\n")


def base_folder(job: Job) -> str:
    """Return the folder by which a job names its base model; "" if it names none."""
    name = str(job.job["spec"].get("training", {}).get("model", {}).get("name", ""))
    return name if name.startswith("/") else ""


def shown() -> Callable[[str], None]:
    """Return what prints the pieces of one answer."""
    output = ProgramOutput()
    return lambda piece: output.put(piece.encode(errors="replace"))


def tuned_model(
    where: TargetOptions, name: str, gpus: int, stated: dict[str, int | str | None], *flags: str
) -> AbstractAsyncContextManager[TunedModel]:
    """Return the model with the adapter of a job, or of a folder of this machine, which is loaded on entry. `stated`, `flags`: options of
    the program. Raises ConfigError.
    """
    from lockstep.platforms.files.chat import loaded

    options = [word for option, value in stated.items() if value is not None for word in (option, str(value))]
    if not is_path(name):
        return _of_job(find_job(name, where), gpus, [*options, *flags])
    none = f"{name} has no adapter and no commit: name a run's folder (runs/<job>) that has saved, or an adapter's"
    return loaded(LocalPlace(), trainer_command("chat", [Path(name), *options, *flags]), none, _loading)


@asynccontextmanager
async def _of_job(job: Job, gpus: int, options: list[str]) -> AsyncIterator[TunedModel]:
    """Load beside the job's files. A pod that runs is asked first: what it refuses needs no other pod."""
    from lockstep.platforms.files.chat import MODULE, loaded, started

    stated = "" if "--model" in options else base_folder(job)

    def command(volume: Volume) -> list[str]:
        base = ["--model", volume.path(stated)] if stated else []
        return [*volume.place.python, "-m", MODULE, volume.run_folder(job.name), *options, *base]

    def none(volume: Volume) -> str:
        why = f"lockstep why {f'{job.name} {job.backend.words.again}'.rstrip()} tells how far the job has come"
        return f"{volume.run_folder(job.name)} in {volume.place.name} has no adapter and no commit: {why}"

    if job.pods is not None:
        async with AsyncExitStack() as stack:
            running = None
            with suppress(Failed):
                running = await stack.enter_async_context(job.volume(0, tell, Use.RANKS))
            if running is not None:
                with suppress(ProgramFailed):
                    await stack.enter_async_context(started(running.place, [*command(running), "--check"], none(running)))
    async with job.volume(0, tell, Use.MODEL, gpus) as volume, loaded(volume.place, command(volume), none(volume), _loading) as model:
        yield model


def _loading(what: str) -> AbstractContextManager[object]:
    tell(f"{what}: the model is loading")
    return waiting(AT_FIRST["chat"])
