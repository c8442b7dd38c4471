"""Short runs on a cluster, of which only the result is wanted: preflight of a job, an all-reduce sweep, and the rates between all pairs of
nodes.

They are a job's own pods, and end when they have their result. The role `admin` in one namespace is enough; no operator is asked.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from posixpath import join

from lockstep.api import names
from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError, Failed
from lockstep.api.job import TrainingJob
from lockstep.api.objects import Object
from lockstep.kube.aim import Connections
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.exec import PodPlace
from lockstep.plan.cluster.calibration import Point, Sweep
from lockstep.plan.cluster.pairs import PairsMeasured, Way
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.plan.render.run import with_preflight, without_ranks
from lockstep.platforms.clusters.facts import with_image
from lockstep.platforms.files.reader import running_pods
from lockstep.platforms.in_namespace.objects import Run, prepare
from lockstep.platforms.in_namespace.run import OWN, Leave, Say, TimeLimit, run_until
from lockstep.platforms.inpod import forget, source_of
from lockstep.platforms.jobs.netrates import measure_pairs
from lockstep.platforms.jobs.runs import summary
from lockstep.platforms.jobs.shortresults import LINES, PreflightResult, RunEnd, SweepResult
from lockstep.programs import meanwhile, python_output
from lockstep_gang.contract.preflight import PreflightReport
from lockstep_gang.contract.run import WhenDone, parse_run, run_text
from lockstep_spec.choices import StorageMode

SUFFIX, MEASURED_SUFFIX = "-preflight", "-scaling"
Hear = Callable[[Point | str], None]


def prepared(job: TrainingJob, profile: TrainingCluster, namespace: str) -> Run:
    """Prepare the job without its ranks. Beside a job that may run, under a name of its own; with volumes of its own for every pod under
    the job's name, since that is what its volumes are found by.
    """
    run = prepare(_beside(with_preflight(job), profile, namespace, SUFFIX), profile, namespace)
    ending = without_ranks(parse_run(run.frozen.run), join(names.WORKSPACE, "runs", job.metadata.name))
    # An agent that ends is started again by the kubelet, and one that has only just started doesn't hear that it is to go.
    waiting = replace(ending, when_done=WhenDone.WAIT)
    return replace(run, frozen=replace(run.frozen, run=run_text(waiting)))


def _beside(job: TrainingJob, profile: TrainingCluster, namespace: str, suffix: str) -> TrainingJob:
    """The job under a name of its own where that finds the same volumes."""
    if resolve(job, profile, PlatformDefaults(namespace=namespace)).storage_mode is not StorageMode.SHARED:
        return job
    name = f"{job.metadata.name[: names.JOB_NAME_MAX - len(suffix)].rstrip('-')}{suffix}"
    return job.model_copy(update={"metadata": job.metadata.model_copy(update={"name": name})})


def prepared_to_measure(job: TrainingJob, profile: TrainingCluster, namespace: str) -> Run:
    """Prepare the job with its volumes and a folder that no job has. Agents idle at the end, so that the folder can be read and removed."""
    run = prepare(_beside(job, profile, namespace, MEASURED_SUFFIX), profile, namespace)
    folder = join(names.WORKSPACE, "runs", f".measured-{job.metadata.name}")
    return replace(
        run, frozen=replace(run.frozen, run=run_text(replace(parse_run(run.frozen.run), run_dir=folder, when_done=WhenDone.WAIT)))
    )


async def measured_on_cluster(
    job: TrainingJob, profile: TrainingCluster, namespace: str, connections: Connections, say: Say, limit: TimeLimit, values: Sequence[str]
) -> tuple[dict[str, Object], str]:
    """Run the job, and remove all of it but claims. Return these `values` of each step, and why it failed, or ''.

    Raises ConfigError when it can't start, Failed without an end in time.
    """
    end = RunEnd()
    steps: dict[str, Object] = {}

    async def leave() -> None:
        """Read what was measured, then remove it, also when the run is cut off."""
        places = await running_pods(cluster, namespace, run.name)
        if end.problem == "":
            steps.update((await summary(places[0], run.name, root=folder, values=values))["steps"])
        await asyncio.gather(*(python_output(place, source_of(forget), json.dumps({"root": folder})) for place in places.values()))

    async with await Cluster.connect(connections) as cluster:
        run = prepared_to_measure(job, await with_image(cluster, job, profile, namespace), namespace)
        folder = parse_run(run.frozen.run).run_dir
        return steps, end.after(await _last_lines(cluster, run, end.hear, say, limit, "measurement", leave))


async def preflight_on_cluster(
    job: TrainingJob, profile: TrainingCluster, namespace: str, connections: Connections, say: Say, limit: TimeLimit
) -> PreflightReport:
    """Run preflight. `say` gets lines that say what is waited for. Raises ConfigError when the job can't start, Failed without a result in
    time.
    """
    result = PreflightResult()
    async with await Cluster.connect(connections) as cluster:
        run = prepared(job, await with_image(cluster, job, profile, namespace), namespace)
        return result.after(await _last_lines(cluster, run, result.hear, say, limit, "preflight"))


def without_claims(run: Run) -> Run:
    """Replace claims, which stay, by folders that end with the pods: nothing of a sweep is worth keeping."""
    template = json.loads(run.frozen.template)
    template["claims"] = []
    template["pod"]["spec"]["volumes"] += [{"name": name, "emptyDir": {}} for name in (names.WORKSPACE_VOLUME, names.DATASETS_VOLUME)]
    return replace(run, frozen=replace(run.frozen, template=json.dumps(template, sort_keys=True)))


async def sweep_on_cluster(
    job: TrainingJob, profile: TrainingCluster, namespace: str, connections: Connections, hear: Hear, limit: TimeLimit
) -> Sweep:
    """Measure.

    `hear` gets every point, and lines that say what is waited for. Raises ConfigError when it can't start, Failed when it ended without a
    result.
    """
    result = SweepResult(hear)
    async with await Cluster.connect(connections) as cluster:
        run = without_claims(prepare(job, await with_image(cluster, job, profile, namespace), namespace))
        last = await _last_lines(cluster, run, result.hear, hear, limit, "sweep")
    return result.after(last, run.resolved.transport.value, run.resolved.nodes)


PAIRS_POLL_SECONDS = 0.5
WAIT = ("python3", "-I", "-c", "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()")
"""Command of a pod that waits: as its first process it would not hear SIGTERM otherwise."""


async def pairs_on_cluster(
    job: TrainingJob, profile: TrainingCluster, namespace: str, connections: Connections, way: Way, say: Say, limit: TimeLimit
) -> PairsMeasured:
    """Measure all pairs of nodes, in pods of a job. Raises ConfigError when it can't start or be measured so, Failed without a result in
    time.
    """
    done = asyncio.Event()

    async with await Cluster.connect(connections) as cluster:
        run = without_agents(without_claims(prepare(job, await with_image(cluster, job, profile, namespace), namespace)))

        async def measure() -> PairsMeasured:
            try:
                places, nodes = await _all_pods(cluster, run)
                return await measure_pairs(places, nodes, way, lambda line: say(f"{OWN} {line}"))
            finally:
                done.set()

        async with meanwhile(measure()) as measuring:
            await _run_until(cluster, run, say, done, limit, "measurement")
    if measuring.cancelled():
        raise Failed("the pods ended before all pairs were measured")
    return measuring.result()


def without_agents(run: Run) -> Run:
    """Let the pods wait until they are removed: programs are started in them, and no rank."""
    template = json.loads(run.frozen.template)
    for container in template["pod"]["spec"]["containers"]:
        container["command"] = list(WAIT)
    return replace(run, frozen=replace(run.frozen, template=json.dumps(template, sort_keys=True)))


async def _all_pods(cluster: Cluster, run: Run) -> tuple[dict[int, PodPlace], dict[int, str]]:
    """Wait until all pods run. Return their places, and the names of the cluster's nodes that they are on."""
    while len(places := await running_pods(cluster, run.namespace, run.name)) < run.frozen.nodes:  # noqa: ASYNC110 (nothing here tells of it)
        await asyncio.sleep(PAIRS_POLL_SECONDS)
    pods = (await cluster.list("Pod", run.namespace, {"labelSelector": f"{names.LABEL_JOB}={run.name}"}))["items"]
    homes = {str(pod["metadata"]["name"]): str(pod["spec"].get("nodeName") or pod["metadata"]["name"]) for pod in pods}
    return places, {node: homes.get(place.pod, place.pod) for node, place in places.items()}


async def _run_until(
    cluster: Cluster, run: Run, hear: Say, heard: asyncio.Event, limit: TimeLimit, what: str, leave: Leave | None = None
) -> None:
    try:
        await run_until(cluster, run, hear, heard, limit, leave)
    except ApiError as error:
        raise ConfigError(f"the API server refused an object of the {what}: {error.message}") from None


async def _last_lines(
    cluster: Cluster, run: Run, hear: Callable[[str], bool], say: Say, limit: TimeLimit, what: str, leave: Leave | None = None
) -> str:
    """Run until `hear` says of a line of node 0 that it was the last one that matters, and return its last lines. `say` gets the command's
    own.
    """
    last: deque[str] = deque(maxlen=LINES)
    heard = asyncio.Event()

    def listen(line: str) -> None:
        if line.startswith(OWN):
            say(line)
            return
        last.append(line)
        if hear(line):
            heard.set()

    await _run_until(cluster, run, listen, heard, limit, what, leave)
    return " | ".join(last)
