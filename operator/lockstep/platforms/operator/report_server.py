"""`POST /v1/report`: the one voice of every job, over HTTPS. Reports live in memory; status is what is kept. `/healthz`, on a port of its
own, says if a new process would help.

Unhealthy is only what a new process would mend: a loop that has stopped, work that doesn't end, a login or a certificate that the API
server no longer takes. An API server that doesn't answer, or answers with 429 or 5xx, is nothing of that: it is waited for.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import ssl
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path

from aiohttp import StreamReader, web

from lockstep.api.names import NODES_MAX
from lockstep.kube.cluster import TOO_LARGE, ApiError
from lockstep.plan.observed import ReceivedReport
from lockstep.plan.reconcile.podfacts import facts_of, racks_of
from lockstep.platforms.operator.authenticate import (
    FORBIDDEN,
    UNAUTHENTICATED,
    Bearer,
    Refusal,
    ReviewToken,
    bearer_of,
    check_job,
    check_node_zero,
    check_signature,
    has_other_key,
)
from lockstep.platforms.operator.certificate import Certificates
from lockstep.platforms.operator.memory.history import RememberedLosses
from lockstep.platforms.operator.memory.inventory import Inventory
from lockstep.platforms.operator.memory.queue import Key
from lockstep.platforms.operator.tls_port import Seldom, prove
from lockstep_gang.contract.reply import Reply, reply_json
from lockstep_gang.contract.report import (
    JOB_HEADER,
    SIGNATURE_HEADER,
    Report,
    claimed_job,
    job_header,
    parse_report,
    report_bytes_max,
)
from lockstep_gang.contract.run import JobIdentity
from lockstep_spec.codec import ContractError

PATH = "/v1/report"
TOO_MANY = 429
BODY_SECONDS = 10.0


class Of(Enum):
    """Sharers of the operator's time: (share of it, reports at one time)."""

    JOB = (0.1, 1)
    NAMESPACE = (0.5, 16)


BURST_SECONDS = 1.0
"""Seconds that a job or a namespace may be ahead of its share before its reports are refused."""
REPORT_COST = 0.001
"""Seconds of the operator's time for a report's connection, headers and signature, whatever is in it."""
IN_VAIN_COST = 0.1
"""Seconds for a token that was no good: the API server was asked."""
ASKED_SECONDS = 5.0
REVIEWED_SECONDS = 60.0
"""Seconds until the API server is asked again about a job's good token. A pod that is gone is refused all the same."""
UNVERIFIED_SECONDS = 120.0
"""For which a report that was signed with another key is remembered: longer than a coordinator waits before it repeats it."""
WRITTEN_SECONDS = 6.0
"""Less than a coordinator waits for the reply."""
log = logging.getLogger(__name__)
log.addFilter(Seldom())


