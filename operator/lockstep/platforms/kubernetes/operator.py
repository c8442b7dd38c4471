"""`python -m lockstep.platforms.kubernetes.operator`: watches jobs and brings the cluster to what they say.

kopf watches; its handlers only take in an event and mark keys. One queue works the keys off, one worker a job at a time, and a slow
resync makes up for events that were lost. No timer, daemon or change handler of kopf's: those write finalizers and annotations.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import kopf

from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE, REPORT_URL, key_secret_name
from lockstep.plan.conditions import timestamp
from lockstep.plan.objects import RenderContext
from lockstep.plan.observed import Observed
from lockstep.plan.pods import is_running
from lockstep.plan.reconcile import reconcile
from lockstep.plan.run import report_target
from lockstep.platforms.kubernetes.authenticate import token_reviewer
from lockstep.platforms.kubernetes.certificate import Certificates, service_names
from lockstep.platforms.kubernetes.cluster import KINDS, ApiError, Cluster
from lockstep.platforms.kubernetes.execute import Executor
from lockstep.platforms.kubernetes.inventory import WATCHED, Inventory
from lockstep.platforms.kubernetes.login import connection
from lockstep.platforms.kubernetes.queue import Key, WorkQueue
from lockstep.platforms.kubernetes.report_server import ReportServer, load_certificate, serving, tls_context
from lockstep.platforms.kubernetes.secrets import certificates, job_key, master_key

RESYNC_SECONDS = 600.0
OBSTACLE_SECONDS = 3.0
log = logging.getLogger("lockstep.operator")


@dataclass(frozen=True)
class Settings:
    """From the Deployment's environment."""

    agent_image: str
    """Image of the init container that brings the agent: the operator's own."""
    namespace: str = OPERATOR_NAMESPACE
    report_url: str = REPORT_URL
    port: int = 8443

    @classmethod
    def from_environment(cls, environment: dict[str, str]) -> Settings:
        return cls(
            agent_image=environment["LOCKSTEP_AGENT_IMAGE"],
            namespace=environment.get("LOCKSTEP_NAMESPACE", OPERATOR_NAMESPACE),
            report_url=environment.get("LOCKSTEP_REPORT_URL", REPORT_URL),
            port=int(environment.get("LOCKSTEP_REPORT_PORT", "8443")),
        )


