"""Looks at a job in pods, or at all jobs of a namespace."""

from __future__ import annotations

import asyncio

from lockstep.api.objects import has_ended, is_run
from lockstep.plan.pages.table import is_open
from lockstep.plan.pages.top import overview, snapshot
from lockstep.platforms.files.results import run_folder
from lockstep.platforms.jobs.looks import CURVE_POINTS, Curve, Look, Looks, page_lines, with_age
from lockstep.platforms.jobs.observe import operator_unheard
from lockstep.platforms.jobs.top import NodesWatch, curve_on_volume, nodes_in_pods, of_job, pods_of
from lockstep.platforms.kubernetes.backend import KubernetesBackend, KubernetesJob
from lockstep.platforms.output import say


async def looks_of_job(job: KubernetesJob, interval: float, *, live: bool) -> Looks:
    name, namespace = job.name, job.namespace
    curve = Curve()
    measuring = (lambda line: None) if live else say
    async with (
        job.target.client.connected() as cluster,
        NodesWatch(nodes_in_pods(cluster, namespace, name), of_job(name, run_folder(name)), measuring) as nodes,
    ):
        ask = nodes.ask if live else nodes.ask_all
        while True:
            answers, status, pods, silent = await asyncio.gather(
                ask(curve.points()),
                asyncio.to_thread(job.look_again),
                pods_of(cluster, namespace, name),
                operator_unheard(cluster, namespace),
            )
            curve.take(answers.get(0, {}))
            over = has_ended(status)
            if over and not curve.steps and "step" in status.get("trainer", {}):
                curve.steps = await curve_on_volume(cluster, namespace, name, CURVE_POINTS, say)
            answers.setdefault(0, {})["curve"] = curve.steps
            page = with_age(snapshot({**job.job, "status": status}, pods, answers), None if over or is_run(job.job) else silent)
            yield Look(page, page_lines(page), over)
            await asyncio.sleep(interval)


async def looks_of_all(backend: KubernetesBackend, interval: float) -> Looks:
    place = backend.target.namespace
    async with backend.target.client.connected() as connection:
        while True:
            jobs = [job.job for job in await asyncio.to_thread(backend.jobs)]
            unheard = await operator_unheard(connection, place) if any(map(is_open, jobs)) else None
            lines = list(overview(jobs)) if jobs else [f"there is no TrainingJob in namespace {place}"]
            page = with_age({"jobs": [snapshot(job, (), {}) for job in jobs]}, unheard)
            yield Look(page, [*lines, *([page["stale"]["message"]] if "stale" in page else [])])
            await asyncio.sleep(interval)
