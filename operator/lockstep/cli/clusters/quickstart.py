"""`lockstep quickstart`: from a bare machine to a fine-tuned adapter, on a real two-node Kubernetes, on two hosts or as processes."""

from __future__ import annotations

import asyncio
import os
import platform
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.names import FRESH
from lockstep.api.objects import Object, Typed, has_ended
from lockstep.cli.clusters.demo import AGAIN, QUESTIONS, answers, demo_folder, print_result, sample_file, send_demo, step
from lockstep.cli.shared.clusterfiles import load_cluster, use
from lockstep.cli.shared.embedded import embedded_layout
from lockstep.cli.shared.folders import QUICKSTART, from_here, made_state_folder, write_state
from lockstep.cli.shared.inputs import Inputs, read_inputs
from lockstep.cli.shared.jobargs import TargetOptions, acts_on
from lockstep.cli.shared.terminal import confirm
from lockstep.kube.aim import environment_kubeconfig
from lockstep.platforms.local.environment import in_full_environment
from lockstep.platforms.output import put, put_text
from lockstep.platforms.places.backends import backend_of
from lockstep.platforms.places.orders import Order

if TYPE_CHECKING:
    from lockstep.api.job import TrainingJob
    from lockstep.platforms.places.backend import Backend
    from lockstep.platforms.places.values import Volumes

CLUSTER = "local"
HOSTS = 2


@dataclass(frozen=True)
class Stage:
    """A place for the demo, which is up."""

    where: TargetOptions
    next: str = ""
    """Lines of commands that only this place has."""


@acts_on("context", "local", here=True)
def quickstart(
    where: TargetOptions,
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Run it over ssh on two hosts that the verb starts on this machine, without Kubernetes.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Don't ask before it installs Lockstep on the cluster that KUBECONFIG names.")
    ] = False,
) -> None:
    """Fine-tune a small model on two nodes, from nothing.

    This is the shortest way to see Lockstep work.

    As root on Linux it brings up a real Kubernetes with two nodes on this machine; elsewhere it runs the same job as processes.
    --local does the latter anyway. --context names a cluster of your own to use instead; if KUBECONFIG names one, you are asked. --hosts
    shows the same on machines without Kubernetes.

    Example: lockstep quickstart
    """
    started = time.monotonic()
    ways = ((hosts, _hosts), (where.workspace, _here), (where.context, _own_cluster))
    stated = [stage_of for is_stated, stage_of in ways if is_stated]
    if len(stated) > 1:
        raise ConfigError("--hosts, --local and --context each say where to run: use one of them")
    code = train_and_show(stated[0](where) if stated else _usual(where, yes=yes))
    put(f"quickstart took {time.monotonic() - started:.0f} s", flush=True)
    raise typer.Exit(code)


def _usual(where: TargetOptions, *, yes: bool) -> Stage:
    """Make the place ready that counts where no option names one: the cluster of KUBECONFIG after a question, else this machine."""
    if _is_cluster_of_kubeconfig():
        return _own_cluster(where, asks=not yes)
    if os.environ.get("KUBECONFIG") and os.geteuid() != 0:
        return _own_cluster(where)
    why = _why_not_embedded()
    return _here(where, why) if why else _cluster(where, embedded=True)


def _own_cluster(where: TargetOptions, *, asks: bool = False) -> Stage:
    """Make a cluster ready that is not this machine's. Nothing is fetched before it is known that it will be used."""
    if asks and not sys.stdin.isatty():
        _ask_about_kubeconfig()
    in_full_environment(check=lambda: _demo_of_cluster(where))
    if asks:
        _ask_about_kubeconfig()
    return _cluster(where, embedded=False)


def _is_cluster_of_kubeconfig() -> bool:
    """Return True if KUBECONFIG names another cluster than the embedded one."""
    layout, files = embedded_layout(), environment_kubeconfig()
    return files.is_stated and Path(files.paths) != layout.kubeconfig


def _ask_about_kubeconfig() -> None:
    """Ask before anything is installed on a cluster that was named for other commands. Raises ConfigError where nobody can be asked."""
    from lockstep.kube.cluster import Client

    place = f"the cluster at {Client().server}, which KUBECONFIG names"
    ways = "unset KUBECONFIG to use a Kubernetes of this machine's own"
    confirm(
        f"This installs Lockstep's operator and a demo on {place} ({ways}). Go on?",
        f"quickstart would install Lockstep's operator and a demo on {place}, and nothing was done: {ways}, or confirm with --yes",
    )


def _why_not_embedded() -> str | None:
    """Return the reason why the embedded cluster is not used; None when it is."""
    if platform.system() != "Linux":
        return f"{platform.system()} has no network namespaces for an embedded cluster"
    if os.geteuid() != 0:
        return "The embedded cluster needs root"
    return None


def _here(where: TargetOptions, why: str = "--local was given") -> Stage:
    """Make a workspace of this machine for the demo."""
    in_full_environment()
    put(f"{why}: the job runs as two processes on this machine.", flush=True)
    root = made_state_folder() / QUICKSTART
    for name in ("workspace", "datasets"):
        (root / name).mkdir(parents=True, exist_ok=True)
    use(str(root))
    own = f"""\
  lockstep run -f {sample_file("trainingjob-zero3")} --cluster {root}
  lockstep quickstart                                  # as root on Linux: the same on a real Kubernetes
"""
    return Stage(TargetOptions(str(root), verb=where.verb), own)


