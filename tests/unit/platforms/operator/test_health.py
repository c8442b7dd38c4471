"""`/healthz` is false when a new process would mend something, and only then."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from aiohttp import ClientConnectorCertificateError
from aiohttp.test_utils import TestClient, TestServer

from lockstep.kube.cluster import Answers, ApiError, Cluster
from lockstep.kube.kubeconfig import Server
from lockstep.platforms.operator import operator
from lockstep.platforms.operator.certificate import Certificates
from lockstep.platforms.operator.report_server import Signs, problem
from support.checkout import ROOT

REFUSED_SECONDS = 300.0
RESYNC_SECONDS_MAX = 3600.0
STUCK_SECONDS = 900.0

MANIFESTS = ROOT / "manifests"
NOW = 100_000.0
OLD = NOW - STUCK_SECONDS - 1


@pytest.mark.parametrize(
    ("signs", "word"),
    [
        (Signs(leads_since=OLD, working_seconds=STUCK_SECONDS + 1, listed=NOW), "not ended"),
        (Signs(leads_since=OLD, waiting=3, worked=OLD, listed=NOW), "3 jobs wait"),
        (Signs(leads_since=OLD, listed=NOW, watched={"pods": NOW, "trainingjobs": OLD}), "watch of trainingjobs"),
        (Signs(leads_since=NOW - RESYNC_SECONDS_MAX - 1), "could not be listed"),
        (Signs(refused_since=NOW - REFUSED_SECONDS - 1), "credentials"),
    ],
)
def test_what_a_new_process_would_mend_is_a_problem(signs: Signs, word: str) -> None:
    assert word in problem(signs, NOW)


@pytest.mark.parametrize(
    "signs",
    [
        Signs(),
        Signs(waiting=3, working_seconds=1e6),  # it doesn't lead
        Signs(leads_since=OLD, listed=NOW, worked=OLD),  # nothing waits
        Signs(leads_since=NOW - 1, waiting=1000),  # it has just begun
        Signs(leads_since=NOW - RESYNC_SECONDS_MAX - 1, answers=False),  # the API server is away
        Signs(refused_since=NOW - 1),
    ],
)
def test_what_no_new_process_would_mend_is_none(signs: Signs) -> None:
    assert problem(signs, NOW) == ""


@pytest.mark.parametrize("heard", [lambda answers: answers.heard(401), lambda answers: answers.heard(0, is_untrusted=True)])
def test_a_server_that_takes_nothing_of_this_process_is_told_from_one_that_is_away(heard: Callable[[Answers], None]) -> None:
    answers = Answers()
    for code in (0, 200, 429, 503, 403, 0):
        answers.heard(code)
    assert answers.refused_since is None and not answers.is_answering
    heard(answers)
    since = answers.refused_since
    answers.heard(0)
    heard(answers)
    assert since is not None and answers.refused_since == since
    answers.heard(403)
    assert answers.refused_since is None


def test_for_how_long_the_server_has_answered_counts_from_its_last_outage() -> None:
    uptime = [1000.0]
    answers = Answers(lambda: uptime[0])
    assert answers.back_seconds() == 0
    for code in (0, 503, 200):
        answers.heard(code)
    story = (
        (1010.0, 200, 10.0),
        (1014.0, 0, 14.0),
        (1020.0, 404, 20.0),
        (1030.0, 0, 30.0),
        (1050.0, 500, 50.0),
        (1051.0, 200, 0.0),
        (1060.0, 403, 9.0),
    )
    for uptime[0], code, back in story:
        answers.heard(code)
        assert answers.back_seconds() == back


def test_an_operator_takes_no_node_for_lost_until_the_api_server_has_answered_for_a_while() -> None:
    uptime = [1000.0]
    led = operator.Operator(Cluster(None), operator.Settings("agent:1"), b"", Certificates("", "", "", ""))  # type: ignore[arg-type]
    led.cluster.answers = Answers(lambda: uptime[0])
    led.cluster.answers.heard(200)
    assert led.inventory.unsettled_seconds() == 40.0
    uptime[0] += 40.0 - 1
    assert led.inventory.unsettled_seconds() == 1.0
    uptime[0] += 2
    assert led.inventory.unsettled_seconds() == 0


class Refusing:
    """A connection on which nothing is taken."""

    server = Server("https://cluster")

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def request(self, *_: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self

    status, headers = 401, {"Retry-After": ""}

    async def read(self) -> bytes:
        return b'{"message":"Unauthorized","reason":"Unauthorized"}'


@pytest.mark.parametrize("untrusted", [False, True])
def test_a_request_that_is_refused_is_noted(untrusted: bool) -> None:
    error = ClientConnectorCertificateError(
        type("Key", (), {"host": "h", "port": 1, "is_ssl": True})(), ssl.SSLCertVerificationError("expired")
    )
    cluster = Cluster(Refusing(error if untrusted else None))  # type: ignore[arg-type]
    with pytest.raises((ApiError, OSError)):
        asyncio.run(cluster.fenced(lambda: None).get("Pod", "ns", "x"))
    assert cluster.answers.refused_since is not None


async def test_healthz_says_it_and_answers_with_503(monkeypatch: pytest.MonkeyPatch) -> None:
    led = operator.Operator(Cluster(None), operator.Settings("agent:1"), b"", Certificates("", "", "", ""))  # type: ignore[arg-type]
    replies = []
    async with TestClient(TestServer(led.server.application())) as client:
        for seen in (time.monotonic(), time.monotonic() - STUCK_SECONDS - 1):
            led._leads_since = led._listed = time.monotonic()
            led.watch_goes_on("pods")
            led._watched["pods"] = seen
            reply = await client.get("/healthz")
            replies.append((reply.status, await reply.text()))
    (healthy, _), (unhealthy, text) = replies
    assert (healthy, unhealthy) == (200, 503) and "watch of pods" in text


def stuck_work(led: operator.Operator, now: float) -> None:
    led.queue._running["ns", "x"] = now - STUCK_SECONDS - 1


def jobs_wait(led: operator.Operator, now: float) -> None:
    led.queue.mark(("ns", "x"))
    led.queue.last_end = now - STUCK_SECONDS - 1


def not_listed(led: operator.Operator, now: float) -> None:
    led._listed = now - RESYNC_SECONDS_MAX - 1


def refused(led: operator.Operator, now: float) -> None:
    led.cluster.answers.heard(401)
    led.cluster.answers.refused_since = now - REFUSED_SECONDS - 1


@pytest.mark.parametrize(
    ("happens", "word"),
    [(stuck_work, "not ended"), (jobs_wait, "1 jobs wait"), (not_listed, "could not be listed"), (refused, "credentials")],
)
def test_the_operator_shows_each_sign_that_it_is_judged_by(happens: Callable[[operator.Operator, float], None], word: str) -> None:
    led = operator.Operator(Cluster(None), operator.Settings("agent:1"), b"", Certificates("", "", "", ""))  # type: ignore[arg-type]
    now = time.monotonic()
    led._leads_since, led._listed, led.queue.last_end = now - 2 * RESYNC_SECONDS_MAX, now, now
    assert problem(led.signs(), now) == ""
    happens(led, now)
    assert word in problem(led.signs(), now)


def test_the_kubelet_asks_there_and_starts_the_process_anew() -> None:
    deployment = yaml.safe_load((MANIFESTS / "operator/base/deployment.yaml").read_text())
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    port = next(port["containerPort"] for port in container["ports"] if port["name"] == "health")
    environment = {"LOCKSTEP_AGENT_IMAGE": "agent:1", **{variable["name"]: "" for variable in container["env"]}}
    assert operator.Settings.from_environment(environment).health_port == port
