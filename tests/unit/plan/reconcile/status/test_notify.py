"""The message about a job's end: what it says, where it may go, and that it is told at least once and not for ever."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lockstep.api.job import TrainingJobSpec
from lockstep.api.objects import Object
from lockstep.api.status import NotificationStatus
from lockstep.kube.cluster import ApiError
from lockstep.plan.observed import Delivery, Observed
from lockstep.plan.reconcile.clocks import without_operator
from lockstep.plan.reconcile.notify import Message, due_message, next_try, url_problem
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.platforms.operator import notify
from lockstep.platforms.operator.notify import Notifier, SafeResolver
from unit.gang.test_scale import until
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, UID, after, fresh

BOUND_SECONDS = 1800.0

NOTIFY = {"webhookSecretRef": {"name": "hook", "key": "url"}}
TIMES = {"startTime": "2027-01-15T07:00:00Z", "completionTime": "2027-01-15T08:02:00Z"}


def ended(outcome: str = "Complete", message: str = "every rank ended well", notify: Object | None = NOTIFY, **status: Any) -> Observed:
    conditions = [{"type": outcome, "status": "True", "reason": outcome, "message": message, "lastTransitionTime": TIMES["completionTime"]}]
    observed = fresh(**({"notify": notify} if notify else {}))
    return replace(observed, job={**observed.job, "status": {"conditions": conditions, **TIMES, **status}})


def body(observed: Observed) -> Object:
    message = due_message(observed)
    assert message is not None
    return message.body


def test_a_complete_job_is_told_with_step_and_duration() -> None:
    found = body(ended(trainer={"step": 100, "totalSteps": 100}, goodput={"percentage": 91}))
    assert found == {
        "id": f"{UID}-0-Complete", "namespace": "ns", "name": "x", "outcome": "Complete", "message": "every rank ended well", "step": 100,
        "totalSteps": 100, "durationSeconds": 3720, "goodputPercentage": 91,
        "text": "TrainingJob ns/x is complete at step 100 of 100 after 1h2m",
    }  # fmt: skip


def test_a_failed_job_is_told_with_its_cause() -> None:
    found = body(ended("Failed", "rank 1 ran out of memory", failure={"cause": "OutOfMemory", "lastLines": ["secret"]}))
    assert found["cause"] == "OutOfMemory"
    assert found["text"] == "TrainingJob ns/x has failed (OutOfMemory) after 1h2m: rank 1 ran out of memory"
    assert "secret" not in str(found)


def test_of_a_long_reason_a_thousand_characters_are_told() -> None:
    assert body(ended("Failed", "x" * 4096))["message"] == "x" * 1000


@pytest.mark.parametrize(
    "observed",
    [fresh(notify=NOTIFY), ended(notify=None), ended(notification={"id": f"{UID}-0-Complete", "delivered": False})],
    ids=["runs", "nobody asks", "was told"],
)
def test_nothing_is_told_of_a_job_that_runs_or_asks_nothing_or_was_told(observed: Observed) -> None:
    assert due_message(observed) is None


def test_another_end_after_a_retry_is_told_again() -> None:
    assert body(ended(retry=1, notification={"id": f"{UID}-0-Failed", "delivered": True}))["id"] == f"{UID}-1-Complete"


@pytest.mark.parametrize(
    "url",
    ["https://hooks.example.com/a?b=c", "https://10.0.0.7:8443/x", "http://hook.team.svc/x", "http://hook.team.svc.cluster.local:80", "http://127.0.0.1:9/x",
     "http://[::1]:9/", "http://localhost"],
)  # fmt: skip
def test_these_urls_are_fine(url: str) -> None:
    assert url_problem(url) is None


@pytest.mark.parametrize(
    "url",
    ["http://hooks.example.com", "http://10.0.0.7/", "http://hook.svc.evil.com", "ftp://a.svc/", "file:///etc/passwd", "https://", "", "a b", "https://a\n.com",
     "https://169.254.169.254/latest", "https://[fe80::1]/", "https://[::ffff:169.254.169.254]/", "https://0.0.0.0/", "https://a:99999/", "https://[bad"],
)  # fmt: skip
def test_these_urls_are_refused_without_being_shown(url: str) -> None:
    problem = url_problem(url)
    assert problem is not None
    assert not url or url not in problem


def test_tries_go_on_for_half_an_hour_ever_less_often() -> None:
    now, attempts, waits = NOW, 0, list[float]()
    while (wait := next_try(attempts := attempts + 1, NOW, now)) is not None:
        waits.append(wait)
        now += wait
    assert waits[:3] == [5, 10, 20]
    assert waits == sorted(waits)
    assert max(waits) == 300
    assert sum(waits) <= BOUND_SECONDS


def test_the_outcome_goes_to_status_and_a_failure_is_an_event() -> None:
    observed = ended()
    observed = replace(
        observed, delivery=Delivery("i", delivered=False, attempts=4, message="not delivered in 4 tries: the receiver answered 500")
    )
    plan = reconcile(observed, None, CONTEXT, NOW)
    assert plan.status is not None
    NotificationStatus.model_validate(plan.status["notification"])
    assert [(n.type, n.reason) for n in plan.events if n.reason.startswith("Notification")] == [("Warning", "NotificationFailed")]
    later = reconcile(replace(after(observed, plan), delivery=None), None, CONTEXT, NOW)
    assert later.status is None or later.status["notification"] == plan.status["notification"]
    assert not any(note.reason == "NotificationFailed" for note in later.events)


class Secrets:
    """A cluster that has one Secret, or none."""

    def __init__(self, url: str | None) -> None:
        self.url = url

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        assert (kind, namespace, name) == ("Secret", "ns", "hook")
        if self.url == "forbidden":
            raise ApiError(403, "Forbidden", "no")
        return None if self.url is None else {"data": {"url": b64encode(self.url.encode()).decode()}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(notify, "next_try", lambda attempts, ended, now: 0.01 if attempts < 3 else None)
    yield


def tell(cluster: Any, *, enabled: bool = True) -> Delivery:
    """What becomes of the end of a job."""

    async def run() -> Delivery:
        heard = asyncio.Event()
        notifier = Notifier(cluster, lambda key: heard.set(), enabled=enabled)
        notifier.look(ended())
        notifier.look(ended())  # somebody is at it
        await asyncio.wait_for(heard.wait(), 10)
        found = notifier.delivery(UID)
        assert found is not None
        notifier.look(ended())  # it was told: no further one
        assert not notifier._tasks or all(task.done() for task in notifier._tasks.values())
        return found

    return asyncio.run(run())


def received(*codes: int, location: str = "") -> tuple[Delivery, list[tuple[str, Object]]]:
    """Deliver to a receiver that answers with these codes, one after the other."""
    answers, bodies = list(codes), list[tuple[str, Object]]()

    async def take(request: web.Request) -> web.Response:
        bodies.append((request.headers["Lockstep-Notification-Id"], await request.json()))
        return web.Response(status=answers.pop(0), headers={"Location": location} if location else {})

    async def run() -> Delivery:
        app = web.Application()
        app.router.add_post("/{any}", take)
        async with TestServer(app, host="127.0.0.1") as server:
            heard = asyncio.Event()
            notifier = Notifier(Secrets(f"http://127.0.0.1:{server.port}/secret-path"), lambda key: heard.set())  # type: ignore[arg-type]
            notifier.look(ended())
            await asyncio.wait_for(heard.wait(), 10)
            found = notifier.delivery(UID)
            assert found is not None
            return found

    return asyncio.run(run()), bodies


def test_one_post_is_enough_when_it_is_heard() -> None:
    delivery, bodies = received(204)
    assert delivery == Delivery(f"{UID}-0-Complete", delivered=True, attempts=1, message="delivered")
    assert [(identity, sent["outcome"]) for identity, sent in bodies] == [(delivery.id, "Complete")]


def test_a_receiver_that_is_away_is_asked_again_with_the_same_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    delivery, bodies = received(503, 500, 200)
    assert (delivery.delivered, delivery.attempts) == (True, 3)
    assert len({identity for identity, _ in bodies}) == 1
    assert not any("secret-path" in record.getMessage() for record in caplog.records if record.name != "aiohttp.access")


def test_a_redirect_is_not_followed() -> None:
    delivery, bodies = received(302, 302, 302, location="http://127.0.0.1:1/elsewhere")
    assert delivery.message == "not delivered in 3 tries: the receiver answered 302, and redirects are not followed"
    assert len(bodies) == 3


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (None, "there is no key url in a Secret hook of namespace ns"),
        ("forbidden", "the operator may not read Secret hook of namespace ns: call it lockstep-notify"),
        ("http://example.com/token", "must begin with https://"),
        ("http://127.0.0.1:1/token", "no connection: refused"),
        ("https://2852039166/token", "no connection"),
        ("https://name.invalid/token", "can't be resolved"),
    ],
)
def test_what_stands_in_the_way_is_said_without_the_url(url: str | None, why: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    delivery = tell(Secrets(url))
    assert not delivery.delivered
    assert why in delivery.message
    assert "token" not in delivery.message + caplog.text


def test_an_administrator_can_turn_it_off() -> None:
    assert tell(Secrets("http://127.0.0.1:1/"), enabled=False).message == notify.OFF


def test_the_message_says_where_its_url_stands() -> None:
    assert isinstance(message := due_message(ended()), Message)
    assert (message.secret, message.key) == ("hook", "url")


def test_without_an_operator_it_is_known_that_nobody_will_tell() -> None:
    assert without_operator(TrainingJobSpec.model_validate(ended().job["spec"])) == ["spec.notify"]


def test_no_name_leads_to_a_link_local_address() -> None:
    async def resolve(name: str) -> list[str]:
        return [each["host"] for each in await SafeResolver().resolve(name, 443)]

    assert asyncio.run(resolve("127.0.0.1")) == ["127.0.0.1"]
    with pytest.raises(OSError, match="link-local"):
        asyncio.run(resolve("2852039166"))  # 169.254.169.254, as one number


class Tarpit:
    """A receiver: on /quick it answers, on any other path not before it is let go."""

    def __init__(self) -> None:
        self.open = self.most = 0
        self.let_go = asyncio.Event()

    async def take(self, request: web.Request) -> web.Response:
        if request.path != "/quick":
            self.open += 1
            self.most = max(self.most, self.open)
            await self.let_go.wait()
            self.open -= 1
        return web.Response()


class SecretsOfMany:
    """A cluster in which the Secret of each namespace names a path called as the namespace."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        url = f"http://127.0.0.1:{self.port}/{namespace}"
        return {"data": {"url": b64encode(url.encode()).decode()}}


