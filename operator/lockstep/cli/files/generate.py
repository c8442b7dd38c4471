"""`lockstep generate JOB PROMPT`: generate text with a job's newest adapter on its base model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.shared.jobargs import TargetOptions, on_cluster
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.platforms.output import ProgramOutput, tell

if TYPE_CHECKING:
    from lockstep.cli.shared.hostsite import HostJob
    from lockstep.platforms.files.results import Adapter
    from lockstep.programs import Place


@on_cluster
def generate(
    where: TargetOptions,
    job: Annotated[str, typer.Argument(help="The job's name; with --local a run's or an adapter's folder.", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="The beginning of the text.", show_default=False)],
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The most tokens to add.")] = 100,
    base: Annotated[bool, typer.Option("--base", help="First print what the base model writes without the adapter.")] = False,
    local: Annotated[bool, typer.Option("--local", help="On this machine, from a folder.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="The base model's folder. Default: what the job or the adapter names.")
    ] = None,
    gpus: Annotated[
        int, typer.Option("--gpus", min=0, help="GPUs to ask for; 0: the CPUs and the memory of a pod of the job, or of the host.")
    ] = 0,
) -> None:
    """Continue a prompt with a job's newest adapter on its base model, token by token.

    It runs in a pod of the job if that is idle (an interactive job, or one held after a failure), else in a short-lived pod with the job's volumes and image; on hosts, on that of node 0.

    Example: lockstep generate demo 'The value of' --max-tokens 60 --base
    """
    arguments = ["--prompt", prompt, "--tokens", str(max_tokens), "--stream", *(["--compare"] if base else [])]
    arguments += [] if model is None else ["--model", model]
    if local:
        from lockstep.cli.shared.trainer import run_trainer

        run_trainer("generate", ["--adapter", _adapter_in(Path(job)), *arguments])
        return
    site = where.hosts()
    with exiting_on_ctrl_c():
        if site is None:
            writing = _on_cluster(job, arguments, gpus, where, named=model is not None)
        else:
            writing = _on_host(site.job(job), arguments, gpus, named=model is not None)
        code = asyncio.run(writing)
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
            f"{folder} holds no adapter: name a run's folder (runs/<job>) or an adapter's, or export one: lockstep adapter export RUN -o adapter"
        )
    return Path(adapter)


async def _on_cluster(job: str, arguments: list[str], gpus: int, where: TargetOptions, *, named: bool) -> int:
    from lockstep.cli.files.cp import known_job
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.files.results import base_model, idle_or_own_pod, newest_adapter

    namespace = where.chosen_namespace()
    async with await Cluster.connect(where.context) as cluster:
        await known_job(cluster, namespace, job)
        async with idle_or_own_pod(cluster, namespace, job, gpus, tell) as place:
            adapter = await newest_adapter(place, job)
            model = None if named else await base_model(cluster, namespace, job)
            return await _write(place, adapter, [*arguments, *([] if model is None else ["--model", model])])


async def _on_host(job: HostJob, arguments: list[str], gpus: int, *, named: bool) -> int:
    """Generate on the host of node 0, which has the adapter: on its CPUs, or on GPUs that nobody uses."""
    from lockstep.platforms.files.results import forget, newest_adapter

    async with job.trainer(0, tell) as volume:
        adapter = await newest_adapter(volume.place, job.name, volume.run_folder(job.name), job.site.again)
        stated = job.job["spec"].get("training", {}).get("model", {}).get("name", "")
        model = ["--model", volume.path(stated)] if stated.startswith("/") and not named else []
        visible = {"CUDA_VISIBLE_DEVICES": await job.free_gpus(0, gpus) if gpus else ""}
        place = replace(volume.place, environment=tuple({**dict(volume.place.environment), **visible}.items()))
        try:
            return await _write(place, adapter, [*arguments, *model])
        finally:
            await forget(place, adapter)


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
