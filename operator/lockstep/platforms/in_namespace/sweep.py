"""An all-reduce sweep on a cluster: a job's pods for a minute, with no claim. The role `admin` in one namespace is enough; no operator is asked."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError, Failed
from lockstep.api.job import TrainingJob
from lockstep.api.names import DATASETS_VOLUME, WORKSPACE_VOLUME
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.plan.cluster.calibration import Point, is_done, point_in
from lockstep.platforms.clusters.facts import with_image
from lockstep.platforms.in_namespace.objects import Run, prepare
from lockstep.platforms.in_namespace.run import OWN, TimeLimit, run_until

LAST_LINES = 6
POINTS_MAX = 1000
Hear = Callable[[Point | str], None]


@dataclass(frozen=True)
class Sweep:
    """Points that were measured, and over what."""

    points: tuple[Point, ...]
    transport: str
    nodes: int


def sweep_on_cluster(
    job: TrainingJob, profile: TrainingCluster, namespace: str, context: str | None, hear: Hear, limit: TimeLimit
) -> Sweep:
    """Measure.

    `hear` gets every point, and lines that say what is waited for. Raises ConfigError when it can't start, Failed when it ended without a result.
    """
    return asyncio.run(_sweep(job, profile, namespace, context, hear, limit))


def without_claims(run: Run) -> Run:
    """Replace claims, which stay, by folders that end with the pods: nothing of a sweep is worth keeping."""
    template = json.loads(run.frozen.template)
    template["claims"] = []
    template["pod"]["spec"]["volumes"] += [{"name": name, "emptyDir": {}} for name in (WORKSPACE_VOLUME, DATASETS_VOLUME)]
    return replace(run, frozen=replace(run.frozen, template=json.dumps(template, sort_keys=True)))


async def _sweep(job: TrainingJob, profile: TrainingCluster, namespace: str, context: str | None, hear: Hear, limit: TimeLimit) -> Sweep:
    points: list[Point] = []
    last: deque[str] = deque(maxlen=LAST_LINES)
    done = asyncio.Event()

    def listen(line: str) -> None:
        point = point_in(line)
        if point is not None and len(points) < POINTS_MAX:
            points.append(point)
            hear(point)
        elif is_done(line):
            done.set()
        elif not line.startswith(OWN):
            last.append(line)
        else:
            hear(line)

    async with await Cluster.connect(context) as cluster:
        run = without_claims(prepare(job, await with_image(cluster, job, profile, namespace), namespace))
        try:
            await run_until(cluster, run, listen, done, limit)
        except ApiError as error:
            raise ConfigError(f"the API server refused an object of the sweep: {error.message}") from None
    if not done.is_set():
        raise Failed("the sweep ended before its last size; the log of node 0 ends with: " + " | ".join(last))
    return Sweep(tuple(points), run.resolved.transport.value, run.resolved.nodes)
