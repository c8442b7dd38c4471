"""`lockstep model get NAME`: fetch a base model onto a job's volumes, or into a folder here, before a job needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import WORKSPACE
from lockstep.api.objects import Typed
from lockstep.cli.shared.inputs import Inputs, OptionalFileOption, only, read_all
from lockstep.cli.shared.jobargs import TargetOptions, acts_on
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.cli.shared.target import refuse_workspace
from lockstep.cli.shared.trainer import run_trainer
from lockstep.platforms.output import ProgramOutput, put, tell
from lockstep.platforms.places.backends import DEFAULT_WORKSPACE
from lockstep.platforms.places.orders import Order
from lockstep.programs import STDOUT
from lockstep_spec.exits import CONFIGURATION, FAILED, USAGE

if TYPE_CHECKING:
    from lockstep.api.job import TrainingJob
    from lockstep.platforms.places.values import Volume, Volumes

MODULE = "lockstep_train.fetch"


@acts_on("cluster", "namespace", "context", here=True)
def get_model(
    where: TargetOptions,
    name: Annotated[
        str | None,
        typer.Argument(
            help="A model of the hub (org/name) or an address (s3://bucket/folder). Default: the job file's.", show_default=False
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="A branch, tag or commit of the hub. Default: its main branch.")
    ] = None,
    files: OptionalFileOption = None,
    job: Annotated[str | None, typer.Option("--job", help="The job of the cluster whose volumes to fill.")] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="The folder for the model; in pods it must be below /workspace. Default: the cache in which jobs look."),
    ] = None,
) -> None:
    """Fetch a base model by its name, once for all jobs.

    The download is verified and can be resumed. All jobs of a volume share it.

    With -f or --job it fills volumes of the cluster, with the job's tokenSecret. The job's own pods fetch the model if they run, else a
    short-lived pod without GPUs does. On hosts, each host fetches for itself. Without these options, the model comes to this machine, for
    `lockstep run --local`. If a fetch breaks, run the same command again to continue.

    Example: lockstep model get -f job.yaml

    Example: lockstep model get Qwen/Qwen3-8B --to models/Qwen3-8B
    """
    if files and job is not None:
        raise ConfigError("--file and --job each say which volumes are meant: give one of them")
    if files or job is not None:
        refuse_workspace(where.named)
    else:
        places = {"--cluster": None if where.workspace else where.cluster, "--namespace": where.namespace, "--context": where.context}
        _refuse_unread(places, "-f or --job, which say whose volumes to fill: without these, the model comes to this machine")
    if name is not None:
        _refuse_unusable(name, revision)
    if files:
        read = _job_of_file(only(files, "model get"), where)
        name, revision = _named(name, revision, read.job)
        _refuse_unusable(name, revision)
        place, job, order = read.at(where), read.job.metadata.name, Order(read.job, read.cluster, Typed(""))
    elif name is None:
        raise ConfigError("NAME is missing: name a model (lockstep model get org/name), or a job file that names one (-f FILE)")
    elif job is None:
        return _here(name, revision, to, where.workspace or DEFAULT_WORKSPACE)
    else:
        place, order = where, None
    arguments, backend = _arguments(name, revision, to), place.backend()

    async def fetched(volumes: Volumes) -> int:
        return max(await asyncio.gather(*(_fetch(node, one, arguments, alone=len(volumes) == 1) for node, one in volumes.items())))

    with exiting_on_ctrl_c("interrupted: what has arrived is kept; run the same command again to continue"):
        code = asyncio.run(fetched(backend.volumes_to_fill(job, order, tell)))
    if code:
        raise typer.Exit(code)


def _refuse_unread(options: Mapping[str, object], need: str) -> None:
    """Refuse options that would do nothing: whoever states one relies on it. Raises ConfigError."""
    stated = [option for option, value in options.items() if value is not None]
    if stated:
        raise ConfigError(f"{' and '.join(stated)} {'are' if len(stated) > 1 else 'is'} for {need}")


def _refuse_unusable(name: str, revision: str | None) -> None:
    """Refuse a name that no job could give the model, by the API's own rules and in their words. Raises ConfigError."""
    from pydantic import ValidationError

    from lockstep.api.files.problems import broken_rules, explain
    from lockstep.api.training import BaseModelSource

    try:
        BaseModelSource(name=name, revision=revision)
    except ValidationError as error:
        details = error.errors()
        rules = [rule.message for detail in details for rule in broken_rules(detail)]
        raise ConfigError(*(rules or [f"{detail['loc'][0]}: {explain(detail)}" for detail in details])) from None


def _here(name: str, revision: str | None, to: Path | None, workspace: Path) -> None:
    stated = [*(["--revision", revision] if revision else []), *(["--to", str(to.resolve())] if to else [])]
    run_trainer("fetch", [name, "--cache", (workspace / "workspace" / "cache").resolve(), *stated])


def _arguments(name: str, revision: str | None, to: Path | None) -> list[str]:
    if to is not None and not str(to).startswith(f"{WORKSPACE}/"):
        raise ConfigError(f"--to {to} must be a folder below {WORKSPACE}: files elsewhere are lost with the pod")
    return [name, "--cache", f"{WORKSPACE}/cache", *(["--revision", revision] if revision else []), *(["--to", str(to)] if to else [])]


def _named(name: str | None, revision: str | None, job: TrainingJob) -> tuple[str, str | None]:
    """Return the stated name and revision, else the job file's."""
    if name is not None:
        return name, revision
    training = job.spec.training
    if training is None or training.model.name.startswith("/"):
        stated = "has no training" if training is None else f"names the folder {training.model.name}"
        raise ConfigError(f"job {job.metadata.name} {stated}: there is no model to fetch; name one: lockstep model get org/name -f FILE")
    return training.model.name, revision or training.model.revision


def _job_of_file(file: Path, where: TargetOptions) -> Inputs:
    """Return the job whose volumes are filled. Raises ConfigError."""
    inputs, *others = read_all(file, where, unnamed=lambda: where.named)
    if others:
        raise ConfigError(f"{file} holds {len(others) + 1} jobs: lockstep model get takes a file with one")
    return inputs


async def _fetch(node: str, opened: AbstractAsyncContextManager[Volume], arguments: Sequence[str], *, alone: bool) -> int:
    """Fetch onto a node's volume, show its lines as they come, and return the exit code."""
    before, rest, errors = "" if alone else f"{node}: ", bytearray(), ProgramOutput(error=True)
    try:
        async with opened as volume:
            words = [*volume.place.python, "-m", MODULE, *map(volume.path, arguments)]
            async with volume.place.program(words, stdin=False, pings=True) as running:
                async for channel, data in running.output():
                    if channel != STDOUT:
                        errors.put(data)
                        continue
                    *lines, rest = bytearray(rest + data).split(b"\n")
                    for line in lines:
                        put(f"{before}{line.decode(errors='replace')}")
                return {0: 0, CONFIGURATION: USAGE}.get(running.code or 0, FAILED)
    except Failed as error:
        if alone:
            raise
        tell(f"{before}{error}")
        return FAILED