def _hosts(where: TargetOptions) -> Stage:
    """Bring two hosts up on this machine, which are reached over ssh as machines of one's own are."""
    from lockstep.cli.clusters.devcluster import BED, bring_hosts_up

    with step("Bring up two hosts on this machine, each with a systemd, an sshd and a disk"):
        file = bring_hosts_up(HOSTS)
    named = str(from_here(write_state(BED, file.read_text(encoding="utf-8"))))
    use(named)
    return Stage(TargetOptions(named, verb=where.verb), "  lockstep devcluster down\n")


def _cluster(where: TargetOptions, *, embedded: bool) -> Stage:
    """Install the operator on the cluster that is meant, or on the embedded one, which is brought up."""
    from lockstep.cli.clusters.deploy import install_cluster
    from lockstep.cli.clusters.deploymentplan import Mode
    from lockstep.cli.clusters.devcluster import bring_up

    if embedded:
        with step("Bring up a two-node Kubernetes on this machine"):
            bring_up()
    namespace = _demo_of_cluster(where).namespace
    with step("Install the operator (lockstep deploy local --mode tcp)"):
        install_cluster(where.verb, CLUSTER, Mode.TCP)
    if embedded:
        use(CLUSTER)
    there = TargetOptions(CLUSTER, namespace=namespace, context=where.context, verb=where.verb)
    context = f" --context {shlex.quote(where.context)}" if where.context else ""
    own = f"""\
  lockstep run -f {sample_file("trainingjob-zero3")} -n {namespace}{context}
  export KUBECONFIG={where.connections.kubeconfig().paths}   # for kubectl
  kubectl get tj -n {namespace}
{"  lockstep devcluster down                     # remove the cluster" if embedded else ""}"""
    return Stage(there, own)


def _demo_of_cluster(where: TargetOptions) -> Inputs:
    """Return the sample job and its cluster. Raises ConfigError and Failed where that can't be reached, or has another job of this name."""
    from lockstep.kube.cluster import Client
    from lockstep.kube.jobs import get_job

    where.verb.unnamed = CLUSTER  # its file is that of any small cluster
    inputs = read_inputs(sample_file(), TargetOptions(CLUSTER, context=where.context, verb=where.verb))
    existing = get_job(Client(where.connections), inputs.namespace, inputs.job.metadata.name)
    if existing is not None:
        refuse_other_demo(inputs.job, existing)
    return inputs


def refuse_other_demo(sample: TrainingJob, existing: Object) -> None:
    """Refuse to replace a job `demo` that isn't quickstart's own: the sample, wherever it resumes from. Raises ConfigError."""
    from lockstep.plan.ahead.submission import differences

    name, namespace = existing["metadata"]["name"], existing["metadata"]["namespace"]
    if set(differences(sample, existing)) - {FRESH.partition("=")[0]}:
        raise ConfigError(
            f"namespace {namespace} has a job {name} that differs from {sample_file()}, and nothing was changed: give yours another name, "
            f"or delete it (lockstep delete {name} -n {namespace})"
        )


def train_and_show(stage: Stage) -> int:
    """Train the demo in a place, ask the base model and the adapter the same questions, and return the exit code."""
    where, sample, demo = stage.where, sample_file(), demo_folder()
    backend = backend_of(where.kind, where)

    def order(*changes: str) -> Order:
        inputs = read_inputs(sample, where, [f"cluster={load_cluster(where.named).cluster.name}", *changes])
        return Order(inputs.job, inputs.cluster, Typed(str(sample), (), changes))

    name = order().job.metadata.name
    with step("Copy the model and the chats to the job's volumes"):
        has_run = asyncio.run(_fill(backend.volumes_to_fill(name, order(), lambda line: None), demo, name))
    again = _is_begun_anew(backend, name, has_run=has_run)
    with step(f"Train{AGAIN if again else ''}: lockstep run -f {sample} {backend.words.again}{' --fresh' if again else ''}"):
        code = backend.run(order(*([FRESH] if again else ())))
    if code != 0:
        return code
    job = backend.job(name)
    with step(QUESTIONS):
        put_text(asyncio.run(answers(job)))
    commands = f"""\
  lockstep get {backend.words.again}
  lockstep logs {job.at}             # its log, also after the end
  lockstep chat {job.at}             # What does Mibo sell?
  lockstep adapter get {name} ./adapter {backend.words.again}
{stage.next}"""
    print_result(job.status["result"], commands, backend.words.where)
    return 0


async def _fill(volumes: Volumes, demo: Path, job: str) -> bool:
    """Put the demo's files on all volumes of its job. Return True if one has a run of it already."""
    return any(await asyncio.gather(*(send_demo(volume, demo, job) for volume in volumes.values())))


def _is_begun_anew(backend: Backend, name: str, *, has_run: bool) -> bool:
    """Return True if the demo is to train from the beginning. One that has ended is deleted; one that hasn't goes on as it was started."""
    job = next((job for job in backend.jobs() if job.name == name), None)
    if job is not None and not has_ended(job.status):
        return bool(((job.job["spec"].get("training") or {}).get("checkpoint") or {}).get("resumeFrom") == "None")
    if job is not None:
        job.delete()
    return has_run