def many(*namespaces: str) -> list[Observed]:
    """A job that has ended in each of these namespaces."""
    jobs = []
    for number, namespace in enumerate(namespaces):
        observed = ended()
        metadata = {**observed.job["metadata"], "namespace": namespace, "name": f"x{number}", "uid": f"uid-{number}"}
        jobs.append(replace(observed, job={**observed.job, "metadata": metadata}))
    return jobs


def told(jobs: list[Observed], *, first: int, together: int) -> Tarpit:
    """Tell the ends of these jobs to a tarpit, and let it go once `first` are told and `together` others hang."""
    pit = Tarpit()

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/{any}", pit.take)
        async with TestServer(app, host="127.0.0.1") as server:
            heard: list[str] = []
            notifier = Notifier(SecretsOfMany(server.port), lambda key: heard.append(key[0]))  # type: ignore[arg-type]
            for job in jobs:
                notifier.look(job)
            async with asyncio.timeout(30):
                await until(lambda: len(heard) >= first and pit.open >= together)
                assert len(heard) == first
                await asyncio.sleep(0.2)  # a further one would have come by now
                pit.let_go.set()
                await until(lambda: len(heard) == len(jobs))
            assert all(delivery is not None and delivery.delivered for delivery in map(notifier.delivery, (job.uid for job in jobs)))

    asyncio.run(run())
    return pit


