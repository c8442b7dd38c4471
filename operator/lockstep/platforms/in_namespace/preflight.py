"""Preflight of a job on a cluster: the job's own pods, which end when it has. The role `admin` in one namespace is enough."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from posixpath import join

from lockstep.api import names
from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError, Failed
from lockstep.api.job import TrainingJob
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.plan.render.run import result_in, with_preflight, without_ranks
from lockstep.platforms.clusters.facts import with_image
from lockstep.platforms.in_namespace.objects import Run, prepare
from lockstep.platforms.in_namespace.run import OWN, TimeLimit, run_until
from lockstep_gang.contract.preflight import PreflightReport
from lockstep_gang.contract.run import WhenDone, parse_run, run_text
from lockstep_spec.choices import StorageMode

SUFFIX = "-preflight"
LAST_LINES = 5
Say = Callable[[str], None]


def preflight_on_cluster(
    job: TrainingJob, profile: TrainingCluster, namespace: str, context: str | None, say: Say, limit: TimeLimit
) -> PreflightReport:
    """Run preflight. `say` gets lines that say what is waited for. Raises ConfigError when the job can't start, Failed without a result in time."""
    return asyncio.run(_preflight(job, profile, namespace, context, say, limit))


def prepared(job: TrainingJob, profile: TrainingCluster, namespace: str) -> Run:
    """Prepare the job without its ranks. Beside a job that may run, under a name of its own; with volumes of its own for every pod under the
    job's name, since that is what its volumes are found by."""
    checked = with_preflight(job)
    if resolve(checked, profile, PlatformDefaults(namespace=namespace)).storage_mode is StorageMode.SHARED:
        name = f"{job.metadata.name[: names.JOB_NAME_MAX - len(SUFFIX)].rstrip('-')}{SUFFIX}"
        checked = checked.model_copy(update={"metadata": checked.metadata.model_copy(update={"name": name})})
    run = prepare(checked, profile, namespace)
    ending = without_ranks(parse_run(run.frozen.run), join(names.WORKSPACE, "runs", job.metadata.name))
    # An agent that ends is started again by the kubelet, and one that has only just started doesn't hear that it is to go.
    waiting = replace(ending, when_done=WhenDone.WAIT)
    return replace(run, frozen=replace(run.frozen, run=run_text(waiting)))


async def _preflight(
    job: TrainingJob, profile: TrainingCluster, namespace: str, context: str | None, say: Say, limit: TimeLimit
) -> PreflightReport:
    lines: deque[str] = deque(maxlen=LAST_LINES)
    results: list[PreflightReport] = []
    heard = asyncio.Event()

    def hear(line: str) -> None:
        lines.append(line)
        if not results and (result := result_in(line)) is not None:
            results.append(result)
            heard.set()
        elif line.startswith(OWN):
            say(line)

    async with await Cluster.connect(context) as cluster:
        run = prepared(job, await with_image(cluster, job, profile, namespace), namespace)
        try:
            await run_until(cluster, run, hear, heard, limit)
        except ApiError as error:
            raise ConfigError(f"the API server refused an object of the preflight: {error.message}") from None
    if not results:
        raise Failed("preflight ended without a result; the log of node 0 ends with: " + " | ".join(lines))
    return results[0]
