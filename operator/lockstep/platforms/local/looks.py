"""Looks at a run of this machine, or at the machine as at a host of a cluster."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from lockstep.plan.pages.hosts import hosts_page, hosts_view, read_host
from lockstep.platforms.inpod.hostload import HostWatch
from lockstep.platforms.jobs.looks import CURVE_POINTS, Look, Looks, page_lines, width
from lockstep.platforms.local.backend import LocalBackend
from lockstep.platforms.local.records import FIRST_SECONDS, LocalLooks


async def looks_of_folder(backend: LocalBackend, job: str | None, interval: float) -> Looks:
    if job is None:
        async for look in looks_of_machine(backend.root, interval):
            yield look
        return
    found = backend.job(job).backend
    looks = LocalLooks(job, found.root, found.again)
    while True:
        page, over = await asyncio.to_thread(looks.look, CURVE_POINTS)
        yield Look(page, page_lines(page), over)
        await asyncio.sleep(interval)


async def looks_of_machine(workspace: Path, interval: float) -> Looks:
    """Look at this machine as at a host of a cluster."""

    watch = HostWatch(str(workspace / "workspace"), str(workspace / "datasets"))
    await asyncio.sleep(FIRST_SECONDS)
    while True:
        answer = read_host(await asyncio.to_thread(watch.answer))
        view = hosts_view("local", {socket.gethostname(): answer})
        yield Look(view, list(hosts_page(view, width())))
        await asyncio.sleep(interval)