def test_receivers_that_never_answer_delay_their_own_namespace_only() -> None:
    jobs = many(*["slow"] * 20, "quick")
    assert told(jobs, first=1, together=notify.OF_A_NAMESPACE).most == notify.OF_A_NAMESPACE


def test_tries_of_all_namespaces_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "AT_ONCE", 3)
    assert told(many(*(f"slow-{number}" for number in range(8))), first=0, together=3).most == 3


def test_a_try_ends_though_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "TRY_SECONDS", 0.05)

    async def run() -> Delivery:
        pit, heard = Tarpit(), asyncio.Event()
        app = web.Application()
        app.router.add_post("/{any}", pit.take)
        async with TestServer(app, host="127.0.0.1") as server:
            notifier = Notifier(SecretsOfMany(server.port), lambda key: heard.set())  # type: ignore[arg-type]
            notifier.look(ended())
            await asyncio.wait_for(heard.wait(), 30)
            pit.let_go.set()
            delivery = notifier.delivery(UID)
            assert delivery is not None
            return delivery

    assert "not delivered in 3 tries: no answer within" in asyncio.run(run()).message


def test_a_job_whose_end_lies_in_the_future_is_told_of_in_sixteen_tries() -> None:
    """The clock that wrote the end was wrong."""
    attempts = 1
    while next_try(attempts, NOW + 1e9, NOW) is not None:
        attempts += 1
    assert attempts - 1 == 16
