"""`POST /v1/report`: the one voice of every job, over HTTPS. Reports live in memory; status is what is kept."""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from lockstep.plan.facts import facts_of
from lockstep.plan.observed import ReceivedReport
from lockstep.plan.racks import racks_of
from lockstep.platforms.kubernetes.authenticate import Refusal, ReviewToken, bearer_of, check_node_zero, check_signature
from lockstep.platforms.kubernetes.certificate import Certificates
from lockstep.platforms.kubernetes.cluster import ApiError
from lockstep.platforms.kubernetes.inventory import Inventory
from lockstep.platforms.kubernetes.queue import Key
from lockstep.platforms.kubernetes.remembered import RememberedLosses
from lockstep_gang.contract import REPORT_BYTES_MAX, ContractError, Reply, Report, parse_report, reply_json

PATH = "/v1/report"
SIGNATURE = "X-Lockstep-Signature"
BODY_SECONDS = 10.0
WRITTEN_SECONDS = 6.0
"""Less than a coordinator waits for the reply."""
log = logging.getLogger(__name__)


class Reports:
    """The newest report of every job, by its uid."""

    def __init__(self) -> None:
        self._newest: dict[str, ReceivedReport] = {}
        self.since = time.time()
        """When this replica began to lead, and so to hear them."""

    def of(self, uid: str) -> ReceivedReport | None:
        return self._newest.get(uid)

    def time(self, uid: str) -> float:
        """When the newest one came, seconds since the epoch; of a job that this replica has not heard yet: since when it listens."""
        known = self._newest.get(uid)
        return self.since if known is None else known.received

    def sequence(self, uid: str) -> int:
        known = self._newest.get(uid)
        return -1 if known is None else known.report.sequence

    def take(self, report: Report, pod_uid: str, now: float) -> None:
        self._newest[report.job.uid] = ReceivedReport(report, pod_uid, now)

    def forget(self, uids: set[str]) -> None:
        """Keep the reports of these jobs only."""
        self._newest = {uid: report for uid, report in self._newest.items() if uid in uids}


@dataclass(frozen=True)
class Standing:
    """Which part this replica plays now."""

    leads: bool = True
    """And knows the cluster, so that it can tell whose a report is."""
    leader: str | None = None
    """Where another replica takes reports ("": nobody knows); None while nobody else is known to lead."""


async def _at_once(key: Key) -> None:
    del key


@dataclass
class ReportServer:
    """Checks and keeps reports; `heard` is told whose job has news."""

    master: bytes
    review: ReviewToken
    inventory: Inventory
    heard: Callable[[Key], None]
    standing: Callable[[], Standing] = Standing
    reports: Reports = field(default_factory=Reports)
    losses: RememberedLosses = field(default_factory=RememberedLosses)
    was_ready: bool = False
    written: Callable[[Key], Awaitable[None]] = _at_once

    def application(self) -> web.Application:
        app = web.Application(client_max_size=REPORT_BYTES_MAX)
        app.router.add_post(PATH, self.receive)
        app.router.add_get("/healthz", self._healthy)
        app.router.add_get("/readyz", self._ready)
        return app

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        """From the first sight of a leader on: without one, or without the API server, a follower still says so itself."""
        standing = self.standing()
        self.was_ready = self.was_ready or standing.leads or standing.leader is not None
        return web.Response(text="ok\n" if self.was_ready else "nobody leads yet\n", status=200 if self.was_ready else 503)

    async def receive(self, request: web.Request) -> web.Response:
        standing = self.standing()
        if not standing.leads:
            return _elsewhere(standing.leader)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()  # more than client_max_size: 413
            return await self._take(request, body)
        except Refusal as refusal:
            log.info("report refused with %d: %s", refusal.status, refusal)
            return web.json_response({"message": str(refusal)}, status=refusal.status)
        except ContractError as error:
            return web.json_response({"message": str(error)}, status=400)
        except TimeoutError:
            return web.json_response({"message": "the body took too long"}, status=408)
        except (ApiError, OSError) as error:
            return web.json_response({"message": f"the token can't be checked now: {error}"}, status=503)

    async def _take(self, request: web.Request, body: bytes) -> web.Response:
        report = parse_report(body)
        check_signature(self.master, body, report, request.headers.get(SIGNATURE, ""))
        bearer = await bearer_of(self.review, request.headers.get("Authorization", ""))
        observed = check_node_zero(self.inventory, bearer, report)
        newest = self.reports.sequence(report.job.uid)
        if report.sequence <= newest:
            return web.json_response({"message": f"sequence must be greater than {newest}", "sequence": newest}, status=409)
        self.reports.take(report, bearer.pod_uid, time.time())
        key = (report.job.namespace, report.job.name)
        self.heard(key)
        if report.log and not await self._is_written(key):
            return web.json_response({"message": "what the report says could not be written yet"}, status=503)
        facts = facts_of(observed, self.losses.of(key))
        racks = () if observed is None else racks_of(observed, len(report.nodes))
        return web.json_response(reply_json(Reply(facts=facts, racks=racks)))

    async def _is_written(self, key: Key) -> bool:
        """Last lines are told once: they are accepted when they are on the cluster, else an operator that is killed now would lose them."""
        try:
            async with asyncio.timeout(WRITTEN_SECONDS):
                await self.written(key)
        except TimeoutError:
            return False
        return True


def _elsewhere(leader: str | None) -> web.Response:
    if leader is None:
        return web.json_response({"message": "no replica of the operator leads now"}, status=503)
    return web.json_response({"message": "another replica of the operator leads", "leader": leader}, status=421)


def tls_context(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, certificates)
    return context


def load_certificate(context: ssl.SSLContext, certificates: Certificates) -> None:
    """Also into a context in use: connections from then on get the new certificate."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # ssl reads files only; the folder is in memory
        file.write(certificates.tls_key + certificates.tls_cert)
        file.flush()
        context.load_cert_chain(Path(file.name))


@asynccontextmanager
async def serving(app: web.Application, host: str, port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """The port it listens on, until the block ends."""
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=context)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
