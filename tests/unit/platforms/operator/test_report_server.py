"""The report endpoint over real HTTP, with a TokenReview that says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from lockstep.api.names import REPORT_AUDIENCE
from lockstep.kube.cluster import ApiError
from lockstep.platforms.operator import report_server
from lockstep.platforms.operator.authenticate import POD_NAME_CLAIM, POD_UID_CLAIM, Refusal
from lockstep.platforms.operator.certificate import make_certificates, needs_renewal, renew, service_names
from lockstep.platforms.operator.memory.inventory import Inventory
from lockstep.platforms.operator.report_server import PATH, Reports, ReportServer, Standing, tls_context
from lockstep.platforms.operator.secrets import job_key
from lockstep.platforms.operator.tls_port import REPORTS, serving
from lockstep_gang.contract.proof import parse_key, report_signature
from lockstep_gang.contract.reply import FactType, parse_reply
from lockstep_gang.contract.report import RankCount, Report, State, report_body, report_bytes_max
from lockstep_gang.contract.run import JobIdentity
from lockstep_spec.codec import to_json
from unit.virtual_time import VirtualClock, forever

NODES_MAX = 1024

MASTER = b"m" * 32
LABELS = {"lockstep.dev/job": "x"}
REPORT = Report(JobIdentity("x", "ns", "job-uid"), "x-0", 5, 1, 0, State.RUNNING, "", (), RankCount(2, 2))


def owned(kind: str, name: str, uid: str, owner: str, **more: Any) -> dict[str, Any]:
    owners = [{"kind": "Owner", "name": "o", "uid": owner, "controller": True}]
    return {"kind": kind, "metadata": {"name": name, "namespace": "ns", "uid": uid, "labels": LABELS, "ownerReferences": owners}, **more}


RUNS = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}


def inventory(pods: int = 2, nodes: int | None = 2) -> Inventory:
    """Job x of so many nodes, with its StatefulSet and pods."""
    found = Inventory()
    job = {"metadata": {"name": "x", "namespace": "ns", "uid": "job-uid"}, "spec": {} if nodes is None else {"nodes": nodes}}
    found.observe("TrainingJob", job, deleted=False)
    found.observe("StatefulSet", owned("StatefulSet", "x", "set-uid", "job-uid", spec={"replicas": 2}), deleted=False)
    for node in range(pods):
        found.observe("Pod", owned("Pod", f"x-{node}", f"pod-{node}", "set-uid", spec={"nodeName": "n"}, status=RUNS), deleted=False)
    return found


def reviewed(pod: str = "x-0", uid: str = "pod-0", namespace: str = "ns", **status: Any) -> dict[str, Any]:
    extra = {POD_NAME_CLAIM: [pod], POD_UID_CLAIM: [uid]}
    user = {"username": f"system:serviceaccount:{namespace}:ml-dev-sa", "extra": extra}
    return {"authenticated": True, "audiences": [REPORT_AUDIENCE], "user": user, **status}


def signed(body: bytes, uid: str = "job-uid", master: bytes = MASTER, token: str = "t") -> dict[str, str]:  # noqa: S107 (no secret)
    """As a coordinator sends it; `uid`, `master`: whose key signs."""
    signature = report_signature(parse_key(job_key(master, uid)), body)
    return {"Authorization": f"Bearer {token}", "X-Lockstep-Job": "ns/x/job-uid", "X-Lockstep-Signature": signature}


@dataclass(frozen=True)
class Scene:
    """A server of reports, a connection to it, and the jobs that it told of."""

    connection: TestClient[Any, Any]
    server: ReportServer
    heard: list[tuple[str, str]]
    asked: list[str]
    """Tokens that the API server was asked about."""

    async def post(self, body: bytes | AsyncIterator[bytes], headers: Mapping[str, str]) -> tuple[int, Any]:
        """Status and JSON of the reply to a report."""
        async with self.connection.post(PATH, data=body, headers=headers) as reply:
            return reply.status, await reply.json()


@asynccontextmanager
async def served(review: dict[str, Any] | None = None, seen: Inventory | None = None) -> AsyncIterator[Scene]:
    """A scene in which a TokenReview says `review`; {}: there is no API server."""

    async def say(token: str) -> dict[str, Any]:
        scene.asked.append(token)
        if review == {}:
            raise ApiError(500, "InternalError", "no")
        return reviewed() if review is None else review

    heard: list[tuple[str, str]] = []
    server = ReportServer(MASTER, say, inventory() if seen is None else seen, heard.append)
    async with TestClient(TestServer(server.application())) as connection:
        scene = Scene(connection, server, heard, [])
        yield scene


def code(headers: dict[str, str], body: bytes, review: dict[str, Any] | None = None, seen: Inventory | None = None) -> int:
    """Status of the reply to one report, whose job is told of if it is taken."""

    async def post() -> int:
        async with served(review, seen) as scene:
            status, _ = await scene.post(body, headers)
            assert (status == 200) == (scene.heard == [("ns", "x")])
            return status

    return asyncio.run(post())


async def test_a_report_of_node_zero_is_kept_and_its_job_looked_at() -> None:
    async with served() as scene:
        body = report_body(REPORT)
        assert await scene.post(body, signed(body)) == (200, {"facts": [], "racks": []})
        kept = scene.server.reports.of("job-uid")
        assert (kept.report, kept.pod_uid, scene.heard) == (REPORT, "pod-0", [("ns", "x")])


async def test_the_reply_says_what_became_of_the_job_s_pods_also_of_one_that_is_gone() -> None:
    seen = inventory()
    mark = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "for y"}
    preempted = owned("Pod", "x-1", "pod-1", "set-uid", spec={}, status={"phase": "Running", "conditions": [mark]})
    async with served(seen=seen) as scene:
        scene.server.losses.see_pod(("ns", "x"), preempted, 0.0)
        seen.observe("Pod", preempted, deleted=True)
        body = report_body(REPORT)
        _, reply = await scene.post(body, signed(body))
    facts = parse_reply(json.dumps(reply).encode()).facts
    assert [(fact.type, fact.node, fact.pod_uid) for fact in facts if fact.node == 1] == [
        (FactType.PREEMPTED, 1, "pod-1"),
        (FactType.WAITING, 1, ""),
    ]


async def test_a_sequence_that_is_not_newer_is_answered_with_the_newest() -> None:
    async with served() as scene:
        for sequence, status, newest in ((5, 200, None), (5, 409, 5), (4, 409, 5), (6, 200, None)):
            body = report_body(replace(REPORT, sequence=sequence))
            answer, reply = await scene.post(body, signed(body))
            assert (answer, reply.get("sequence")) == (status, newest)
    assert len(scene.heard) == 2


@pytest.mark.parametrize(
    ("review", "refused"),
    [
        (reviewed(authenticated=False), 401),
        (reviewed(audiences=["https://kubernetes.default.svc"]), 401),
        (reviewed(pod="x-1", uid="pod-1"), 403),
        (reviewed(uid="an-earlier-pod"), 403),
        (reviewed(namespace="other"), 403),
        (reviewed(pod="y-0", uid="pod-0"), 403),
        (reviewed(user={"username": "system:serviceaccount:ns:ml-dev-sa"}), 403),
        (reviewed(user={"username": "alice", "extra": {POD_NAME_CLAIM: ["x-0"], POD_UID_CLAIM: ["pod-0"]}}), 403),
        ({}, 503),
    ],
    ids=["invalid", "audience", "node 1", "dead pod", "namespace", "other job", "no pod", "no service account", "no API server"],
)
def test_who_is_not_the_live_node_zero_is_refused(review: dict[str, Any], refused: int) -> None:
    body = report_body(REPORT)
    assert code(signed(body), body, review) == refused


def test_unsigned_wrongly_signed_or_changed_reports_are_refused() -> None:
    body = report_body(REPORT)
    assert code({"Authorization": "Bearer t"}, body) == 401
    assert code(signed(body, "another-job"), body) == 401
    assert code(signed(body), body.replace(b"Running", b"Waiting")) == 401


def test_a_report_without_token_is_refused() -> None:
    body = report_body(REPORT)
    headers = signed(body)
    del headers["Authorization"]
    assert code(headers, body) == 401


def large(size: int, report: Report = REPORT) -> bytes:
    """A report of so many bytes."""
    bare = len(json.dumps(to_json(report)))
    return json.dumps(to_json(replace(report, message="x" * (size - bare)))).encode()


@pytest.mark.parametrize(
    ("pods", "nodes", "size", "expected"),
    [
        (2, 2, report_bytes_max(2), 200),
        (2, 2, report_bytes_max(2) + 1, 413),
        (1, 64, report_bytes_max(64), 200),  # the spec's number
        (40, 2, report_bytes_max(40), 200),  # a gang that is to be smaller
        (40, 2, report_bytes_max(40) + 1, 413),
        (2, None, report_bytes_max(1024), 200),  # the cluster's number
        (2, None, report_bytes_max(1024) + 1, 413),
    ],
)
def test_a_report_is_as_large_as_its_gang_allows(pods: int, nodes: int | None, size: int, expected: int) -> None:
    seen = inventory(pods, nodes)
    body = large(size)
    assert (len(body), code(signed(body), body, seen=seen)) == (size, expected)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", json.dumps({"format": "lockstep-report/1"}).encode()])
def test_what_is_no_report_is_refused(body: bytes) -> None:
    assert code(signed(body), body) == 400


async def test_a_report_is_taken_without_what_cannot_be_read_which_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as scene:
        for sequence in (5, 6):
            value = to_json(replace(REPORT, sequence=sequence, state=State.FAILED)) | {"failure": {"rank": sequence}, "future": 1}
            body = json.dumps(value).encode()
            assert (await scene.post(body, signed(body)))[0] == 200
        newest = scene.server.reports.of("job-uid")
        assert newest is not None and (newest.report.state, newest.report.failure) == (State.FAILED, None)
    said = [record.getMessage() for record in caplog.records if "without what" in record.getMessage()]
    assert said == ["reports of ns/x/job-uid are taken without what this version can't read: report.failure.message is missing"]


@pytest.mark.parametrize("claim", [None, "", "ns/x", "ns/x/uid/more", "ns/x/" + "u" * 65, "NS/x/u", "ns/../u\u00e9"])
def test_what_names_no_job_is_refused(claim: str | None) -> None:
    body = report_body(REPORT)
    headers = {name: value for name, value in (signed(body) | {"X-Lockstep-Job": claim}).items() if value is not None}
    assert code(headers, body) == 401


def test_nothing_is_parsed_before_its_signature_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(body: bytes, **_: object) -> Report:
        raise AssertionError("parsed")

    monkeypatch.setattr(report_server, "parse_report", parse)
    body = report_body(REPORT)
    for headers in (signed(body, "another-job"), {**signed(body), "X-Lockstep-Signature": ""}):
        assert code(headers, body) == 401


async def test_a_body_that_comes_too_slowly_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_server, "BODY_SECONDS", 0.1)
    body = report_body(REPORT)

    async def drip() -> AsyncIterator[bytes]:
        yield body[:-1]
        await asyncio.Event().wait()

    async with served() as scene:
        assert (await scene.post(drip(), signed(body)))[0] == 408
        assert scene.heard == []


def test_only_a_signed_report_keeps_its_connection_from_being_given_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    proven: list[str] = []
    monkeypatch.setattr(report_server, "prove", lambda request, job: proven.append(request.path))
    body = report_body(REPORT)
    assert code(signed(body, "another-job"), body) == 401
    assert proven == []
    assert code(signed(body), body, {"authenticated": False}) == 401
    assert proven == [PATH]


@pytest.mark.parametrize("leads", [True, False])
async def test_a_tenant_s_own_key_takes_no_place_and_no_time_of_the_namespace_that_it_claims(
    monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    proven: list[str] = []
    monkeypatch.setattr(report_server, "prove", lambda request, job: proven.append(job.namespace))
    async with served() as scene:
        scene.server.standing = lambda: Standing(leads, None)
        body = report_body(replace(REPORT, job=JobIdentity("x", "ns", "uid-of-mallory")))
        headers = {**signed(body, "uid-of-mallory"), "X-Lockstep-Job": "ns/x/uid-of-mallory"}
        assert (await scene.post(body, headers))[0] == (403 if leads else 503)
        assert proven == ([] if leads else ["uid-of-mallory"])
        assert not scene.server.reports._free_at and scene.heard == []


def test_a_job_s_key_signs_for_that_job_only() -> None:
    seen = inventory()
    other = {"metadata": {"name": "y", "namespace": "ns", "uid": "other-uid"}, "spec": {}}
    seen.observe("TrainingJob", other, deleted=False)
    body = report_body(replace(REPORT, job=JobIdentity("y", "ns", "other-uid")))
    assert code(signed(body), body, seen=seen) == 403


JOB, NEIGHBOR = JobIdentity("x", "ns", "job-uid"), JobIdentity("y", "ns", "uid-of-y")
STRANGER = JobIdentity("x", "other", "uid-of-other")


def refusal(reports: Reports, job: JobIdentity) -> tuple[int, str] | None:
    """Status and Retry-After with which a report is refused; None: it is taken."""
    try:
        with reports.turn(job):
            return None
    except Refusal as refused:
        return refused.status, refused.headers["Retry-After"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    made = VirtualClock()
    monkeypatch.setattr(report_server, "time", made)
    monkeypatch.setattr(VirtualClock, "thread_time", VirtualClock.monotonic, raising=False)
    return made


def test_a_job_that_used_more_than_its_share_is_refused_at_once_and_others_are_not(clock: VirtualClock) -> None:
    """A tenth of the operator's time for a job, half of it for a namespace: 2 s of work are 20 s and 4 s, less the second ahead."""
    reports = Reports()
    with reports.taking_time(JOB):
        clock.now += 2.0
    assert refusal(reports, JOB) == (429, "19")
    assert refusal(reports, NEIGHBOR) == (429, "3")
    assert refusal(reports, STRANGER) is None
    clock.now += 3.1
    assert [refusal(reports, job) for job in (JOB, NEIGHBOR)] == [(429, "16"), None]
    clock.now += 16.0
    assert refusal(reports, JOB) is None


