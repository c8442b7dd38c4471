"""The operator's waits: how soon it works, tries again and gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.kube.cluster import ApiError, Cluster
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.events import SentEvents
from lockstep.platforms.files import transfer
from lockstep.platforms.operator import execute, operator, replica, report_server
from lockstep.platforms.operator.certificate import Certificates
from lockstep.platforms.operator.execute import Executor
from lockstep.platforms.operator.memory import queue
from lockstep.platforms.operator.memory.inventory import Inventory
from lockstep.platforms.operator.memory.queue import WorkQueue
from lockstep.platforms.operator.operator import Operator, Settings
from lockstep.platforms.operator.report_server import Reports, ReportServer
from lockstep_gang.contract.report import JOB_HEADER
from lockstep_machine.wire import Gone
from support.fake_cluster import FakeCluster
from unit.virtual_time import VirtualClock, clock_of, forever

KEY = ("ns", "x")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = clock_of(monkeypatch, queue)
    monkeypatch.setattr(queue, "jittered", lambda seconds: seconds)
    return clock


async def test_work_that_fails_is_done_again_after_a_quarter_of_a_second_and_ever_later_to_a_minute(clock: VirtualClock) -> None:
    times: list[float] = []

    async def work(key: object) -> None:
        times.append(clock.now)
        if len(times) < 13:
            raise OSError("the API server is away")

    made = WorkQueue(work)
    running = asyncio.ensure_future(made.run())
    made.mark(KEY)
    await asyncio.sleep(1000)
    running.cancel()
    waits = [later - first for first, later in pairwise(times)]
    assert waits == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60], rel=0.05)


async def test_what_failed_four_times_in_a_row_is_not_done_before_its_wait_is_over_whatever_changes(clock: VirtualClock) -> None:
    times: list[float] = []

    async def work(key: object) -> None:
        times.append(clock.now - 1000.0)
        raise OSError("the API server is away")

    made = WorkQueue(work)
    running = asyncio.ensure_future(made.run())
    for _ in range(50):
        made.mark(KEY)
        await asyncio.sleep(0.125)
    running.cancel()
    assert times == pytest.approx([0, 0.125, 0.25, 0.375, 2.375], abs=0.01)


async def test_events_within_a_twentieth_of_a_second_are_one_piece_of_work(clock: VirtualClock) -> None:
    times: list[float] = []

    async def work(key: object) -> None:
        times.append(clock.now - 1000.0)

    made = WorkQueue(work)
    running = asyncio.ensure_future(made.run())
    for _ in range(4):
        made.mark_soon(KEY)
        await asyncio.sleep(0.01)
    await asyncio.sleep(5)
    running.cancel()
    assert times == pytest.approx([0.05], abs=0.01)


async def patient(did: Callable[[], None]) -> None:
    async def call() -> None:
        did()
        raise OSError

    await queue.patiently("x", call)


async def authority(did: Callable[[], None]) -> None:
    made = replica.Replica.__new__(replica.Replica)
    made._cluster, made._settings = cast(Any, None), cast(Any, SimpleNamespace(namespace="ns"))
    made._operator = cast(Any, SimpleNamespace(tls=SimpleNamespace(ca_cert="")))
    await made._publish_authority()


async def secrets(did: Callable[[], None]) -> None:
    async def keep(now: object) -> None:
        did()

    made = replica.Replica.__new__(replica.Replica)
    made._cluster, made.keep_secrets = cast(Any, None), keep  # type: ignore[method-assign, assignment]
    await made._keep_secrets_forever()


@pytest.mark.parametrize(("work", "seconds"), [(patient, 2.0), (authority, 600.0), (secrets, 60.0)])
async def test_what_goes_on_for_ever_is_done_so_often(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, work: Callable[[Callable[[], None]], Coroutine[Any, Any, None]], seconds: float
) -> None:
    times: list[float] = []

    async def publish(*_: object) -> None:
        times.append(clock.now)

    monkeypatch.setattr(replica, "publish_authority", publish)
    monkeypatch.setattr(replica, "_now", lambda cluster: clock.now)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4.5 * seconds):
            await work(lambda: times.append(clock.now))
    assert [later - first for first, later in pairwise(times)] == pytest.approx([seconds] * (len(times) - 1))
    assert len(times) in (4, 5)


@pytest.mark.parametrize(
    ("unserved", "lists_until", "times"),
    [
        (set(), 0.0, [(600, True), (1200, True)]),
        ({"b"}, 0.0, [(second, second % 600 == 0) for second in range(60, 1300, 60)]),
        (set(), 30.0, [(2, False), (12, False), (22, False), (32, False), (632, True), (1232, True)]),
    ],
    ids=["quiet", "a right is lacking", "a watch fails every second"],
)
async def test_when_everything_is_listed_again(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, unserved: set[str], lists_until: float, times: list[tuple[float, bool]]
) -> None:
    listed: list[tuple[float, bool]] = []

    async def resync(every_job: bool) -> None:
        listed.append((round(clock.now - 1000.0), every_job))

    monkeypatch.setattr(operator, "time", clock)
    led = Operator(Cluster(cast(Any, None)), Settings("agent:1"), b"", Certificates("", "", "", ""))
    led._unserved, led.resync = unserved, resync  # type: ignore[method-assign, assignment]
    resyncing = asyncio.ensure_future(led.resync_forever())
    while clock.now < 1000.0 + lists_until:
        led.watch_missed()
        await asyncio.sleep(1)
    await asyncio.sleep(1299 - lists_until)
    resyncing.cancel()
    assert listed == times


async def test_a_list_that_fails_is_asked_for_again_ten_seconds_later(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[float] = []

    async def resync(every_job: bool) -> None:
        listed.append(round(clock.now - 1000.0))
        if len(listed) < 3:
            raise ApiError(429, "TooManyRequests", "later")

    monkeypatch.setattr(operator, "time", clock)
    led = Operator(Cluster(cast(Any, None)), Settings("agent:1"), b"", Certificates("", "", "", ""))
    led.resync = resync  # type: ignore[method-assign, assignment]
    resyncing = asyncio.ensure_future(led.resync_forever())
    led.watch_missed()
    await asyncio.sleep(100)
    resyncing.cancel()
    assert listed == [2, 12, 22]


def test_a_stranger_s_tokens_are_asked_about_every_five_seconds_and_another_key_is_remembered_for_two_minutes(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_server, "time", clock)
    reports, asked, known = Reports(), list[int](), list[int]()
    reports.unverified("u")
    for second in range(200):
        asked += [second] if reports.may_ask("u", f"token {second}") else []
        known += [second] if reports.is_unverified("u") else []
        clock.now += 1
    assert asked == [*range(0, 200, 5)] and known == [*range(120)]


def test_a_body_has_ten_seconds_and_last_lines_have_six_to_be_written(clock: VirtualClock) -> None:
    request: Any = SimpleNamespace(headers={JOB_HEADER: "ns/x/u"}, content=SimpleNamespace(readany=forever), content_length=None)
    server = ReportServer(b"m", forever, Inventory(), lambda key: None, written=forever)
    assert clock.seconds_of(server.receive(request)) == 10.0
    assert clock.seconds_of(server._is_written(KEY)) == 6.0


def test_events_hold_up_a_status_for_fifteen_seconds(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeCluster):
        create = forever  # type: ignore[assignment]

    event = execute.JobEvent("Normal", "Running", "m")
    monkeypatch.setattr(execute, "worth_sending", lambda sent, events, now: (SentEvents(), events))
    job: Any = {"metadata": {"name": "x", "namespace": "ns", "uid": "u", "resourceVersion": "1"}}
    assert clock.seconds_of(Executor(Slow().as_cluster, lambda kind, item: None).send_events(Observed(job), (event,), 1.0)) == 15.0


def test_a_transfer_that_breaks_six_times_without_progress_is_given_up(clock: VirtualClock) -> None:
    times: list[float] = []

    async def broken() -> Any:
        times.append(clock.now - 1000.0)
        raise Gone("the connection broke")

    clock.seconds_of(transfer.retried(broken, transfer.TransferProgress()))
    assert times == [0, 2, 6, 14, 29, 44]