class Reports:
    """The newest report of every job, by its uid."""

    def __init__(self) -> None:
        self._newest: dict[str, ReceivedReport] = {}
        self._free_at: dict[tuple[Of, str], float] = {}
        """Time at which each will have used no more than its share."""
        self._busy: Counter[tuple[Of, str]] = Counter()
        self._reviewed: dict[str, tuple[bytes, Bearer, float]] = {}
        """Good token of each job, whose it is, and until when that counts: no other job's tokens can push it out."""
        self._asked: dict[str, tuple[float, bytes]] = {}
        self._unverified: dict[str, float] = {}
        self._left_out: dict[str, set[str]] = {}
        self.since = time.time()
        """Time at which this replica began to lead, and so to hear them."""

    def of(self, uid: str) -> ReceivedReport | None:
        return self._newest.get(uid)

    def time(self, uid: str) -> float:
        """Time of the newest report, seconds since the epoch; for a job that this replica has not heard yet: since when it listens."""
        newest = self._newest.get(uid)
        return self.since if newest is None else newest.received

    def sequence(self, uid: str) -> int:
        newest = self._newest.get(uid)
        return -1 if newest is None else newest.report.sequence

    def take(self, report: Report, pod_uid: str, now: float) -> None:
        self._newest[report.job.uid] = ReceivedReport(report, pod_uid, now)

    @contextmanager
    def turn(self, job: JobIdentity) -> Iterator[None]:
        """Take the operator's time for one report of a job, or raise Refusal at once if the job or its namespace has used up its share."""
        parts = [(Of.JOB, job.uid), (Of.NAMESPACE, job.namespace)]
        waits = {part: self._free_at.get(part, 0.0) - time.monotonic() - BURST_SECONDS for part in parts}
        for part, wait in waits.items():
            if wait > 0 or self._busy[part] >= part[0].value[1]:
                whose = "this job reports" if part[0] is Of.JOB else f"the jobs of namespace {job.namespace} report"
                again = max(1, math.ceil(wait))
                raise Refusal(TOO_MANY, f"{whose} too often: again in {again} s", again)
        self._busy.update(parts)
        self._charge(job, REPORT_COST)
        try:
            yield
        finally:
            self._busy.subtract(parts)
            self._busy = +self._busy

    @contextmanager
    def taking_time(self, job: JobIdentity) -> Iterator[None]:
        """Charge the cost of this job's reports, which decides when its next one is read: processor time, on a busy machine less than what
        passes.
        """
        began = time.thread_time()
        try:
            yield
        finally:
            self._charge(job, time.thread_time() - began)

    def _charge(self, job: JobIdentity, cost: float) -> None:
        for part in ((Of.JOB, job.uid), (Of.NAMESPACE, job.namespace)):
            self._free_at[part] = max(self._free_at.get(part, 0.0), time.monotonic()) + cost / part[0].value[0]

    def asked_in_vain(self, job: JobIdentity) -> None:
        """A report that the job's key signed came with a token that is no good. A pod may make up as many as it likes."""
        self._charge(job, IN_VAIN_COST)

    async def bearer(self, job: JobIdentity, review: ReviewToken, authorization: str) -> Bearer:
        """Return the pod that holds the token. Raises Refusal."""
        digest, good = _digest(authorization), self._reviewed.get(job.uid)
        if good is not None and good[0] == digest and time.monotonic() < good[2]:
            return good[1]
        bearer = await bearer_of(review, authorization)
        self._reviewed[job.uid] = digest, bearer, time.monotonic() + REVIEWED_SECONDS
        return bearer

    def may_ask(self, uid: str, token: str) -> bool:
        """Return True if the API server may be asked now whose token came with a report that the job's key didn't sign.

        Everybody who reaches this port can send such reports: one question a job every `ASKED_SECONDS`, and one token that was found good.
        """
        last_question, good = self._asked.get(uid, (-ASKED_SECONDS, b""))
        now = time.monotonic()
        if good == _digest(token):
            return True
        if now - last_question < ASKED_SECONDS:
            return False
        self._asked[uid] = now, good
        return True

    def is_good(self, uid: str, token: str) -> None:
        """The token is that of the job's live node 0."""
        self._asked[uid] = self._asked.get(uid, (0.0, b""))[0], _digest(token)

    def unverified(self, uid: str) -> None:
        """The job's live node 0 has signed with a key that isn't the job's."""
        self._unverified[uid] = time.monotonic()

    def is_unverified(self, uid: str) -> bool:
        """Return True if that was lately."""
        return uid in self._unverified and time.monotonic() - self._unverified[uid] < UNVERIFIED_SECONDS

    def left_out(self, job: JobIdentity, part: str, error: str) -> None:
        """Say once of each part of a job's reports that they are taken without it."""
        known = self._left_out.setdefault(job.uid, set())
        if part not in known:
            known.add(part)
            log.warning("reports of %s are taken without what this version can't read: %s", job_header(job), error)

    def forget(self, uids: set[str]) -> None:
        """Keep the reports of these jobs only."""
        self._asked = {uid: question for uid, question in self._asked.items() if uid in uids}
        self._unverified = {uid: at for uid, at in self._unverified.items() if uid in uids}
        self._left_out = {uid: parts for uid, parts in self._left_out.items() if uid in uids}
        self._newest = {uid: report for uid, report in self._newest.items() if uid in uids}
        self._reviewed = {uid: good for uid, good in self._reviewed.items() if uid in uids}
        self._free_at = {part: until for part, until in self._free_at.items() if until > time.monotonic()}