def test_a_job_has_one_report_at_a_time_and_a_namespace_sixteen(clock: VirtualClock) -> None:
    reports = Reports()
    with contextlib.ExitStack() as busy:
        for number in range(16):
            busy.enter_context(reports.turn(JobIdentity("x", "ns", f"uid-{number}")))
        assert refusal(reports, JobIdentity("x", "elsewhere", "uid-3")) == (429, "1")
        assert refusal(reports, NEIGHBOR) == (429, "1")
        assert refusal(reports, STRANGER) is None
    assert refusal(reports, NEIGHBOR) is None


def test_a_namespace_with_the_name_of_a_job_s_uid_uses_nothing_of_that_job(clock: VirtualClock) -> None:
    reports = Reports()
    with reports.taking_time(JobIdentity("x", JOB.uid, "uid-of-mallory")):
        clock.now += 2.0
    assert refusal(reports, JOB) is None


def test_what_was_used_is_forgotten_when_it_no_longer_counts_not_when_the_job_is_gone(clock: VirtualClock) -> None:
    reports = Reports()
    with reports.taking_time(JOB):
        clock.now += 2.0
    reports.forget(set())
    assert refusal(reports, JOB) == (429, "19")
    clock.now += 30.0
    reports.forget(set())
    assert not reports._free_at


