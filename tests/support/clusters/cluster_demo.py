"""The demo's model and texts on the volumes of a namespace, for tests that train on real pods."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from lockstep.api.job import TrainingJob
from lockstep.api.names import DATASETS, WORKSPACE
from lockstep.cli.clusters.demo import demo_folder, send_demo
from lockstep.cli.shared.clusterfiles import load_cluster
from lockstep.kube.cluster import Client, Cluster
from lockstep.kube.exec import PodPlace
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.platforms.files.reader import reader, stateful_set_before_start
from lockstep.platforms.places.values import Volume
from lockstep.programs import output_of
from support.clusters.cluster_jobs import Jobs

T = TypeVar("T")
POD_RESOURCES = {"requests": {"cpu": "100m", "memory": "256Mi"}}
"""Resources of the pod: no limits, since tests load models in it."""


def resolved_job(jobs: Jobs, name: str, spec: dict[str, Any]) -> Resolved:
    """A job of `spec` in the namespace of `jobs`."""
    job = TrainingJob.model_validate({"metadata": {"name": name}, "spec": spec})
    return resolve(job, load_cluster("local").profile, PlatformDefaults(namespace=jobs.namespace))


@contextmanager
def demo_pod(resolved: Resolved) -> Iterator[PodPlace]:
    """A pod on the claims that the job mounts, with the demo's files on them, until the end of the block."""
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever, daemon=True)  # the pod expires where nothing of it runs
    thread.start()
    demo = demo_folder()

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    async def started() -> PodPlace:
        cluster = await stack.enter_async_context(await Cluster.connect())
        stateful_set = await stateful_set_before_start(cluster, resolved)
        place = await stack.enter_async_context(reader(cluster, stateful_set, resources=POD_RESOURCES))
        await send_demo(nullcontext(Volume(place, WORKSPACE, DATASETS)), demo, resolved.name)
        return place

    try:
        yield run(started())
    finally:
        run(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def demo_files(jobs: Jobs, spec: dict[str, Any]) -> Iterator[PodPlace]:
    """A pod that has them, on the claims that a job of `spec` mounts, until the end of the block."""
    with demo_pod(resolved_job(jobs, "files", spec)) as pod:
        yield pod


def run_in_pod(place: PodPlace, command: list[str]) -> str:
    """Output of the command there. Raises ProgramFailed."""
    return Client().run(lambda cluster: output_of(replace(place, cluster=cluster), command, seconds=600.0)).decode(errors="replace")