@dataclass(frozen=True)
class Standing:
    """Part that this replica plays now."""

    leads: bool = True
    """True if it leads and knows the cluster, so that it can tell whose a report is."""
    leader: str | None = None
    """Address where another replica takes reports ("" if unknown); None while no other is known to lead."""


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
    now: Callable[[], float] = time.time
    problem: Callable[[], str] = lambda: ""
    """Problem that a new process would mend."""

    def application(self) -> web.Application:
        app = self.probes()  # here, too, for a Deployment of the version before
        app.router.add_post(PATH, self.receive)
        return app

    def probes(self) -> web.Application:
        """Return what the kubelet asks."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthy)
        app.router.add_get("/readyz", self._ready)
        return app

    async def _healthy(self, _: web.Request) -> web.Response:
        """503: a new process would do better."""
        problem = self.problem()
        if problem:
            log.error("unhealthy: %s", problem)
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    async def _ready(self, _: web.Request) -> web.Response:
        """Reply 200 from the first sight of a leader on: without one, or without the API server, a follower still says so itself."""
        standing = self.standing()
        self.was_ready = self.was_ready or standing.leads or standing.leader is not None
        return web.Response(text="ok\n" if self.was_ready else "nobody leads yet\n", status=200 if self.was_ready else 503)

    async def receive(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                job, body = await self._read(request)
            standing = self.standing()
            await self._check_sender(request, job, body, leads=standing.leads)
            if not standing.leads:  # (it doesn't know the job, and so not whose namespace it is)
                prove(request, replace(job, namespace=job.uid))
                return _elsewhere(standing.leader)
            if not self.inventory.gang_size((job.namespace, job.name), job.uid):
                raise Refusal(FORBIDDEN, f"there is no job {job.namespace}/{job.name} of that uid")
            prove(request, job)
            with self.reports.turn(job):
                return await self._take(request, job, body)
        except Refusal as refusal:
            log.info("report refused with %d: %s", refusal.status, refusal)
            return web.json_response({"message": str(refusal)}, status=refusal.status, headers=refusal.headers)
        except ContractError as error:
            return web.json_response({"message": str(error)}, status=400)
        except TimeoutError:
            return web.json_response({"message": "the body took too long"}, status=408)
        except (ApiError, OSError) as error:
            return web.json_response({"message": f"the token can't be checked now: {error}"}, status=503)

    async def _read(self, request: web.Request) -> tuple[JobIdentity, bytes]:
        """The job that a report says it is of, and the report, as it came. Raises Refusal."""
        job = claimed_job(request.headers.get(JOB_HEADER, ""))
        if job is None:
            raise Refusal(UNAUTHENTICATED, f"{JOB_HEADER} is missing or isn't NAMESPACE/NAME/UID of a job")
        limit, body = self._bytes_max(job), bytearray()
        if (request.content_length or 0) <= limit:
            await _read_more(request.content, body, limit)
        if max(len(body), request.content_length or 0) > limit:
            raise Refusal(TOO_LARGE, f"the report has more than {limit} bytes")
        return job, bytes(body)

    def _bytes_max(self, job: JobIdentity) -> int:
        """Bytes of a report that are read, by the gang's size now and as it was last reported. A follower doesn't know the job; for one
        that isn't there no more is read than for the smallest.
        """
        nodes = NODES_MAX if not self.standing().leads else self.inventory.gang_size((job.namespace, job.name), job.uid)
        newest = self.reports.of(job.uid)
        return report_bytes_max(max(nodes, 1 if newest is None else len(newest.report.nodes)))

    async def _check_sender(self, request: web.Request, job: JobIdentity, body: bytes, *, leads: bool) -> None:
        """The job's key signs; where it was made by an operator whose key was lost, the token of its live node 0 has to do. Raises
        Refusal.
        """
        try:
            return check_signature(self.master, job, body, request.headers.get(SIGNATURE_HEADER, ""))
        except Refusal:
            token = request.headers.get("Authorization", "")
            if not leads or not self.inventory.gang_size((job.namespace, job.name), job.uid) or not token:
                raise
            if not self.reports.may_ask(job.uid, token):
                raise
            observed = check_node_zero(self.inventory, await self.reports.bearer(job, self.review, token), job)
            self.reports.is_good(job.uid, token)
            if not has_other_key(observed, self.master):
                self.reports.unverified(job.uid)
                raise

    async def _take(self, request: web.Request, job: JobIdentity, body: bytes) -> web.Response:
        with self.reports.taking_time(job):
            report = parse_report(body, left_out=partial(self.reports.left_out, job))
        check_job(job, report)
        try:
            bearer = await self.reports.bearer(job, self.review, request.headers.get("Authorization", ""))
        except Refusal:
            self.reports.asked_in_vain(job)
            raise
        observed = check_node_zero(self.inventory, bearer, job)
        newest = self.reports.sequence(job.uid)
        if report.sequence <= newest:
            return web.json_response({"message": f"sequence must be greater than {newest}", "sequence": newest}, status=409)
        self.reports.take(report, bearer.pod_uid, self.now())
        key = (job.namespace, job.name)
        self.heard(key)
        if report.log and not await self._is_written(key):
            return web.json_response({"message": "what the report says could not be written yet"}, status=503)
        with self.reports.taking_time(job):
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


async def _read_more(content: StreamReader, body: bytearray, size: int) -> None:
    """Read until all is there, or more than `size` bytes."""
    while len(body) <= size and (chunk := await content.readany()):
        body += chunk


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _elsewhere(leader: str | None) -> web.Response:
    if leader is None:
        return web.json_response({"message": "no replica of the operator leads now"}, status=503)
    return web.json_response({"message": "another replica of the operator leads", "leader": leader}, status=421)


def tls_context(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION  # a client could ask for one handshake after the other in a single connection
    context.num_tickets = 0  # nobody comes back to a session
    load_certificate(context, certificates)
    return context


def load_certificate(context: ssl.SSLContext, certificates: Certificates) -> None:
    """Also into a context in use: connections from then on get the new certificate."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # ssl reads files only; the folder is in memory
        file.write(certificates.tls_key + certificates.tls_cert)
        file.flush()
        context.load_cert_chain(Path(file.name))


