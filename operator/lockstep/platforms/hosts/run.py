"""`lockstep run` on hosts: start a job there, and follow it or leave it running."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from lockstep.api.errors import Failed
from lockstep.api.objects import condition, has_ended, is_true
from lockstep.plan.pages.logs import LogSelection
from lockstep.platforms.backend import Order
from lockstep.platforms.hosts.backend import HostsBackend, HostsJob
from lockstep.platforms.output import put, say
from lockstep_spec.exits import FAILED

if TYPE_CHECKING:
    pass

POLL_SECONDS, PATIENCE_SECONDS = 0.3, 1.0
"""Least seconds between two looks at a job that starts, and those for which node 0's host waits with its answer for the job's ranks."""


def run_on_hosts(backend: HostsBackend, order: Order) -> int:
    """Start the job on its hosts, and return its exit code: 0 complete, 1 failed. Ctrl-C leaves it running.

    A detached order returns once all of its ranks run. Raises Failed where they don't get to run, with the reason.
    """
    from lockstep.platforms.hosts.ahead import refuse_slow_network
    from lockstep.platforms.hosts.start import start

    fleet = backend.fleet()
    if order.typed.file and not order.anyway:
        asyncio.run(refuse_slow_network(fleet, order))
    patience = PATIENCE_SECONDS if order.detach else 0.0
    try:
        seen = asyncio.run(start(fleet, order, patience=patience))
    except (KeyboardInterrupt, SystemExit):  # SystemExit: by SIGTERM, or a terminal that was closed
        say(f"interrupted while job {order.job.metadata.name} was being started: lockstep get {backend.again} shows whether it runs")
        raise
    job = HostsJob(backend, seen)
    say(f"job {job.name} is started on {', '.join(job.seen.hosts)}; it runs on without this terminal: lockstep logs {job.at} -f")
    job.warn_unkept()
    if order.detach:
        return _until_running(job)
    return asyncio.run(_follow(job))


def _until_running(job: HostsJob) -> int:
    shown, status, looked = "", job.status, 0.0
    while True:
        progress = condition(status, "Progressing")
        line = f"{progress.get('reason', 'Unknown')}: {progress.get('message', '')}"
        if line != shown:
            shown = line
            put(f"{job.name}: {line}", flush=True)
        if is_true(status, "RanksReady") or is_true(status, "Complete"):
            return 0
        if has_ended(status) or progress.get("status") == "False":
            raise Failed(f"job {job.name} does not run: {progress.get('message', '')}: lockstep why {job.at}")
        time.sleep(max(0.0, looked + POLL_SECONDS - time.monotonic()))
        looked = time.monotonic()
        status = asyncio.run(job.current(PATIENCE_SECONDS))


async def _follow(job: HostsJob) -> int:
    async with aclosing(job.follow(LogSelection(), say)) as lines:
        async for line in lines:
            put(line, flush=True)
    return FAILED if is_true(job.status, "Failed") else 0
