"""`lockstep quickstart`: from a bare machine to a fine-tuned adapter, on a real two-node Kubernetes or as processes."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.clusters.demo import AGAIN, GENERATE_SECONDS, SAMPLE, demo_folder, generate_command, print_result, sample_file, step
from lockstep.cli.shared.jobargs import TargetOptions, acts_on
from lockstep.cli.shared.terminal import confirm
from lockstep.platforms.local.environment import in_full_environment
from lockstep.platforms.output import put, tell

if TYPE_CHECKING:
    from lockstep.cli.shared.inputs import Inputs
    from lockstep.kube.cluster import Cluster
    from lockstep.kube.exec import PodPlace
    from lockstep.plan.render.resolved import Resolved

CLUSTER = "local"
EXISTS = "import os, sys; print(os.path.exists(sys.argv[1]))"
FINISHED_TIMEOUT_SECONDS = 900.0
POD_RESOURCES = {"requests": {"cpu": "100m", "memory": "256Mi"}}
"""Resources of the pod beside the job. No limits: it loads the model for the sample, too."""


@acts_on("context", "local")
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
    started, local, context = time.monotonic(), where.local, where.context
    if hosts and (local or context):
        raise ConfigError("--hosts, --local and --context each say where to run: use one of them")
    is_other = _is_cluster_of_kubeconfig()
    own_cluster = context is not None or is_other or (bool(os.environ.get("KUBECONFIG")) and os.geteuid() != 0)
    why_local = None if own_cluster and not local else _why_local(local)
    asks = is_other and not (context or hosts or local or yes)
    if not hosts and (own_cluster or why_local):  # (the others first look whether this machine can do it)
        if asks and not sys.stdin.isatty():
            _ask_about_kubeconfig()
        in_full_environment(check=lambda: why_local or _demo_of_cluster(where))
    if asks:
        _ask_about_kubeconfig()
    if hosts:
        from lockstep.cli.clusters.quickstarthosts import run_on_bed

        code = run_on_bed(where.verb)
    elif why_local:
        put(f"{why_local}: the job runs as two processes on this machine.", flush=True)
        code = _run_local()
    else:
        code = _run_on_cluster(where, embedded=not own_cluster)
    put(f"quickstart took {time.monotonic() - started:.0f} s", flush=True)
    raise typer.Exit(code)


def _is_cluster_of_kubeconfig() -> bool:
    """Return True if KUBECONFIG names another cluster than the embedded one."""
    from lockstep.cli.shared.embedded import embedded_layout
    from lockstep.kube.aim import environment_kubeconfig

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


def _why_local(is_asked: bool) -> str | None:
    """Reason why the embedded cluster is not used; None when it is."""
    if is_asked:
        return "--local was given"
    if platform.system() != "Linux":
        return f"{platform.system()} has no network namespaces for an embedded cluster"
    if os.geteuid() != 0:
        return "The embedded cluster needs root"
    return None


def _run_local() -> int:
    from lockstep.api.objects import Typed
    from lockstep.cli.shared.clusterfiles import use
    from lockstep.cli.shared.folders import QUICKSTART, made_state_folder
    from lockstep.platforms.local.run import run_local
    from lockstep.platforms.places.backend import Order

    demo = demo_folder()
    root = made_state_folder() / QUICKSTART
    for name, target in (("workspace/models", demo / "models"), ("datasets", demo / "datasets")):
        link = root / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    again = (root / "workspace" / "runs" / "demo").exists()
    inputs = _demo_inputs(TargetOptions(CLUSTER), again)
    job = inputs.job
    with step(f"Train{AGAIN if again else ''}: lockstep run -f {sample_file()} --local --workspace {root}{' --fresh' if again else ''}"):
        code = run_local(Order(job, inputs.cluster, Typed("")), root)
    if code != 0:
        return code
    end = json.loads((root / "workspace" / "runs" / job.metadata.name / "gang" / "end.json").read_text())
    with step(SAMPLE):
        command = generate_command(str(demo / "models" / "tiny-base"), end["result"]["adapter"])
        subprocess.run([sys.executable, *command[1:]], check=True)
    use(str(root))
    commands = f"""\
  lockstep logs demo --local --workspace {root}        # the log, also after the end
  lockstep run -f {sample_file("trainingjob-zero3")} --local --workspace {root}
  lockstep quickstart                                  # as root on Linux: the same on a real Kubernetes