STUCK_SECONDS = 900.0
"""Seconds without any sign. A watch begins anew every five minutes, a request takes half a minute at most, a job a few of them."""
REFUSED_SECONDS = 300.0
"""Credentials are read again before: a token that is renewed in its file is at most a minute old."""
RESYNC_SECONDS_MAX = 3600.0
"""Lists of everything are asked for every ten minutes."""


@dataclass(frozen=True)
class Signs:
    """Signs of life of the loops of a replica that leads; times are time.monotonic."""

    leads_since: float | None = None
    """Start of the leadership; None if it doesn't lead, and none of the loops runs."""
    working_seconds: float = 0.0
    """Seconds since the oldest piece of work began."""
    waiting: int = 0
    """Jobs that wait for a worker."""
    worked: float = 0.0
    """Time at which a piece of work last ended."""
    listed: float = 0.0
    """Time at which everything was last listed; 0: never yet."""
    watched: Mapping[str, float] = field(default_factory=dict)
    """Plural of the kind → when its watch last asked for something or heard something."""
    refused_since: float | None = None
    """Time since which the API server only refuses this process's credentials, or shows a certificate that isn't trusted."""
    answers: bool = True
    """True if the last request was answered."""


def problem(signs: Signs, now: float) -> str:
    """Return the problem that a new process would mend; '' for a healthy one."""
    return next(_problems(signs, now), "")


def _problems(signs: Signs, now: float) -> Iterator[str]:
    if signs.refused_since is not None and now - signs.refused_since > REFUSED_SECONDS:
        yield "the API server refuses this process's credentials, or shows a certificate that it doesn't trust"
    if signs.leads_since is None:
        return
    if signs.working_seconds > STUCK_SECONDS:
        yield f"work on one job has not ended in {signs.working_seconds:.0f} s"
    if signs.waiting and now - max(signs.worked, signs.leads_since) > STUCK_SECONDS:
        yield f"{signs.waiting} jobs wait, and no work has ended in {now - signs.worked:.0f} s"
    for plural, last_sign in signs.watched.items():
        if now - last_sign > STUCK_SECONDS:
            yield f"the watch of {plural} has been silent for {now - last_sign:.0f} s"
    if signs.answers and now - max(signs.listed, signs.leads_since) > RESYNC_SECONDS_MAX:
        yield "the cluster could not be listed for an hour, though the API server answers"
