"""A job on a cluster before its start: what its files say of it, and what the API server, the nodes and the quota would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from lockstep.api.errors import ConfigError
from lockstep.api.names import DATASETS, WORKSPACE
from lockstep.api.objects import Object
from lockstep.kube.cluster import Cluster
from lockstep.plan.ahead import planned
from lockstep.plan.ahead.forecast import Forecast, capacity, forecast
from lockstep.plan.ahead.live import Comparison, compare
from lockstep.plan.ahead.slownetwork import measured_speed
from lockstep.plan.ahead.standin import is_stand_in
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.finding import Finding
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import image_doubt
from lockstep.plan.render.resolved import Resolved
from lockstep.platforms.clusters.facts import objects_seen, plan_facts
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.files.reader import reader, stateful_set_before_start
from lockstep.platforms.jobs.planfacts import known_facts
from lockstep.platforms.jobs.resolved import resolve_with_warnings
from lockstep.platforms.kubernetes.job import FILL_SECONDS
from lockstep.platforms.places.backends import Ahead
from lockstep.platforms.places.orders import Order, PlanWishes
from lockstep.platforms.places.values import NamedPlace, Say, Volume, Volumes
from lockstep_spec.choices import StorageMode


class KubernetesAhead(Ahead):
    """A job on a cluster that may not be there yet."""

    def doubts(self, resolved: Resolved) -> list[str]:
        """Return why the image may not be there. Raises ConfigError for a job that makes no valid objects."""
        render(resolved)
        doubt = None if is_stand_in(resolved) else image_doubt(resolved)
        return [f"image: {doubt}"] if doubt else []

    def plan(self, where: NamedPlace, order: Order, resolved: Resolved, wishes: PlanWishes) -> tuple[list[Finding], Forecast]:
        stated = known_facts(resolved, wishes.model_config, wishes.samples, wishes.tokens_per_second, offline=wishes.offline)
        samples = planned.samples(resolved, order.job)
        compared, facts = None, None
        if not (wishes.offline or is_stand_in(resolved)):
            try:
                compared, facts = asyncio.run(_look(resolved, samples, where.target().client.connected()))
            except ConfigError as error:
                raise ConfigError(f"{error}; or --offline, which plans by the files alone") from error
        size, source = capacity(resolved, () if facts is None else facts.list("Node").items)
        speed = measured_speed(order.cluster.calibration, order.cluster.pairs, resolved.transport.value)
        fix = "--on NODESxGPUSxCARD, such as --on 2x4xH100" if is_stand_in(resolved) and resolved.gpus_per_node else stated.capacity_fix
        estimate = forecast(resolved, replace(stated, capacity_bytes=size, capacity_source=source, capacity_fix=fix, speed=speed))
        first, *others = planned.all_findings(resolved, samples[1], compared, facts, estimate)
        return [first, *(wishes.hardware.refusals(resolved) if wishes.hardware is not None else ()), *others], estimate


def volumes_before_start(target: Target, order: Order, say: Say) -> Volumes:
    """Return the volumes of a job that its file describes. Raises ConfigError for those that are made with its pods."""
    job = resolve_with_warnings(order.job, order.cluster, target.namespace)
    if job.storage_mode is not StorageMode.SHARED:
        raise ConfigError(
            f"storage.mode of job {job.name} is {job.storage_mode.value}: each pod's volume is made with the pod, and each pod fetches"
            f" the model when the job starts; once it has: lockstep model get NAME --job {job.name}"
        )
    return {"node 0": _before_start(target, job, say)}


@asynccontextmanager
async def _before_start(target: Target, job: Resolved, say: Say) -> AsyncIterator[Volume]:
    async with target.client.connected() as cluster:
        stateful_set = await stateful_set_before_start(cluster, job)
        async with reader(cluster, stateful_set, seconds=FILL_SECONDS, secrets=True, say=say) as place:
            yield Volume(place, WORKSPACE, DATASETS)


async def _look(resolved: Resolved, samples: list[Object], connected: Cluster) -> tuple[list[Comparison] | None, ClusterFacts]:
    async with connected as cluster:
        objects = await objects_seen(cluster, resolved.name, resolved.namespace)
        return None if objects is None else compare(resolved, objects), await plan_facts(cluster, resolved, samples)
