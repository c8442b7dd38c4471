"""`lockstep model get NAME`: fetch a base model onto a job's volumes, or into a folder here, before a job needs it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import WORKSPACE
from lockstep.api.objects import Typed
from lockstep.cli.shared.inputs import OptionalFileOption, only
from lockstep.cli.shared.jobargs import WORKSPACE as WORKSPACE_HERE
from lockstep.cli.shared.jobargs import TargetOptions, acts_on, find_job
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.platforms.output import ProgramOutput, put, tell
from lockstep.platforms.places.orders import Order

if TYPE_CHECKING:
    from lockstep.api.job import TrainingJob
    from lockstep.cli.shared.inputs import Inputs
    from lockstep.platforms.places.backend import Volume

app = typer.Typer(help="Work with base models.", no_args_is_help=True)
MODULE = "lockstep_train.fetch"


@app.callback()
def model() -> None:
    """Work with base models."""


@app.command("get")
@acts_on("cluster", "namespace", "context", "workspace")
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
    claim: Annotated[
        str | None, typer.Option("--claim", help="The claim to fill, with --cluster. Jobs name it in storage.workspaceClaimName.")
    ] = None,
    token_secret: Annotated[
        str | None, typer.Option("--token-secret", help="With --claim: the Secret whose key HF_TOKEN holds the hub's token.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="The folder for the model; in pods it must be below /workspace. Default: the cache in which jobs look."),
    ] = None,
) -> None:
    """Fetch a base model by its name, once for all jobs.

    The download is verified and can be resumed. All jobs of a volume share it.

    With -f, --job or --claim it fills volumes of the cluster. The job's own pods fetch the model if they run, else a short-lived pod
    without GPUs does. On hosts, each host fetches for itself. Without these options, the model comes to this machine, for `lockstep run
    --local`. If a fetch breaks, run the same command again to continue.

    Example: lockstep model get -f job.yaml

    Example: lockstep model get zai-org/GLM-4.5-Air --claim team-workspace --cluster mine

    Example: lockstep model get Qwen/Qwen3-8B --to models/Qwen3-8B
    """
    if sum(option is not None for option in (files, job, claim)) > 1:
        raise ConfigError("--file, --job and --claim each say which volumes are meant: give one of them")
    if claim is None:
        _refuse_unread(
            {"--token-secret": token_secret},
            "--claim: a job names its own Secret in training.model.tokenSecret, and this machine uses HF_TOKEN",
        )
    if files or job is not None or claim is not None:
        _refuse_unread(
            {"--workspace": None if where.workspace == WORKSPACE_HERE else where.workspace},
            "a fetch on this machine: pods have their own /workspace",
        )
    else:
        places = {"--cluster": where.cluster, "--namespace": where.namespace, "--context": where.context}
        _refuse_unread(places, "-f, --job or --claim, which say whose volumes to fill: without these, the model comes to this machine")
    if name is not None:
        _refuse_unusable(name, revision)
    if files or claim is not None:
        read = _job_of_file(only(files, "model get") if files else None, claim, token_secret, name, where)
        name, revision = _named(name, revision, read.job)
        _refuse_unusable(name, revision)
        backend = read.at(where).backend()
        backend.refuse("--claim", claim)
        volumes = partial(backend.volumes_to_fill, Order(read.job, read.cluster, Typed("")))
    elif name is None:
        raise ConfigError("NAME is missing: name a model (lockstep model get org/name), or a job file that names one (-f FILE)")
    elif job is None:
        return _here(name, revision, to, where.workspace)
    else:
        volumes = partial(find_job(job, where).volumes_to_fill)
    arguments = _arguments(name, revision, to)

    async def fetched() -> int:
        every = await volumes(tell)
        return max(await asyncio.gather(*(_fetch(node, one, arguments, alone=len(every) == 1) for node, one in every.items())))

    with exiting_on_ctrl_c("interrupted: what has arrived is kept; run the same command again to continue"):
        code = asyncio.run(fetched())
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
    from lockstep.cli.shared.trainer import run_trainer

    stated = [*(["--revision", revision] if revision else []), *(["--to", str(to.resolve())] if to else [])]
    run_trainer("fetch", [name, "--cache", (workspace / "workspace" / "cache").resolve(), *stated])


def _arguments(name: str, revision: str | None, to: Path | None) -> list[str]:
    if to is not None and not str(to).startswith(f"{WORKSPACE}/"):
        raise ConfigError(f"--to {to} must be a folder below {WORKSPACE}: files elsewhere are lost with the pod")
    return [name, "--cache", f"{WORKSPACE}/cache", *(["--revision", revision] if revision else []), *(["--to", str(to)] if to else [])]


def _named(name: str | None, revision: str | None, job: TrainingJob | None) -> tuple[str, str | None]:
    """Return the stated name and revision, else the job file's."""
    if name is not None:
        return name, revision
    if job is None:
        raise ConfigError("NAME is missing: name a model (lockstep model get org/name), or a job file that names one (-f FILE)")
    training = job.spec.training
    if training is None or training.model.name.startswith("/"):
        stated = "has no training" if training is None else f"names the folder {training.model.name}"
        raise ConfigError(f"job {job.metadata.name} {stated}: there is no model to fetch; name one: lockstep model get org/name -f FILE")
    return training.model.name, revision or training.model.revision


def _job_of_file(file: Path | None, claim: str | None, token_secret: str | None, name: str | None, where: TargetOptions) -> Inputs:
    """Job whose volumes are filled; for a claim, one that would use it. Raises ConfigError."""
    from lockstep.cli.shared.inputs import read_all

    with TemporaryDirectory() as folder:
        if file is None:
            if name is None:
                raise ConfigError("NAME is missing: lockstep model get org/name --claim CLAIM")
            file = Path(folder) / "claim.yaml"
            file.write_text(json.dumps(_job_of_claim(str(claim), token_secret, name)))
        inputs, *others = read_all(file, where, unnamed=lambda: where.named)
    if others:
        raise ConfigError(f"{file} holds {len(others) + 1} jobs: lockstep model get takes a file with one")
    return inputs


def _job_of_claim(claim: str, token_secret: str | None, name: str) -> dict[str, Any]:
    secret = {} if token_secret is None else {"tokenSecret": {"name": token_secret}}
    training = {"model": {"name": name, **secret}, "data": {"path": f"{WORKSPACE}/none.jsonl"}}
    spec = {"nodes": 1, "storage": {"workspaceClaimName": claim}, "training": training}
    return {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "model-get"}, "spec": spec}


async def _fetch(node: str, opened: AbstractAsyncContextManager[Volume], arguments: Sequence[str], *, alone: bool) -> int:
    """Fetch onto a node's volume, show its lines as they come, and return the exit code."""
    from lockstep.programs import STDOUT
    from lockstep_spec.exits import CONFIGURATION, FAILED, USAGE

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
