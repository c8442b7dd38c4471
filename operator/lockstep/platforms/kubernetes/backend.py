"""Jobs in a namespace of a cluster, whose API server keeps them and whose operator writes their status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from lockstep.api.errors import ConfigError
from lockstep.api.names import KUBERNETES
from lockstep.api.objects import Object, is_run
from lockstep.kube.cluster import FORBIDDEN, ApiError
from lockstep.kube.jobs import get_job, list_jobs, runs_without_operator
from lockstep.kube.threads import in_thread
from lockstep.plan.pages.table import is_open, marked
from lockstep.platforms.jobs.observe import operator_unheard
from lockstep.platforms.kubernetes.job import KubernetesJob, looks_of_job, seen_runs, words_in
from lockstep.platforms.output import tell
from lockstep.platforms.places.backend import Backend, Job
from lockstep.platforms.places.orders import Order
from lockstep.platforms.places.values import NamedPlace, Say, Stale, Volumes
from lockstep_spec.words import listed

if TYPE_CHECKING:
    from lockstep.api.cluster import TrainingCluster
    from lockstep.platforms.clusters.target import Target
    from lockstep.platforms.files.copies import Copy, CopyWish
    from lockstep.platforms.files.sending import Sending
    from lockstep.platforms.jobs.looks import Looks
    from lockstep.platforms.jobs.shortresults import ShortRuns


class KubernetesBackend(Backend):
    """A namespace of a cluster."""

    kind = KUBERNETES
    has_operator = True
    has_namespaces = True

    @classmethod
    def at(cls, where: NamedPlace) -> Self:
        return cls(where.target())

    def __init__(self, target: Target) -> None:
        self.target, self.words = target, words_in(target.namespace, target.options)

    def run(self, order: Order) -> int:
        from lockstep.platforms.kubernetes.submit import run_on_cluster

        return run_on_cluster(order, self.target, self)

    def short_runs(self, profile: TrainingCluster, seconds: int | None) -> ShortRuns:
        from lockstep.platforms.kubernetes.shortruns import PodRuns

        return PodRuns(self.target, profile, tell, seconds)

    def looks(self, job: str | None, interval: float, *, live: bool) -> Looks:
        return looks_of_all(self, interval) if job is None else looks_of_job(self.job(job), interval, live=live)

    async def copy(self, copy: Copy, wish: CopyWish) -> bool:
        from lockstep.platforms.kubernetes.files import copy_in_pods

        return await copy_in_pods(copy, self.target, wish)

    async def sync(self, sending: Sending) -> bool:
        from lockstep.platforms.kubernetes.files import sync

        return await sync(self.target, sending)

    def volumes_to_fill(self, name: str, order: Order | None, say: Say) -> Volumes:
        from lockstep.platforms.kubernetes.ahead import volumes_before_start

        if order is None or self.target.client.run(lambda cluster: cluster.get("StatefulSet", self.target.namespace, name)) is not None:
            return super().volumes_to_fill(name, order, say)
        return volumes_before_start(self.target, order, say)

    def jobs(self, *, everywhere: bool = False, selector: str | None = None) -> list[Job]:
        jobs = list_jobs(self.target.client, None if everywhere else self.target.namespace, selector)
        runs = [run for run in seen_runs(self.target, [job for job in jobs if is_run(job)]) if run["status"].get("conditions")]
        return [KubernetesJob(self.target, job, self) for job in (*(job for job in jobs if not is_run(job)), *runs)]

    def job(self, name: str) -> KubernetesJob:
        """Return the job of this name, or the run of --in-namespace. Raises ConfigError, naming the jobs that are there, when there is
        none.
        """
        client, namespace = self.target.client, self.target.namespace
        job, refusal = None, None
        try:
            job = get_job(client, namespace, name)
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            refusal = error
        job = job or next(iter(runs_without_operator(client, namespace, name)), None)
        if job is None:
            raise refusal or ConfigError(no_such_job(self.target, name))
        return KubernetesJob(self.target, job, self).seen()

    def default_nodes(self, job: Object) -> int | None:
        """Return the cluster file's number, if the job is of that cluster."""
        of_file = self.target.files.default_nodes(self.target.cluster)
        if of_file is None:
            return None
        named = ((job.get("status") or {}).get("cluster") or {}).get("name") or job["spec"].get("cluster")
        name, nodes = of_file
        return nodes if named in (None, name) else None

    def current(self, jobs: Sequence[Job]) -> tuple[list[Object], Stale | None]:
        objects = [job.job for job in jobs]
        namespace = self.target.namespace
        unheard = self.target.client.run(lambda cluster: operator_unheard(cluster, namespace)) if any(map(is_open, objects)) else None
        stale = None if unheard is None else Stale(unheard.since, unheard.text(time.time()))
        return [marked(job, unheard, time.time()) for job in objects], stale


def no_such_job(target: Target, name: str) -> str:
    """Explain a job that isn't there. A namespace that has one of this name is named, as far as you may look."""
    here = [str(job["metadata"]["name"]) for job in list_jobs(target.client, target.namespace)]
    try:
        every = list_jobs(target.client, None)
    except ApiError:  # (few may list the jobs of all namespaces)
        every = []
    places = sorted(
        {str(job["metadata"].get("namespace", "")) for job in every if job["metadata"]["name"] == name} - {"", target.namespace}
    )
    if not places:
        return words_in(target.namespace).no_such_job(name, here)
    has = f"namespace {places[0]} has one" if len(places) == 1 else f"namespaces {listed(places)} have one"
    return f"there is no TrainingJob {name} in namespace {target.namespace}, but {has}: add -n {places[0]}"


async def looks_of_all(backend: KubernetesBackend, interval: float) -> Looks:
    from lockstep.plan.pages.top import overview, snapshot
    from lockstep.platforms.jobs.looks import Look, with_age

    place = backend.target.namespace
    async with backend.target.client.connected() as connection:
        while True:
            jobs = [job.job for job in await in_thread(backend.jobs)]
            unheard = await operator_unheard(connection, place) if any(map(is_open, jobs)) else None
            lines = list(overview(jobs)) if jobs else [f"there is no TrainingJob in namespace {place}"]
            page = with_age({"jobs": [snapshot(job, (), {}) for job in jobs]}, unheard)
            yield Look(page, [*lines, *([page["stale"]["message"]] if "stale" in page else [])])
            await asyncio.sleep(interval)
