"""`lockstep model get NAME`: fetch a base model onto a job's volumes, or into a folder here, before a job needs it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.names import WORKSPACE
from lockstep.cli.shared.inputs import OptionalFileOption, only
from lockstep.cli.shared.jobargs import WORKSPACE as WORKSPACE_HERE
from lockstep.cli.shared.jobargs import TargetOptions, acts_on
from lockstep.cli.shared.signals import exiting_on_ctrl_c
from lockstep.platforms.output import ProgramOutput, put, tell

if TYPE_CHECKING:
    from lockstep.api.job import TrainingJob
    from lockstep.kube.aim import Connections
    from lockstep.kube.cluster import Cluster
    from lockstep.plan.render.resolved import Resolved
    from lockstep.platforms.hosts.backend import HostsBackend
    from lockstep.programs import Place

app = typer.Typer(help="Work with base models.", no_args_is_help=True)
MODULE = "lockstep_train.fetch"
LIFETIME_SECONDS = 86400
"""Lifetime of the pod: enough for a model of a terabyte over a slow link."""
FAILED = 1


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
    hosts = _hosts(only(files, "model get") if files else None, job, where) if claim is None else None
    if hosts is not None:
        name, revision = _named(name, revision, hosts.job)
        _refuse_unusable(name, revision)
        code = _run(_on_hosts(hosts, name, revision, to))
    elif files or claim is not None:
        read = _job_of_file(only(files, "model get") if files else None, claim, token_secret, name, where)
        name, revision = _named(name, revision, read.job)
        _refuse_unusable(name, revision)
        code = _run(_before_start(read, _arguments(name, revision, to), where.connections))
    elif name is None:
        raise ConfigError("NAME is missing: name a model (lockstep model get org/name), or a job file that names one (-f FILE)")
    elif job is not None:
        code = _run(_on_volumes(job, where.chosen_namespace(), _arguments(name, revision, to), where.connections))
    else:
        return _here(name, revision, to, where.workspace)
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


def _job_of_file(file: Path | None, claim: str | None, token_secret: str | None, name: str | None, where: TargetOptions) -> Resolved:
    """Job whose volumes are filled; for a claim, one that would use it. Raises ConfigError."""
    from lockstep.cli.shared.inputs import read_all, resolve_inputs

    with TemporaryDirectory() as folder:
        if file is None:
            if name is None:
                raise ConfigError("NAME is missing: lockstep model get org/name --claim CLAIM")
            file = Path(folder) / "claim.yaml"
            file.write_text(json.dumps(_job_of_claim(str(claim), token_secret, name)))
        inputs, *others = read_all(file, where, unnamed=lambda: where.named)
    if others:
        raise ConfigError(f"{file} holds {len(others) + 1} jobs: lockstep model get takes a file with one")
    inputs.aim(where.verb)
    return resolve_inputs(inputs)


def _job_of_claim(claim: str, token_secret: str | None, name: str) -> dict[str, Any]:
    secret = {} if token_secret is None else {"tokenSecret": {"name": token_secret}}
    training = {"model": {"name": name, **secret}, "data": {"path": f"{WORKSPACE}/none.jsonl"}}
    spec = {"nodes": 1, "storage": {"workspaceClaimName": claim}, "training": training}
    return {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "model-get"}, "spec": spec}


def _run(coroutine: Any) -> int:
    with exiting_on_ctrl_c("interrupted: what has arrived is kept; run the same command again to continue"):
        return int(asyncio.run(coroutine))


class _Hosts(NamedTuple):
    """Hosts whose volumes are filled."""

    backend: HostsBackend
    names: Sequence[str]
    job: TrainingJob | None
    """Job of the file; None: a job was named that has started."""


def _hosts(file: Path | None, job: str | None, where: TargetOptions) -> _Hosts | None:
    """Return the hosts of the job that is named or in the file; None where its cluster is of Kubernetes, or none is meant."""
    from lockstep.platforms.hosts.backend import HostsBackend

    if job is not None:
        named = where.hosts()
        return None if named is None else _Hosts(named, named.job(job).seen.hosts, None)
    cluster = where.cluster
    if file is None or (cluster is None and not file.is_file()):  # (what is piped in can be read once)
        return None
    from lockstep.api.files.jobfile import parse_job_file
    from lockstep.cli.shared.clusterfiles import read_text
    from lockstep.cli.shared.target import hosts_of

    if cluster is None:
        cluster = parse_job_file(read_text(file), str(file)).spec.cluster
    cluster_file = None if cluster is None else hosts_of(where.verb, cluster)
    if cluster is None or cluster_file is None:
        return None
    from lockstep.cli.shared.inputs import read_inputs
    from lockstep.plan.hosts.place import chosen

    read = read_inputs(file, replace(where, cluster=cluster))
    backend = HostsBackend(cluster_file, cluster)
    return _Hosts(backend, [host.name for host in chosen(backend.hosts, read.job.spec.nodes)], read.job)


async def _on_hosts(hosts: _Hosts, name: str, revision: str | None, to: Path | None) -> int:
    """Fetch onto each host, by its own network, with the variables that its file gives its ranks."""
    from lockstep.plan.hosts.place import python_of
    from lockstep.platforms.places.backend import Volume
    from lockstep_spec.exits import FAILED

    arguments = _arguments(name, revision, to)
    fleet = hosts.backend.fleet()
    answers, problems = await fleet.look(hosts.names)
    for problem in problems.values():
        tell(problem)

    async def one(name: str) -> int:
        host, facts = hosts.backend.hosts.host(name), answers[name]
        environment = tuple((variable.name, variable.value) for variable in host.env)
        place = replace(fleet.place(name), python=(python_of(host, facts),), environment=environment)
        volume = Volume(place, facts.workspace.path, facts.datasets.path)
        return await _fetch(place, [*map(volume.path, arguments)], f"{name}: " if len(hosts.names) > 1 else "")

    return max([*await asyncio.gather(*map(one, answers)), *(FAILED for _ in problems)])


async def _before_start(job: Resolved, arguments: Sequence[str], connections: Connections) -> int:
    """Fetch onto the volumes of a job that its file describes: in its pods while it runs, else in a pod that mounts what its pods would."""
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.files.reader import reader, stateful_set_before_start
    from lockstep_spec.choices import StorageMode

    async with await Cluster.connect(connections) as cluster:
        if await cluster.get("StatefulSet", job.namespace, job.name) is not None:
            return await _everywhere(cluster, job.namespace, job.name, arguments)
        if job.storage_mode is not StorageMode.SHARED:
            raise ConfigError(
                f"storage.mode of job {job.name} is {job.storage_mode.value}: each pod's volume is made with the pod, and each pod fetches"
                f" the model when the job starts; once it has: lockstep model get NAME --job {job.name}"
            )
        stateful_set = await stateful_set_before_start(cluster, job)
        async with reader(cluster, stateful_set, seconds=LIFETIME_SECONDS, secrets=True, say=tell) as place:
            return await _fetch(place, arguments, "")


async def _on_volumes(job: str, namespace: str, arguments: Sequence[str], connections: Connections) -> int:
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.kubernetes.job import known_job

    async with await Cluster.connect(connections) as cluster:
        await known_job(cluster, namespace, job)
        return await _everywhere(cluster, namespace, job, arguments)


async def _everywhere(cluster: Cluster, namespace: str, job: str, arguments: Sequence[str]) -> int:
    """Fetch onto each volume that the job's pods have."""
    from lockstep.platforms.files.reader import beside, nodes_with_volumes

    nodes = await nodes_with_volumes(cluster, namespace, job)

    async def one(node: int) -> int:
        async with beside(cluster, namespace, job, node, seconds=LIFETIME_SECONDS, secrets=True, say=tell) as place:
            return await _fetch(place, arguments, f"node {node}: " if len(nodes) > 1 else "")

    return max(await asyncio.gather(*map(one, nodes)))


async def _fetch(place: Place, arguments: Sequence[str], before: str) -> int:
    """Fetch in the pod, show its lines as they come, and return the exit code."""
    from lockstep.programs import STDOUT
    from lockstep_spec.exits import CONFIGURATION, USAGE

    rest, errors = bytearray(), ProgramOutput(error=True)
    async with place.program([*place.python, "-m", MODULE, *arguments], stdin=False, pings=True) as running:
        async for channel, data in running.output():
            if channel != STDOUT:
                errors.put(data)
                continue
            *lines, rest = bytearray(rest + data).split(b"\n")
            for line in lines:
                put(f"{before}{line.decode(errors='replace')}")
        return {0: 0, CONFIGURATION: USAGE}.get(running.code or 0, FAILED)