@dataclass
class Operator:
    """One operator of one cluster."""

    cluster: Cluster
    settings: Settings
    master: bytes
    tls: Certificates
    inventory: Inventory = field(default_factory=Inventory)
    synced: bool = False

    def __post_init__(self) -> None:
        self.queue = WorkQueue(self.work)
        self.executor = Executor(self.cluster, lambda secret: self.observe("Secret", {**secret, "kind": "Secret"}, deleted=False))
        self.server = ReportServer(
            self.master, token_reviewer(self.cluster), self.inventory, heard=self.queue.mark, is_ready=lambda: self.synced
        )

    def observe(self, kind: str, item: dict[str, Any], *, deleted: bool) -> None:
        for key in self.inventory.observe(kind, item, deleted=deleted):
            self.queue.mark(key)

    async def work(self, key: Key) -> float | None:
        """Reconcile one job; seconds until it should be looked at again."""
        observed = self.inventory.observed(key)
        if observed is None:
            return None
        if lacks_secret(observed):
            self.inventory.forget_secret(key)
            observed = self.inventory.observed(key) or observed
        context = self._context(observed.uid)
        received = self.server.reports.of(observed.uid)
        plan = reconcile(observed, received, context, time.time())
        obstacle = await self.executor.write_objects(observed, plan)
        if obstacle != observed.obstacle:
            self.inventory.set_obstacle(key, obstacle)
            observed = self.inventory.observed(key) or observed
            plan = reconcile(observed, received, context, time.time())
        if plan.status is not None:
            try:
                await self.executor.write_status(observed, plan.status)
            except ApiError as error:
                if error.status in (404, 409):  # deleted or replaced meanwhile: its event comes
                    return plan.again_seconds
                raise
            for note in plan.events:
                log.info("%s/%s: %s: %s", *key, note.reason, note.message)
            await self.executor.tell(observed, plan.events, timestamp(time.time()))
        return OBSTACLE_SECONDS if obstacle is not None else plan.again_seconds

    def _context(self, uid: str) -> RenderContext:
        report = report_target(self.settings.report_url, self.tls.ca_cert)
        return RenderContext(self.settings.agent_image, job_key(self.master, uid), uid, report)

    async def resync(self) -> None:
        """Replace what is known with what the API server lists, and look at every job."""
        for watched in WATCHED:
            page = await self.cluster.list(watched.kind, query=watched.query)
            version = page["metadata"].get("resourceVersion", "0")
            self.inventory.replace(watched.kind, page["items"], int(version) if version.isdigit() else 0)
        self.synced = True
        jobs = self.inventory.jobs()
        self.server.reports.forget({found.uid for key in jobs if (found := self.inventory.observed(key))})
        for key in jobs:
            self.queue.mark(key)

    async def resync_forever(self) -> None:
        """Slowly; the certificate is looked at on the same occasion."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            try:
                await self.resync()
                await self._renew()
            except (ApiError, OSError) as error:
                log.warning("resync: %s", error)

    async def _renew(self) -> None:
        names = service_names(OPERATOR_NAME, self.settings.namespace)
        self.tls = await certificates(self.cluster, self.settings.namespace, names, datetime.now(UTC))
        load_certificate(self.tls_context, self.tls)

    async def run(self, stop: asyncio.Event, ready: Callable[[int], None] = lambda port: None) -> None:
        """Until `stop`. The list comes first: a gang that runs must never be taken for one that isn't there."""
        self.tls_context = tls_context(self.tls)
        await self.resync()
        async with serving(self.server.application(), "", self.settings.port, self.tls_context) as port:
            ready(port)
            watching = kopf.operator(
                registry=registry(self),
                settings=kopf_settings(),
                clusterwide=True,
                standalone=True,
                stop_flag=stop,
                identity=OPERATOR_NAME,  # its default looks up a user name, and an arbitrary UID has none
            )
            await first_of(watching, self.queue.run(), self.resync_forever())


def lacks_secret(observed: Observed) -> bool:
    """The kubelet says that the job's Secret, made once and not watched, is gone."""
    told = f'secret "{key_secret_name(observed.name)}" not found'
    waiting = [pod for pod in observed.pods if not is_running(pod)]
    return any(told in event.get("message", "") for pod in waiting for event in observed.events_of(pod["metadata"]["uid"]))


async def first_of(*parts: Coroutine[Any, Any, None]) -> None:
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


def registry(operator: Operator) -> kopf.OperatorRegistry:
    """kopf's handlers: for every watched kind the same one."""
    found = kopf.OperatorRegistry()

    @kopf.on.login(registry=found)  # type: ignore[untyped-decorator]
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection()

    for watched in WATCHED:
        _watch(found, watched.kind, operator)
    return found


def _watch(found: kopf.OperatorRegistry, kind: str, operator: Operator) -> None:
    known = KINDS[kind]
    group, _, version = known.api_version.rpartition("/")

    @kopf.on.event(group, version, known.plural, registry=found, id=known.plural)  # type: ignore[untyped-decorator]
    async def take_in(type: str | None, body: kopf.Body, **_: Any) -> None:
        operator.observe(kind, dict(body), deleted=type == "DELETED")


def kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # no watch of CRDs and namespaces
    settings.posting.enabled = False
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    for watched in WATCHED:
        plural = KINDS[watched.kind].plural
        if watched.label_selector:
            settings.watching.label_selectors[plural] = watched.label_selector
        if watched.field_selector:
            settings.watching.field_selectors[plural] = watched.field_selector
    return settings


async def serve(settings: Settings, stop: asyncio.Event, ready: Callable[[int], None] = lambda port: None) -> None:
    """Connect and run until `stop`."""
    async with await Cluster.connect() as cluster:
        names = service_names(OPERATOR_NAME, settings.namespace)
        master = await master_key(cluster, settings.namespace)
        tls = await certificates(cluster, settings.namespace, names, datetime.now(UTC))
        await Operator(cluster, settings, master, tls).run(stop, ready)


async def _main() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(Settings.from_environment(dict(os.environ)), stop, lambda port: log.info("reports are taken on port %d", port))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it tells of every event of every object
    asyncio.run(_main())
