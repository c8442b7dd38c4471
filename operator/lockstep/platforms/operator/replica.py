"""`python -m lockstep.platforms.operator.replica`: one of the operator's, which takes reports or says who does, and works while it leads.

Only one leads; a follower keeps nothing but a connection, so that it costs little, and lists the cluster when it takes over. Whatever
ends the leading (a lost lease, an error, SIGTERM) ends the process: the next start knows nothing that could be old.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

from lockstep.api.names import KEY_SECRET, OPERATOR_NAME
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.platforms.operator.certificate import Certificates, service_names
from lockstep.platforms.operator.lease import Lease, LeaseLost
from lockstep.platforms.operator.memory.queue import patiently
from lockstep.platforms.operator.metrics import Metrics, MetricsServer
from lockstep.platforms.operator.operator import Operator, Settings, WentBack
from lockstep.platforms.operator.report_server import Standing, load_certificate, tls_context
from lockstep.platforms.operator.secrets import UnusableSecret, certificates, master_key, publish_authority
from lockstep.platforms.operator.tls_port import METRICS, PROBES, REPORTS, serving
from lockstep_spec.words import printable, printable_line

SECRETS_SECONDS = 60.0
"""Seconds between two looks at the operator's own Secrets. A replica that starts while one is gone makes another, which no running gang
knows.
"""
AUTHORITY_SECONDS = 600.0
log = logging.getLogger("lockstep.operator")


class Replica:
    """`cluster` is not fenced: the lease and the operator's own Secrets are every replica's to write."""

    def __init__(self, cluster: Cluster, settings: Settings, master: bytes, tls: Certificates) -> None:
        self._cluster = cluster
        self._settings = settings
        self._lease = Lease(cluster, settings.namespace, settings.pod, settings.address, lack=lambda: cluster.answers.lack)
        metrics = Metrics()
        cluster.requested = metrics.requested
        self._metrics = MetricsServer(cluster, metrics)
        self._operator = Operator(cluster.fenced(self._lease.check), settings, master, tls, standing=self._standing, metrics=metrics)
        self._master = master
        self._tls_context = tls_context(tls)

    def _standing(self) -> Standing:
        leads = self._lease.is_held
        return Standing(leads and self._operator.synced, None if leads else self._lease.leader)

    async def run(self, stop: asyncio.Event, ready: Callable[[int], None]) -> None:
        """Run until `stop`, which SIGTERM and SIGINT set. Raises LeaseLost, and whatever ended the work."""
        async with AsyncExitStack() as stack:
            reports = serving(self._operator.server.application(), "", self._settings.port, self._tls_context, REPORTS)
            port = await stack.enter_async_context(reports)
            await stack.enter_async_context(serving(self._operator.server.probes(), "", self._settings.health_port, None, PROBES))
            if self._settings.metrics_port:
                metrics = serving(self._metrics.application(), "", self._settings.metrics_port, self._tls_context, METRICS)
                await stack.enter_async_context(metrics)
            ready(port)
            stop_on_signals(stop)
            await first_of(self._give_way(stop), self._lead(stop), self._keep_secrets_forever(), self._publish_authority())

    async def _give_way(self, stop: asyncio.Event) -> None:
        """Release the lease before anything is ended: kopf may take longer for that than a pod has. From the release on nothing is
        written.
        """
        await stop.wait()
        await self._lease.release()

    async def _lead(self, stop: asyncio.Event) -> None:
        await self._lease.acquire()
        try:
            await first_of(self._lease.keep(), self._operator.run(lambda: stop_on_signals(stop)))
        finally:
            await self._lease.release()

    async def _publish_authority(self) -> None:
        """Every replica, every ten minutes: written with what is there already, nothing changes."""
        while True:
            try:
                await publish_authority(self._cluster, self._settings.namespace, self._operator.tls.ca_cert)
            except (ApiError, OSError) as error:  # only who scrapes metrics looks there
                log.warning("ConfigMap of the authority: %s", error)
            await asyncio.sleep(AUTHORITY_SECONDS)

    async def _keep_secrets_forever(self) -> None:
        while True:
            await asyncio.sleep(SECRETS_SECONDS)
            try:
                await self.keep_secrets(_now(self._cluster))
            except (
                ApiError,
                OSError,
                UnusableSecret,
            ) as error:  # another replica was faster, or the API server is away: the next time will do
                log.warning("the operator's own Secrets: %s", error)

    async def keep_secrets(self, now: datetime) -> None:
        """Renew the certificate in time, and write back what somebody has deleted: what is made anew is known to no running gang.

        Raises ApiError, OSError, UnusableSecret; what this process uses stays as it is then.
        """
        namespace = self._settings.namespace
        if await master_key(self._cluster, namespace, self._master) != self._master:
            log.warning(
                "Secret %s in namespace %s holds another key now: this process goes on with the one that it began with",
                KEY_SECRET,
                namespace,
            )
        names = service_names(OPERATOR_NAME, namespace)
        self._operator.tls = await certificates(self._cluster, namespace, names, now, self._operator.tls)
        load_certificate(self._tls_context, self._operator.tls)


def _now(cluster: Cluster) -> datetime:
    """A certificate that a clock ahead of all others has made isn't valid yet for anybody."""
    return datetime.fromtimestamp(cluster.clock.now(), UTC)


def stop_on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def first_of(*parts: Coroutine[Any, Any, Any]) -> None:
    """Run all; when one ends or fails, end the others and raise what it raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def serve(settings: Settings, stop: asyncio.Event, ready: Callable[[int], None] = lambda port: None) -> None:
    """Connect and run until `stop`."""
    names = service_names(OPERATOR_NAME, settings.namespace)
    async with await Cluster.connect() as cluster:

        async def own_secrets() -> tuple[bytes, Certificates]:
            master = await master_key(cluster, settings.namespace)
            return master, await certificates(cluster, settings.namespace, names, _now(cluster))

        master, tls = await patiently("the operator's own Secrets", own_secrets)
        await Replica(cluster, settings, master, tls).run(stop, ready)


class OneLine(logging.Formatter):
    """Log lines that tenants can't forge: no name or message of theirs makes a line of its own or acts on the reader's terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))  # (a traceback's lines are lines)


async def _main() -> None:
    stop = asyncio.Event()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each job has a connection
    try:
        await serve(Settings.from_environment(dict(os.environ)), stop, lambda port: log.info("reports are taken on port %d", port))
    except (LeaseLost, UnusableSecret, WentBack) as error:
        log.error("%s; the process ends and begins anew", error)
        sys.exit(1)


if __name__ == "__main__":
    logs = logging.StreamHandler()
    logs.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[logs])
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it tells of every event of every object
    asyncio.run(_main())
