"""Short runs on a cluster, of which only the result is wanted: preflight of a job, an all-reduce sweep, and the rates between all pairs of
nodes.

They are a job's own pods, and end when they have their result. The role `admin` in one namespace is enough; no operator is asked.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import replace
from posixpath import join

from lockstep.api import names
from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import Failed
from lockstep.api.job import TrainingJob
from lockstep.kube.cluster import Cluster
from lockstep.kube.exec import PodPlace
from lockstep.plan.cluster.pairs import PairsMeasured, Way
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.plan.render.run import with_preflight, without_ranks
from lockstep.platforms.clusters.facts import with_image
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.files.reader import running_pods
from lockstep.platforms.inpod import forget, source_of
from lockstep.platforms.jobs.netrates import measure_pairs
from lockstep.platforms.jobs.shortresults import LINES, Hear, Read, Short, ShortEnd, ShortRuns
from lockstep.platforms.kubernetes.alone import OWN, run_until
from lockstep.platforms.kubernetes.objects import Run, prepare
from lockstep.platforms.places.values import Say
from lockstep.programs import meanwhile, python_output
from lockstep_gang.contract.run import WhenDone, run_text
from lockstep_spec.choices import StorageMode

SUFFIX, MEASURED_SUFFIX = "-preflight", "-scaling"


def prepared(job: TrainingJob, profile: TrainingCluster, namespace: str) -> Run:
    """Prepare the job without its ranks. Beside a job that may run, under a name of its own; with volumes of its own for every pod under
    the job's name, since that is what its volumes are found by.
    """
    run = prepare(_beside(with_preflight(job), profile, namespace, SUFFIX), profile, namespace)
    run_json = without_ranks(run.frozen.parsed, join(names.WORKSPACE, "runs", job.metadata.name))
    # An agent that ends is started again by the kubelet, and one that has only just started doesn't hear that it is to go.
    return replace(run, frozen=replace(run.frozen, run=run_text(replace(run_json, when_done=WhenDone.WAIT))))


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
    run_json = replace(run.frozen.parsed, run_dir=folder, when_done=WhenDone.WAIT)
    return replace(run, frozen=replace(run.frozen, run=run_text(run_json)))


class PodRuns(ShortRuns):
    """Short runs in pods of a job. `say` gets lines that say what is waited for."""

    left = "the pods are removed"

    def __init__(self, target: Target, profile: TrainingCluster, say: Say, seconds: float | None) -> None:
        self._target, self._profile, self._namespace = target, profile, target.namespace
        self._say, self._seconds = say, seconds

    async def run(self, kind: Short, job: TrainingJob, hear: Hear, read: Read | None = None) -> ShortEnd:
        last: deque[str] = deque(maxlen=LINES)
        heard = asyncio.Event()

        def listen(line: str) -> None:
            if line.startswith(OWN):
                self._say(line)
                return
            last.append(line)
            if hear(line):
                heard.set()

        async with self._target.client.connected() as cluster:
            profile = await with_image(cluster, job, self._profile, self._namespace)
            run = {Short.PREFLIGHT: prepared, Short.STEPS: prepared_to_measure, Short.SWEEP: _prepared_to_sweep}[kind](
                job, profile, self._namespace
            )
            folder = run.frozen.parsed.run_dir

            async def leave() -> None:
                """Read what was measured, then remove it, also when the run is cut off."""
                places = await running_pods(cluster, self._namespace, run.name)
                if read is not None:
                    await read(places[0], folder)
                await asyncio.gather(*(python_output(place, source_of(forget), json.dumps({"root": folder})) for place in places.values()))

            await run_until(cluster, run, listen, heard, self._seconds, leave if kind is Short.STEPS else None)
        return ShortEnd(" | ".join(last), run.resolved.transport.value, run.resolved.nodes)

    async def pairs(self, job: TrainingJob, way: Way) -> PairsMeasured:
        done = asyncio.Event()

        async with self._target.client.connected() as cluster:
            profile = await with_image(cluster, job, self._profile, self._namespace)
            run = without_agents(_prepared_to_sweep(job, profile, self._namespace))

            async def measure() -> PairsMeasured:
                try:
                    places, nodes = await _all_pods(cluster, run)
                    return await measure_pairs(places, nodes, way, lambda line: self._say(f"{OWN} {line}"))
                finally:
                    done.set()

            async with meanwhile(measure()) as measuring:
                await run_until(cluster, run, self._say, done, self._seconds)
        if measuring.cancelled():
            raise Failed("the pods ended before all pairs were measured")
        return measuring.result()


def _prepared_to_sweep(job: TrainingJob, profile: TrainingCluster, namespace: str) -> Run:
    return without_claims(prepare(job, profile, namespace))


def without_claims(run: Run) -> Run:
    """Replace claims, which stay, by folders that end with the pods: nothing of a sweep is worth keeping."""
    template = json.loads(run.frozen.template)
    template["claims"] = []
    template["pod"]["spec"]["volumes"] += [{"name": name, "emptyDir": {}} for name in (names.WORKSPACE_VOLUME, names.DATASETS_VOLUME)]
    return replace(run, frozen=replace(run.frozen, template=json.dumps(template, sort_keys=True)))


PAIRS_POLL_SECONDS = 0.5
WAIT = ("python3", "-I", "-c", "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()")
"""Command of a pod that waits: as its first process it would not hear SIGTERM otherwise."""


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