async def test_a_report_beyond_the_share_is_told_when_to_come_again() -> None:
    async with served() as scene:
        for _ in range(30):
            scene.server.reports.asked_in_vain(JOB)
        body = report_body(REPORT)
        async with scene.connection.post(PATH, data=body, headers=signed(body)) as reply:
            assert (reply.status, reply.headers["Retry-After"], scene.heard) == (429, "29", [])


async def test_a_job_s_good_token_is_asked_about_once_a_minute_however_many_others_there_are(clock: VirtualClock) -> None:
    asked: list[str] = []

    async def review(token: str) -> dict[str, Any]:
        asked.append(token)
        return reviewed()

    reports = Reports()
    for second in (0, 15, 30, 45, 61):
        clock.now = 1000.0 + second
        await reports.bearer(JOB, review, "Bearer t")
        for number in range(5000):
            await reports.bearer(JobIdentity("y", "other", f"uid-{number}"), review, "Bearer other")
    assert asked.count("t") == 2


@pytest.mark.parametrize("change", ["pod gone", "pod ended", "pod of another set", "set of another job", "job gone"])
def test_a_pod_that_no_longer_belongs_to_the_job_is_refused(change: str) -> None:
    seen, body = inventory(), report_body(REPORT)
    match change:
        case "pod gone":
            seen.observe("Pod", owned("Pod", "x-0", "pod-0", "set-uid"), deleted=True)
        case "pod ended":
            seen.observe("Pod", owned("Pod", "x-0", "pod-0", "set-uid", spec={}, status={"phase": "Failed"}), deleted=False)
        case "pod of another set":
            seen.observe("Pod", owned("Pod", "x-0", "pod-0", "other-set", spec={}, status={"phase": "Running"}), deleted=False)
        case "set of another job":
            seen.observe("StatefulSet", owned("StatefulSet", "x", "set-uid", "earlier", spec={"replicas": 2}), deleted=False)
        case "job gone":
            seen.observe("TrainingJob", {"metadata": {"name": "x", "namespace": "ns", "uid": "job-uid"}, "spec": {}}, deleted=True)
    assert code(signed(body), body, seen=seen) == 403