"""
    print_result(end["result"], commands)
    return 0


def _run_on_cluster(where: TargetOptions, embedded: bool) -> int:
    from lockstep.cli.clusters.deploy import install_cluster
    from lockstep.cli.clusters.deploymentplan import Mode
    from lockstep.cli.clusters.devcluster import bring_up
    from lockstep.cli.shared.clusterfiles import use
    from lockstep.plan.render.resolve import resolve
    from lockstep.plan.render.resolved import PlatformDefaults

    if embedded:
        with step("Bring up a two-node Kubernetes on this machine"):
            bring_up()
    inputs = _demo_of_cluster(where)
    demo = demo_folder()
    with step("Install the operator (lockstep deploy local --mode tcp)"):
        namespace = install_cluster(where.verb, CLUSTER, Mode.TCP).cluster.cluster.namespace
    if embedded:
        use(CLUSTER)
    resolved = resolve(inputs.job, inputs.cluster.profile, PlatformDefaults(namespace=namespace))
    return asyncio.run(_train_and_show(where, resolved, demo, embedded=embedded))


def _demo_of_cluster(where: TargetOptions) -> Inputs:
    """Return the sample job and its cluster. Raises ConfigError and Failed where that can't be reached, or has another job of this name."""
    from lockstep.kube.cluster import Client
    from lockstep.kube.jobs import get_job

    where.verb.unnamed = CLUSTER  # its file is that of any small cluster
    inputs = _demo_inputs(TargetOptions(CLUSTER, context=where.context, verb=where.verb), again=False)
    existing = get_job(Client(where.connections), inputs.namespace, inputs.job.metadata.name)
    if existing is not None:
        refuse_other_demo(existing)
    return inputs


def _demo_inputs(where: TargetOptions, again: bool) -> Inputs:
    """The sample job and its cluster; where a run of it is there already, `again`, with what makes it train from the beginning."""
    from lockstep.api.names import FRESH
    from lockstep.cli.shared.inputs import read_inputs

    return read_inputs(sample_file(), where, [FRESH] if again else [])


def demo_document(namespace: str, again: bool) -> dict[str, Any]:
    """Object that `kubectl apply -f` of the sample creates, with the annotation that a later `kubectl apply` compares with."""
    import yaml

    from lockstep.kube.jobs import with_last_applied

    document: dict[str, Any] = yaml.safe_load(sample_file().read_text(encoding="utf-8"))
    document["metadata"] |= {"namespace": namespace}
    if again:
        document["spec"]["training"]["checkpoint"]["resumeFrom"] = "None"
    return with_last_applied(document)


def is_demo(existing: dict[str, Any]) -> bool:
    """Return True if the job is as quickstart makes it: the sample's spec, wherever it resumes from."""
    from lockstep.api.job import TrainingJob

    sample, current = (
        TrainingJob.model_validate({"metadata": {"name": "demo"}, "spec": job["spec"]})
        for job in (demo_document("any", again=True), existing)
    )
    training = current.spec.training
    if training is None:
        return False
    fresh = training.model_copy(update={"checkpoint": training.checkpoint.model_copy(update={"resume_from": "None"})})
    return current.spec.model_copy(update={"training": fresh}) == sample.spec


def refuse_other_demo(existing: dict[str, Any]) -> None:
    """Refuse to replace a job `demo` that isn't quickstart's own. Raises ConfigError."""
    name, namespace = existing["metadata"]["name"], existing["metadata"]["namespace"]
    if not is_demo(existing):
        raise ConfigError(
            f"namespace {namespace} has a job {name} that differs from {sample_file()}, and nothing was changed: give yours another name, "
            f"or delete it (lockstep delete {name} -n {namespace})"
        )


async def send_demo(place: PodPlace, demo: Path) -> None:
    """Copy the model and the texts onto the volumes that the container mounts. Raises Failed."""
    from lockstep.platforms.files.reader import place_roots
    from lockstep.platforms.files.transfer import TransferProgress, put

    roots = await place_roots(place, writing=True)
    await put(place, demo / "models", "/workspace/models", roots, TransferProgress())
    await put(place, demo / "datasets", "/datasets", roots, TransferProgress())


