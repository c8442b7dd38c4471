"""Looks of `lockstep top` at hosts: those of a job with its ranks, and all of a cluster file without a job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from lockstep.api.objects import Object, has_ended
from lockstep.cli.shared.terminal import say

if TYPE_CHECKING:
    from lockstep.cli.shared.hostsite import HostJob, HostSite

CURVE_POINTS = 60
CURVE_SECONDS = 10.0
"""The loss curve is read so often; the rest with every look."""


async def looks_of_host_job(job: HostJob, interval: float, *, live: bool) -> AsyncGenerator[tuple[Object, bool], None]:
    """Yield what a job and its hosts tell, and whether it has ended. A host that doesn't answer is shown as not seen."""
    from lockstep.plan.pages.top import machine_node, snapshot
    from lockstep.platforms.jobs.top import NodesWatch, nodes_at, of_job
    from lockstep_gang.contract.layout import RankLayout

    fleet, layout = job.site.fleet(), RankLayout(job.seen.record.ranks)
    roots = {node: record.workspace for node, host in enumerate(job.seen.hosts) if (record := job.record_on(host)) is not None}
    folders = {node: f"{workspace}/runs/{job.name}" for node, workspace in roots.items()}
    places = {node: fleet.place(host) for node, host in enumerate(job.seen.hosts) if node in folders}
    curve: Object = {}
    read = -CURVE_SECONDS
    async with AsyncExitStack() as stack:
        watch = await stack.enter_async_context(
            NodesWatch(nodes_at(places), of_job(job.name, folders, machine=True), (lambda line: None) if live else say)
        )
        while True:
            now = time.monotonic()
            points = CURVE_POINTS if now - read >= CURVE_SECONDS else 0
            answers, status = await asyncio.gather(watch.ask(points), job.current())
            if points and answers.get(0, {}).get("curve"):
                curve, read = answers[0]["curve"], now
            page = snapshot(job.job, (), {0: {"curve": curve}})
            nodes = []
            for node, host in enumerate(job.seen.hosts):
                answer = {"problem": job.seen.problems[host]} if host in job.seen.problems else answers.get(node, {})
                nodes.append({**machine_node(host, layout.ranks_of(node), answer), "node": node})
            yield {**page, "nodes": nodes}, has_ended(status)
            await asyncio.sleep(interval)


async def looks_of_hosts(site: HostSite, interval: float) -> AsyncGenerator[Object, None]:
    """Yield the load of every host of a cluster file, and who uses its GPUs."""
    from lockstep.plan.pages.hosts import hosts_view
    from lockstep.platforms.jobs.top import NodesWatch, nodes_at, of_hosts

    fleet = site.fleet()
    folders = [(host.workspace, host.datasets) for host in site.hosts.hosts]
    async with NodesWatch(nodes_at([fleet.place(name) for name in site.hosts.names]), of_hosts(site.name, folders), say) as watch:
        while True:
            answers = await watch.ask(0)
            yield hosts_view(site.name, {name: answers.get(number, {}) for number, name in enumerate(site.hosts.names)})
            await asyncio.sleep(interval)