async def test_a_replica_is_ready_from_its_first_sight_of_a_leader_on() -> None:
    async with served() as scene, TestClient(TestServer(scene.server.probes())) as kubelet:
        for path, leader, status in (
            ("/readyz", None, 503), ("/healthz", None, 200), ("/readyz", "10.0.0.1:8443", 200), ("/readyz", None, 200),
        ):  # fmt: skip
            scene.server.standing = lambda leader=leader: Standing(leads=False, leader=leader)
            async with kubelet.get(path) as reply:
                assert reply.status == status


@pytest.mark.parametrize(("leader", "status"), [("10.0.0.1:8443", 421), ("", 421), (None, 503)])
async def test_a_replica_that_does_not_lead_says_who_does_to_coordinators_only(leader: str | None, status: int) -> None:
    async with served(seen=Inventory()) as scene:
        scene.server.standing = lambda: Standing(leads=False, leader=leader)
        body = large(report_bytes_max(1024))  # it knows no job, and so no size
        answer, reply = await scene.post(body, signed(body))
        assert (answer, reply.get("leader")) == (status, leader)
        for headers in (signed(body, "another-job"), {}, {"Authorization": "Bearer t"}):
            answer, reply = await scene.post(body, headers)
            assert (answer, reply.get("leader")) == (401, None)
        assert scene.heard == []