async def _train_and_show(where: TargetOptions, resolved: Resolved, demo: Path, *, embedded: bool) -> int:
    from lockstep.api.objects import is_true
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.files.reader import reader, stateful_set_before_start
    from lockstep.programs import output_of

    job, namespace = resolved.job, resolved.namespace
    async with await Cluster.connect(where.connections) as cluster:
        stateful_set = await stateful_set_before_start(cluster, resolved)
        async with reader(cluster, stateful_set, resources=POD_RESOURCES) as pod:
            with step("Copy the model and the texts to the cluster's volumes"):
                await send_demo(pod, demo)
            status = await _train(cluster, pod, job.metadata.name)
            result = status.get("result") or {}
            if not is_true(status, "Complete"):
                for condition in status.get("conditions", []):
                    if condition["type"] in ("Accepted", "PodsScheduled", "Progressing", "Failed"):
                        tell(f"{condition['type']} {condition['status']}: {condition['reason']}: {condition['message']}")
                tell(f"See: kubectl describe tj {job.metadata.name} -n {namespace}")
                return 1
            with step(SAMPLE):
                command = generate_command(job.spec.training.model.name if job.spec.training else "", result["adapter"])
                sample = await output_of(pod, command, seconds=GENERATE_SECONDS)
                put(*sample.decode(errors="replace").splitlines())
    commands = _next_commands(where, namespace, job.metadata.name, embedded=embedded)
    print_result(result, commands, f" (on claim {resolved.profile.spec.storage.workspace_claim} of namespace {namespace})")
    return 0


async def _train(cluster: Cluster, pod: PodPlace, name: str) -> dict[str, Any]:
    """Send the job, follow its log, and return its last status. One of an interrupted quickstart that still runs is followed as it is."""
    from lockstep.api.objects import has_ended
    from lockstep.kube.jobs import delete_job
    from lockstep.programs import output_of

    namespace = pod.namespace
    logs = f"kubectl logs -n {namespace} -f {name}-0"
    existing = await cluster.get("TrainingJob", namespace, name)
    if existing is not None:
        refuse_other_demo(existing)
        if not has_ended(existing.get("status", {})):
            with step(f"Train: {name} runs already: {logs}"):
                return await _follow(cluster, namespace, name)
    again = (await output_of(pod, ["python3", "-c", EXISTS, f"/workspace/runs/{name}"])).strip() == b"True"
    how = f"{sample_file()} with training.checkpoint.resumeFrom=None" if again else f"kubectl apply -n {namespace} -f {sample_file()}"
    with step(f"Train{AGAIN if again else ''}: {how}; {logs}"):
        await delete_job(cluster, namespace, name)
        await cluster.create(demo_document(namespace, again))
        return await _follow(cluster, namespace, name)


async def _follow(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    """Print the job's log until the job has ended or goes nowhere by itself, and return its last status. Raises JobGone."""
    from lockstep.api.objects import current_status, has_ended
    from lockstep.plan.ahead.submission import standstill
    from lockstep.plan.pages.logs import LogSelection
    from lockstep.platforms.jobs.logs import follow
    from lockstep.platforms.places.backend import JobGone

    deadline = time.monotonic() + FINISHED_TIMEOUT_SECONDS
    status: dict[str, Any] = {}

    async def over() -> bool:
        nonlocal status
        if (job := await cluster.get("TrainingJob", namespace, name)) is None:
            raise JobGone.of(name)
        status = current_status(job)
        return has_ended(status) or standstill(status) != "" or time.monotonic() > deadline

    async for line in follow(cluster, namespace, name, LogSelection(), over):
        put(f"    {line}", flush=True)
    return status


def _next_commands(where: TargetOptions, namespace: str, name: str, *, embedded: bool) -> str:
    place = f"-n {namespace}" + (f" --context {shlex.quote(where.context)}" if where.context else "")
    return f"""\
  lockstep get {place}                   # your jobs
  lockstep logs {name} {place}             # its log, also after the end
  lockstep adapter get {name} ./adapter {place}
  lockstep run -f {sample_file("trainingjob-zero3")} {place}
  export KUBECONFIG={where.connections.kubeconfig().paths}   # for kubectl
{"  lockstep devcluster down                     # remove the cluster" if embedded else ""}"""
