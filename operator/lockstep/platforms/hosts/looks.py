"""Looks at a job on hosts, or at the hosts of a cluster file."""

from __future__ import annotations

import asyncio

from lockstep.api.objects import has_ended
from lockstep.plan.pages.hosts import hosts_page, hosts_view
from lockstep.plan.pages.top import machine_node, snapshot
from lockstep.platforms.hosts.backend import HostsBackend, HostsJob
from lockstep.platforms.jobs.looks import Curve, Look, Looks, page_lines, width
from lockstep.platforms.jobs.top import NodesWatch, nodes_at, of_hosts, of_job
from lockstep.platforms.output import say


async def looks_of_job(job: HostsJob, interval: float, *, live: bool) -> Looks:
    """Look at a job with its ranks. A host that doesn't answer is shown as not seen."""
    from lockstep_gang.contract.layout import RankLayout

    fleet, layout = job.backend.fleet(), RankLayout(job.seen.record.ranks)
    roots = {node: record.workspace for node, host in enumerate(job.seen.hosts) if (record := job.record_on(host)) is not None}
    folders = {node: f"{workspace}/runs/{job.name}" for node, workspace in roots.items()}
    places = {node: fleet.place(host) for node, host in enumerate(job.seen.hosts) if node in folders}
    curve = Curve()
    measuring = (lambda line: None) if live else say
    async with NodesWatch(nodes_at(places), of_job(job.name, folders, machine=True), measuring) as watch:
        while True:
            answers, status = await asyncio.gather(watch.ask(curve.points()), job.current())
            curve.take(answers.get(0, {}))
            nodes = []
            for node, host in enumerate(job.seen.hosts):
                answer = {"problem": job.seen.problems[host]} if host in job.seen.problems else answers.get(node, {})
                nodes.append({**machine_node(host, layout.ranks_of(node), answer), "node": node})
            page = {**snapshot(job.job, (), {0: {"curve": curve.steps}}), "nodes": nodes}
            yield Look(page, page_lines(page), has_ended(status))
            await asyncio.sleep(interval)


async def looks_of_hosts(backend: HostsBackend, interval: float) -> Looks:
    """Look at the load of every host of a cluster file, and who uses its GPUs."""
    fleet = backend.fleet()
    folders = [(host.workspace, host.datasets) for host in backend.hosts.hosts]
    async with NodesWatch(nodes_at([fleet.place(name) for name in backend.hosts.names]), of_hosts(backend.name, folders), say) as watch:
        while True:
            answers = await watch.ask(0)
            view = hosts_view(backend.name, {name: answers.get(number, {}) for number, name in enumerate(backend.hosts.names)})
            yield Look(view, list(hosts_page(view, width())))
            await asyncio.sleep(interval)