async def test_last_lines_are_accepted_only_when_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.platforms.operator.report_server.WRITTEN_SECONDS", 0.05)
    async with served() as scene:
        scene.server.written = forever
        for sequence, log, status in ((6, ("done",), 503), (7, (), 200)):
            body = report_body(replace(REPORT, sequence=sequence, log=log))
            assert (await scene.post(body, signed(body)))[0] == status


NAMES = service_names("lockstep-operator", "lockstep-system")
TODAY = datetime.now(UTC)


def test_pods_that_know_the_authority_trust_the_server_before_and_after_a_renewal() -> None:
    first = make_certificates(NAMES, TODAY)
    second = renew(first, NAMES, TODAY)
    assert second.tls_cert != first.tls_cert

    async def get(tls: Any) -> int:
        server = ReportServer(MASTER, _never, Inventory(), lambda key: None)
        trusting = ssl.create_default_context(cadata=first.ca_cert)
        async with serving(server.probes(), "127.0.0.1", 0, tls_context(tls), REPORTS) as port, aiohttp.ClientSession() as session:
            url = f"https://127.0.0.1:{port}/healthz"
            async with session.get(url, ssl=trusting, server_hostname="lockstep-operator.lockstep-system.svc") as reply:
                return reply.status

    assert [asyncio.run(get(tls)) for tls in (first, second)] == [200, 200]
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        asyncio.run(get(make_certificates(NAMES, TODAY)))


async def _never(token: str) -> dict[str, Any]:
    raise AssertionError(token)


def test_a_certificate_is_renewed_a_month_before_its_end_and_for_other_names() -> None:
    made = make_certificates(NAMES, TODAY)
    assert not needs_renewal(made, NAMES, TODAY + timedelta(days=330))
    assert needs_renewal(made, NAMES, TODAY + timedelta(days=340))
    assert needs_renewal(made, service_names("lockstep-operator", "elsewhere"), TODAY)


def test_a_stateful_set_that_says_billions_costs_no_more_than_the_largest_job() -> None:
    """Whoever may edit StatefulSets may write any number into one, until the operator writes it back."""
    seen = inventory()
    forged = owned("StatefulSet", "x", "set-uid", "job-uid", spec={"replicas": 2**31 - 1})
    forged["metadata"]["resourceVersion"] = "9"
    seen.observe("StatefulSet", forged, deleted=False)
    assert seen.gang_size(("ns", "x"), "job-uid") == NODES_MAX
    body = report_body(REPORT)
    assert code(signed(body), body, seen=seen) == 200
    larger = b" " * (report_bytes_max(NODES_MAX) + 1)
    assert code(signed(larger), larger, seen=seen) == 413


def test_tokens_that_are_no_good_are_asked_about_once_a_second_however_well_the_reports_are_signed() -> None:
    """And five times a second for all jobs of a namespace."""
    asked: list[str] = []

    async def use(server: ReportServer, uids: list[str]) -> None:
        for number in range(40):
            server.reports._free_at = {part: until - 0.1 for part, until in server.reports._free_at.items()}  # a tenth of a second later
            uid = uids[number % len(uids)]
            body = report_body(replace(REPORT, job=JobIdentity(uid, "ns", uid), pod=f"{uid}-0", sequence=number))
            headers = {**signed(body, uid), "X-Lockstep-Job": f"ns/{uid}/{uid}", "Authorization": f"Bearer {number}"}
            request: Any = SimpleNamespace(
                headers=headers,
                content=SimpleNamespace(readany=body_of(body)),
                content_length=len(body),
                app=web.Application(),
                protocol=None,
            )
            await server.receive(request)

    def body_of(body: bytes) -> Callable[[], Awaitable[bytes]]:
        parts = [b"", body]

        async def readany() -> bytes:
            return parts.pop()

        return readany

    async def review(token: str) -> dict[str, Any]:
        asked.append(token)
        return {"authenticated": False}

    def asked_by(jobs: int) -> int:
        asked.clear()
        seen, uids = inventory(), [f"job-{number}" for number in range(jobs)]
        for uid in uids:
            seen.observe("TrainingJob", {"metadata": {"name": uid, "namespace": "ns", "uid": uid}, "spec": {"nodes": 2}}, deleted=False)
        asyncio.run(use(ReportServer(MASTER, review, seen, lambda key: None), uids))
        return len(asked)

    assert 4 <= asked_by(1) <= 7
    assert 18 <= asked_by(40) <= 28


def test_a_signed_report_of_a_job_that_is_not_there_asks_about_no_token() -> None:
    body = report_body(REPORT)
    assert code(signed(body), body, {}, seen=Inventory()) == 403
