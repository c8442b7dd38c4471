"""The operator's queue and inventory: nothing is lost, nothing runs twice at once, nothing is older than what is known."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.cluster import TrainingCluster
from lockstep.cli.clusters.deploymentplan import OPERATOR_IMAGE, default_image
from lockstep.kube.cluster import ApiError, Cluster, Unreachable
from lockstep.kube.kinds import KINDS, path_of
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.events import JobEvent
from lockstep.plan.reconcile.reconcile import Plan
from lockstep.platforms.clusters.install import operator_objects
from lockstep.platforms.clusters.remove import uninstall
from lockstep.platforms.operator import execute, operator
from lockstep.platforms.operator.certificate import Certificates, make_certificates
from lockstep.platforms.operator.execute import Executor
from lockstep.platforms.operator.memory import queue
from lockstep.platforms.operator.memory.inventory import WATCHED, Inventory
from lockstep.platforms.operator.memory.queue import Key, WorkQueue, jittered
from support.api_stub import kubeconfig
from support.checkout import ROOT

CREATES_AT_ONCE = 10

MANIFESTS = ROOT / "manifests"
KEY = ("ns", "x")


def run_queue(queue: WorkQueue, until: asyncio.Event) -> None:
    async def both() -> None:
        working = asyncio.ensure_future(queue.run())
        try:
            async with asyncio.timeout(5):
                await until.wait()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    asyncio.run(both())


def test_a_refusal_that_asks_for_patience_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[float] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        done.set()
        raise ApiError(429, "TooManyRequests", "later", retry_after_seconds=7.0)

    queue = WorkQueue(work)
    monkeypatch.setattr(queue, "mark_later", lambda key, seconds: later.append(seconds))
    queue.mark(KEY)
    run_queue(queue, done)
    assert later == [7.0]


def test_marks_of_a_key_collapse_and_one_while_it_runs_runs_it_again() -> None:
    seen: list[int] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        seen.append(1)
        if len(seen) == 1:
            queue.mark(key)
            queue.mark(key)
            await asyncio.sleep(0)
        else:
            done.set()

    queue = WorkQueue(work)
    queue.mark(KEY)
    queue.mark(KEY)
    run_queue(queue, done)
    assert len(seen) == 2


def test_many_events_at_once_are_one_look_and_never_before_the_server_s_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Key] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        seen.append(key)
        done.set()

    held = ("ns", "held")
    queue = WorkQueue(work)
    queue.hold(held, 60.0)
    monkeypatch.setattr(queue, "mark_later", lambda key, seconds: seen.append((key[1], "later")))
    for _ in range(64):
        queue.mark_soon(KEY)
        queue.mark_soon(held)
    run_queue(queue, done)
    assert sorted(seen) == [("held", "later"), KEY]


def test_a_key_is_never_worked_on_by_two_workers() -> None:
    running, most, turns = 0, 0, 0
    done = asyncio.Event()

    async def work(key: Key) -> None:
        nonlocal running, most, turns
        running, turns = running + 1, turns + 1
        most = max(most, running)
        queue.mark(key)
        await asyncio.sleep(0)
        running -= 1
        if turns > 20:
            done.set()

    queue = WorkQueue(work, workers=4)
    queue.mark(KEY)
    run_queue(queue, done)
    assert most == 1


def delays_of_failing_work(monkeypatch: pytest.MonkeyPatch, failures: int, *, progresses: bool) -> list[float]:
    """The waits after so many failures in a row, in seconds; the first is 0.01, but for its jitter. `progresses`: something is achieved
    before each.
    """
    monkeypatch.setattr("lockstep.platforms.operator.memory.queue.BACKOFF_FIRST_SECONDS", 0.01)
    delays: list[float] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        if progresses:
            queue.progressed(key)
        if len(delays) == failures:
            done.set()
            return
        raise OSError("the API server is away")

    queue = WorkQueue(work)
    later = queue.mark_later
    monkeypatch.setattr(queue, "mark_later", lambda key, seconds: (delays.append(seconds), later(key, seconds)))
    queue.mark(KEY)
    run_queue(queue, done)
    return delays


def test_work_that_fails_is_done_again_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = delays_of_failing_work(monkeypatch, 4, progresses=False)
    assert [round(delay / 0.01) for delay in delays][:2] == [1, 2]
    assert all(0.75 * first <= delay <= 1.25 * first for delay, first in zip(delays, (0.01, 0.02, 0.04, 0.08), strict=True))
    assert len(set(delays)) == 4


def test_work_that_achieves_something_before_it_fails_is_done_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many writes of one job may fail, each once: that is no reason to let it wait for a minute."""
    assert max(delays_of_failing_work(monkeypatch, 8, progresses=True)) <= 0.0125


def test_what_an_operator_has_written_is_progress_and_what_others_have_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    led = operator.Operator(Ahead(), operator.Settings("agent:1"), b"", make_certificates(("localhost",), datetime.now(UTC)))
    led.observe("TrainingJob", {**item("x", 5), "spec": {}}, deleted=False)
    progress: list[Key] = []
    monkeypatch.setattr(led.queue, "progressed", progress.append)
    with pytest.raises(ApiError, match="modified"):
        asyncio.run(led.work(KEY))
    assert progress == []
    asyncio.run(led.work(KEY))
    assert progress == [KEY]


@pytest.mark.parametrize(
    ("error", "before"), [(ApiError(429, "TooManyRequests", "later", retry_after_seconds=60.0), 1), (OSError("away"), 4)]
)
async def test_marks_wait_where_the_server_asked_for_patience_and_where_the_work_fails_again_and_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, before: int
) -> None:
    monkeypatch.setattr("lockstep.platforms.operator.memory.queue.BACKOFF_FIRST_SECONDS", 60.0)
    turns: list[int] = []

    async def work(key: Key) -> None:
        turns.append(1)
        raise error

    queue = WorkQueue(work)
    working = asyncio.ensure_future(queue.run())
    for _ in range(50):
        queue.mark(KEY)
        await asyncio.sleep(0)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert len(turns) == before


def test_namespaces_take_turns_and_none_has_more_than_half_of_the_workers() -> None:
    order: list[str] = []
    most: dict[str, int] = {}
    running: list[str] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        running.append(key[0])
        most[key[0]] = max(most.get(key[0], 0), running.count(key[0]))
        await asyncio.sleep(0.001)
        running.remove(key[0])
        order.append(key[0])
        if len(order) == 203:
            done.set()

    queue = WorkQueue(work, workers=8)
    for number in range(200):
        queue.mark(("crowded", f"x{number}"))
    for number in range(3):
        queue.mark(("quiet", f"x{number}"))
    run_queue(queue, done)
    assert most["crowded"] == 4
    assert [place for place, namespace in enumerate(order) if namespace == "quiet"][-1] < 12


def test_a_namespace_whose_work_hangs_leaves_workers_to_the_others() -> None:
    done = asyncio.Event()

    async def work(key: Key) -> None:
        if key[0] == "stuck":
            await asyncio.Event().wait()
        done.set()

    queue = WorkQueue(work)
    for number in range(20):
        queue.mark(("stuck", f"x{number}"))
    queue.mark(("quiet", "x"))
    run_queue(queue, done)
    assert done.is_set()


def test_what_is_refused_is_sent_again_ever_less_often_unless_the_job_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    led = operator.Operator(Empty(None), operator.Settings("agent:1"), b"", Certificates("", "", "", ""))
    now, sent = [1000.0], list[float]()
    refusal = Notice("WriteRefused", "exceeded quota")

    async def refused(observed: Observed, plan: Plan) -> Notice:
        sent.append(now[0])
        return refusal

    monkeypatch.setattr(led.executor, "write_objects", refused)
    monkeypatch.setattr(operator.time, "monotonic", lambda: now[0])
    plan = Plan(create=({"kind": "Secret", "metadata": {"name": "x"}},))

    async def for_an_hour(generation: int) -> None:
        metadata = {**item("x", 1)["metadata"], "generation": generation}
        observed = Observed({"metadata": metadata, "spec": {}}, obstacle=refusal)
        end = now[0] + 3600
        while now[0] < end:  # something marks the job all the time
            assert (await led._write(KEY, observed, plan))[0] == refusal
            now[0] += 1

    asyncio.run(for_an_hour(1))
    waits = [b - a for a, b in itertools.pairwise(sent)]
    assert len(sent) < 60 and waits[0] < 5 and waits[-1] > 60
    asyncio.run(for_an_hour(2))
    assert sent[len(waits) + 2] - sent[len(waits) + 1] < 5


def test_jobs_that_were_refused_together_do_not_come_back_together() -> None:
    waits = [jittered(100.0) for _ in range(200)]
    assert min(waits) < 85 and 115 < max(waits) <= 125


@pytest.mark.parametrize(
    "answer",
    [
        ApiError(413, "RequestEntityTooLarge", "Request entity too large: limit is 3145728"),
        ApiError(422, "Invalid", 'TrainingJob.lockstep.dev "x" is invalid'),
        ApiError(403, "Forbidden", "a policy forbids it"),
        ApiError(500, "", "etcdserver: request is too large"),
        ApiError(500, "", "rpc error: code = ResourceExhausted desc = trying to send message larger than max (2201458 vs. 2097152)"),
    ],
    ids=["413", "422", "403", "etcd", "grpc"],
)
def test_a_status_that_is_refused_is_an_event_and_written_again_ever_less_often(answer: ApiError, monkeypatch: pytest.MonkeyPatch) -> None:
    led = operator.Operator(Empty(None), operator.Settings("agent:1"), b"", Certificates("", "", "", ""))
    now, sent, events = [1000.0], list[float](), list[JobEvent]()

    async def refused(observed: Observed, status: dict[str, Any]) -> None:
        if not status["conditions"][0]["message"]:  # the whole one, which comes before the smaller
            sent.append(now[0])
        raise answer

    async def send_events(observed: Observed, notes: tuple[JobEvent, ...], at: float) -> None:
        events.extend(notes)

    monkeypatch.setattr(led.executor, "write_status", refused)
    monkeypatch.setattr(led.executor, "send_events", send_events)
    monkeypatch.setattr(operator.time, "monotonic", lambda: now[0])

    async def for_an_hour(reason: str) -> None:
        status = {"conditions": [{"type": "Progressing", "status": "True", "reason": reason, "message": ""}]}
        end = now[0] + 3600
        while now[0] < end:  # something marks the job all the time
            left = await led._write_status(KEY, Observed(job()), status)
            assert left is not None and 0 < left <= 150
            now[0] += 1

    asyncio.run(for_an_hour("Starting"))
    waits = [b - a for a, b in itertools.pairwise(sent)]
    assert len(sent) < 60 and waits[0] < 5 and waits[-1] > 60
    assert {(event.type, event.reason) for event in events} == {("Warning", "StatusRefused")} and answer.message in events[0].message
    asyncio.run(for_an_hour("Running"))  # a transition is tried at once
    assert sent[len(waits) + 1] == 4600.0


@pytest.mark.parametrize(("refusals", "stored"), [(0, "whole"), (1, "short"), (2, "silent"), (3, None)])
def test_of_a_status_that_is_refused_as_much_is_stored_as_the_api_server_takes(
    refusals: int, stored: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    led = operator.Operator(Empty(None), operator.Settings("agent:1"), b"", Certificates("", "", "", ""))
    failed = {"type": "Failed", "status": "True", "reason": "UserCode", "message": "rank 1: a bad label", "observedGeneration": 3}
    other = {**failed, "type": "Accepted", "message": "the job can be used"}
    failure = {"rank": 1, "cause": "UserCode", "message": "a bad label", "lastLines": ["x"]}
    history = [{"message": "x"}]
    whole = {
        "conditions": [other, failed],
        "failure": failure,
        "attempts": 2,
        "startTime": "2026-01-01T00:00:00Z",
        "restartHistory": history,
    }
    sent: list[dict[str, Any]] = []

    async def write(observed: Observed, status: dict[str, Any]) -> None:
        sent.append(status)
        if len(sent) <= refusals:
            raise ApiError(400, "BadRequest", "words")

    async def send_events(observed: Observed, notes: tuple[JobEvent, ...], at: float) -> None:
        assert [note.reason for note in notes] == ["StatusRefused"]

    monkeypatch.setattr(led.executor, "write_status", write)
    monkeypatch.setattr(led.executor, "send_events", send_events)
    monkeypatch.setattr(led.metrics, "count", lambda *_: None)
    asyncio.run(led._write_status(KEY, Observed(job()), whole))
    short = {key: value for key, value in whole.items() if key != "restartHistory"} | {
        "conditions": [other, {**failed, "message": "rank 1: a bad label; StatusRefused: words"}],
        "failure": {"rank": 1, "cause": "UserCode", "message": "a bad label"},
    }
    silent = short | {
        "conditions": [{**other, "message": ""}, {**failed, "message": "StatusRefused: words"}],
        "failure": {"rank": 1, "cause": "UserCode", "message": ""},
    }
    assert sent == [whole, short, silent][: min(refusals, 2) + 1]
    assert (sent[-1] == {"whole": whole, "short": short, "silent": silent}[stored]) if stored else len(sent) == 3


def test_a_status_that_can_t_be_written_for_another_reason_is_the_queue_s_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    led = operator.Operator(Empty(None), operator.Settings("agent:1"), b"", Certificates("", "", "", ""))

    async def away(observed: Observed, status: object) -> None:
        raise ApiError(503, "ServiceUnavailable", "etcdserver: no leader")

    monkeypatch.setattr(led.executor, "write_status", away)
    with pytest.raises(ApiError, match="no leader"):
        asyncio.run(led._write_status(KEY, Observed(job()), {"conditions": []}))


def test_what_the_store_finds_too_large_is_an_obstacle_of_the_job() -> None:
    class Store(Empty):
        async def create(self, item: dict[str, Any]) -> dict[str, Any]:
            raise ApiError(500, "", "etcdserver: request is too large")

    plan = Plan(create=({"kind": "ConfigMap", "metadata": {"name": "x-run-1"}},))
    notice = asyncio.run(Executor(Store(None), lambda kind, found: None).write_objects(Observed(job()), plan))
    assert notice is not None and notice.reason == "WriteRefused" and "request is too large" in notice.message


def test_who_waits_for_a_key_waits_for_work_that_began_later_and_did_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.platforms.operator.memory.queue.BACKOFF_FIRST_SECONDS", 0.01)
    turns: list[int] = []
    told: list[int] = []
    done = asyncio.Event()

    async def waits() -> None:
        await queue.worked(KEY)
        told.append(len(turns))
        done.set()

    async def work(key: Key) -> None:
        turns.append(1)
        if len(turns) == 1:
            waiting.append(asyncio.ensure_future(waits()))
            await asyncio.sleep(0.02)
        elif len(turns) == 2:
            raise OSError("the API server is away")

    waiting: list[asyncio.Future[None]] = []
    queue = WorkQueue(work)
    queue.mark(KEY)
    run_queue(queue, done)
    assert told == [3]


def item(name: str, version: int, **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "ns", "uid": "u", "resourceVersion": str(version), "labels": {"lockstep.dev/job": "x"}}
    return {"metadata": metadata, "spec": {"replicas": 1}, **more}


def job(version: int = 1, name: str = "x") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "uid": "u", "resourceVersion": str(version)}, "spec": {}}


def test_an_event_older_than_what_is_known_changes_nothing() -> None:
    found = Inventory()
    found.observe("TrainingJob", job(), deleted=False)
    assert found.observe("StatefulSet", item("x", 7), deleted=False) == {KEY}
    assert found.observe("StatefulSet", item("x", 6, spec={"replicas": 0}), deleted=False) == set()
    assert (found.observed(KEY) or pytest.fail("no job")).replicas == 1


def test_what_was_written_is_known_at_once_and_its_own_event_is_no_news() -> None:
    found = Inventory()
    found.observe("TrainingJob", job(), deleted=False)
    assert found.observe_write("StatefulSet", item("x", 7)) == {KEY}
    assert (found.observed(KEY) or pytest.fail("no job")).replicas == 1
    assert found.observe("StatefulSet", item("x", 7), deleted=False) == set()


def test_a_reply_that_comes_after_the_deletion_of_its_object_brings_nothing_back() -> None:
    found = Inventory()
    found.observe("TrainingJob", job(), deleted=False)
    found.observe("TrainingJob", job(9), deleted=True)
    assert found.observe_write("TrainingJob", job(8)) == set()
    assert found.observed(KEY) is None
    assert found.observe_write("TrainingJob", job(10)) == {KEY}  # one that was made after that deletion


READY = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}


def test_a_heartbeat_of_a_node_concerns_no_job() -> None:
    found = Inventory()
    found.observe("TrainingJob", job(), deleted=False)
    node = {"metadata": {"name": "n", "uid": "n", "resourceVersion": "1"}, "status": {"allocatable": {"cpu": "2"}, "conditions": [READY]}}
    assert found.observe("Node", node, deleted=False) == {KEY}
    beat = {
        **node,
        "metadata": {**node["metadata"], "resourceVersion": "2"},
        "status": {**node["status"], "conditions": [{**READY, "lastHeartbeatTime": "now"}]},
    }
    assert found.observe("Node", beat, deleted=False) == set()


def test_an_event_concerns_the_job_of_its_object_or_all_of_the_namespace_while_that_is_not_known() -> None:
    found = Inventory()
    for name in ("x", "y"):
        found.observe("TrainingJob", {**job(), "metadata": {**job()["metadata"], "name": name}}, deleted=False)
    found.observe("StatefulSet", item("x", 7), deleted=False)

    def event(name: str) -> dict[str, Any]:
        metadata = {"name": f"{name}.1", "namespace": KEY[0], "uid": f"event-{name}", "resourceVersion": "8"}
        return {"metadata": metadata, "reason": "FailedCreate", "involvedObject": {"kind": "StatefulSet", "name": name}}

    assert found.observe("Event", event("x"), deleted=False) == {(KEY[0], "x")}
    assert found.observe("Event", event("nobody-s"), deleted=False) == {(KEY[0], "x"), (KEY[0], "y")}


def test_a_job_that_waits_is_told_of_the_dev_environments_that_nobody_uses() -> None:
    inventory = Inventory()
    ready = {"conditions": [{"type": "Progressing", "status": "True", "reason": "Ready"}]}
    environment = {**job(2, "dev"), "spec": {"type": "Interactive"}, "status": ready}
    scheduled = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
    waits = {**item("x-0", 3), "spec": {}, "status": {"conditions": [scheduled]}}
    for kind, thing in (("TrainingJob", job()), ("TrainingJob", environment), ("Pod", waits)):
        inventory.observe(kind, thing, deleted=False)
    seen = inventory.observed(KEY)
    assert seen.unused == {("ns", "dev")}
    inventory.observe("TrainingJob", {**environment, **item("dev", 4)}, deleted=True)
    seen = inventory.observed(KEY)
    assert seen.unused == set()


def take_list(inventory: Inventory, kind: str, items: list[dict[str, Any]], version: int) -> set[Key]:
    listed, changed = inventory.take_in(kind, items)
    return changed | inventory.drop_others(kind, listed, version)


def test_a_list_that_says_what_is_known_concerns_no_job_and_else_those_of_what_is_new_or_gone() -> None:
    found = Inventory()
    take_list(found, "TrainingJob", [job(1, "x"), job(2, "y")], 2)
    assert take_list(found, "Pod", [item("x-0", 3)], 3) == {KEY}
    assert take_list(found, "Pod", [item("x-0", 3)], 4) == set()
    assert take_list(found, "Pod", [], 5) == {KEY}
    assert take_list(found, "TrainingJob", [job(1, "x")], 6) == {("ns", "y")}


def test_a_list_takes_away_what_was_lost_but_not_what_is_newer() -> None:
    found = Inventory()
    found.observe("TrainingJob", job(), deleted=False)
    found.observe("Service", item("old", 3), deleted=False)
    found.observe("Service", item("new", 12), deleted=False)
    take_list(found, "Service", [], 10)
    observed = found.observed(KEY)
    assert set(observed.objects) == {("Service", "new")}


def test_a_list_that_was_asked_for_before_a_deletion_brings_nothing_back() -> None:
    found = Inventory()
    found.observe("TrainingJob", job(), deleted=False)
    found.begin_lists()
    found.observe("StatefulSet", item("x", 7), deleted=True)
    take_list(found, "StatefulSet", [item("x", 6)], 6)
    assert (found.observed(KEY) or pytest.fail("no job")).stateful_set is None
    found.begin_lists()
    take_list(found, "StatefulSet", [item("x", 6)], 9)  # a later list has it: it wasn't this one that was deleted
    assert (found.observed(KEY) or pytest.fail("no job")).stateful_set is not None


class Empty(Cluster):
    """An API server whose lists are empty."""

    async def pages(
        self, kind: str, namespace: str | None = None, query: Mapping[str, str] | None = None, limit: int = 500, **_: bool
    ) -> AsyncIterator[dict[str, Any]]:
        yield {"items": [], "metadata": {"resourceVersion": "100"}}


async def test_what_was_deleted_before_a_watch_listed_is_noticed_by_another_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "RELIST_SECONDS", 0.0)
    led = operator.Operator(Empty(None), operator.Settings("agent:1"), b"", Certificates("", "", "", ""))
    led.observe("Pod", item("x-0", 3), deleted=False)
    async with asyncio.timeout(5):
        resynced, resync = asyncio.Event(), led.resync

        async def noted(every_job: bool) -> None:
            await resync(every_job)
            resynced.set()

        monkeypatch.setattr(led, "resync", noted)
        resyncing = asyncio.create_task(led.resync_forever())
        led.watch_missed()
        await resynced.wait()
        resyncing.cancel()
    assert led.inventory.item("Pod", ("ns", "x-0")) is None


class Ahead(Empty):
    """An API server whose job is newer than what any watch has told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.there = {**item("x", 9), "spec": {}}
        self.has_status = asyncio.Event()

    async def list(self, kind: str, namespace: str | None = None, query: Mapping[str, str] | None = None, **_: Any) -> dict[str, Any]:
        return {"items": [self.there] if (kind, query) == ("TrainingJob", {"fieldSelector": "metadata.name=x"}) else []}

    async def create(self, item: dict[str, Any]) -> dict[str, Any]:
        return item

    async def apply(self, item: dict[str, Any], **_: Any) -> dict[str, Any]:
        if item["metadata"]["resourceVersion"] != self.there["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        self.has_status.set()
        return {**self.there, "metadata": {**self.there["metadata"], "resourceVersion": "10"}, "status": item["status"]}


async def test_a_job_that_is_newer_than_what_a_watch_has_told_is_read() -> None:
    """Its event may never come: nothing else would be written of the job until everything is listed again."""
    tls = make_certificates(("localhost",), datetime.now(UTC))
    cluster = Ahead()
    led = operator.Operator(cluster, operator.Settings("agent:1"), b"", tls)
    led.observe("TrainingJob", {**item("x", 5), "spec": {}}, deleted=False)
    async with asyncio.timeout(10):
        working = asyncio.create_task(led.queue.run())
        await cluster.has_status.wait()
        working.cancel()


class Guarded(Empty):
    """It refuses lists of the namespaces in `closed`; of others it has a job."""

    def __init__(self, *closed: str) -> None:
        super().__init__(None)
        self.closed = set(closed)

    async def pages(
        self, kind: str, namespace: str | None = None, query: Mapping[str, str] | None = None, limit: int = 500, **_: bool
    ) -> AsyncIterator[dict[str, Any]]:
        if namespace in self.closed:
            raise ApiError(403, "Forbidden", f"cannot list {kind} in namespace {namespace}")
        job = {"metadata": {**item("x", 5)["metadata"], "namespace": namespace, "uid": f"u-{namespace}"}, "spec": {}}
        yield {"items": [job] if kind == "TrainingJob" else [], "metadata": {"resourceVersion": "100"}}


def test_whoever_takes_the_operator_s_rights_away_in_a_namespace_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when a new leader begins; jobs there are left alone until all of it may be listed again."""
    api = Guarded("b")
    led = operator.Operator(api, operator.Settings("agent:1", namespaces=("a", "b")), b"", Certificates("", "", "", ""))
    marked: list[Key] = []
    monkeypatch.setattr(led.queue, "mark", marked.append)
    asyncio.run(led.resync())
    assert led.synced and marked == [("a", "x")]
    led.observe("TrainingJob", {"metadata": {**item("x", 7)["metadata"], "namespace": "b", "uid": "u-b"}, "spec": {}}, deleted=False)
    assert asyncio.run(led.work(("b", "x"))) is None
    api.closed.clear()
    marked.clear()
    asyncio.run(led.resync(every_job=False))
    assert marked == [("b", "x")]


def test_an_operator_that_may_list_nothing_does_not_begin() -> None:
    led = operator.Operator(Guarded("a", "b"), operator.Settings("agent:1", namespaces=("a", "b")), b"", Certificates("", "", "", ""))
    with pytest.raises(ApiError):
        asyncio.run(led.resync())
    assert not led.synced


def test_a_list_of_an_earlier_revision_is_of_a_store_that_was_restored() -> None:
    """Newer objects are gone, older ones are as the list has them, and what changes from then on counts, whatever its revision."""
    found = Inventory()
    for name, version in (("x", 900), ("gone", 950)):
        found.observe("TrainingJob", item(name, version, old=True), deleted=False)
    found.begin_lists()
    listed, _ = found.take_in("TrainingJob", [item("x", 400, old=False)])
    assert KEY in found.drop_others("TrainingJob", listed, 500)
    assert found.has_gone_back and found.jobs() == [KEY]
    assert found.job_objects()[0]["old"] is False
    found.observe("TrainingJob", item("x", 501, newer=True), deleted=False)
    assert "newer" in found.job_objects()[0]


def test_a_change_during_a_list_is_no_restored_store() -> None:
    found = Inventory()
    found.observe("TrainingJob", item("x", 5), deleted=False)
    found.begin_lists()
    found.observe("TrainingJob", item("x", 900), deleted=False)
    listed, _ = found.take_in("TrainingJob", [item("x", 5)])
    found.drop_others("TrainingJob", listed, 7)
    assert not found.has_gone_back and found.job_objects()[0]["metadata"]["resourceVersion"] == "900"


def test_an_operator_whose_server_went_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "RELIST_SECONDS", 0.0)
    led = operator.Operator(Empty(None), operator.Settings("agent:1"), b"", Certificates("", "", "", ""))
    led.observe("Pod", item("x-0", 101), deleted=False)
    led.watch_missed()
    with pytest.raises(operator.WentBack, match="restored"):
        asyncio.run(asyncio.wait_for(led.resync_forever(), 5))


class Busy(Empty):
    """An API server that has no time at first."""

    refusals = 2

    async def pages(
        self, kind: str, namespace: str | None = None, query: Mapping[str, str] | None = None, limit: int = 500, **_: bool
    ) -> AsyncIterator[dict[str, Any]]:
        if self.refusals:
            self.refusals -= 1
            raise ApiError(429, "TooManyRequests", "later")
        async for page in super().pages(kind, namespace, query, limit):
            yield page


async def test_a_leader_whose_first_list_is_refused_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "START_RETRY_SECONDS", 0.0)
    cluster = Busy(None)
    led = operator.Operator(cluster, operator.Settings("agent:1"), b"", Certificates("", "", "", ""))
    async with asyncio.timeout(5):
        watching = asyncio.Event()

        async def watch(told: object) -> None:
            watching.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(led, "_watch", watch)
        running = asyncio.create_task(led.run())
        await watching.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert led.synced and cluster.refusals == 0


async def test_an_error_whose_body_is_cut_off_is_a_broken_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(20):

        async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 1000\r\n\r\n<html>")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(cut, "127.0.0.1") as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, url)))
            async with await Cluster.connect() as cluster:
                with pytest.raises(Unreachable, match="broke: ClientPayloadError"):
                    await cluster.list("Pod", "ns")


class Events(Cluster):
    """An API server that takes an object of a name once."""

    def __init__(self) -> None:
        super().__init__(None)
        self.names: list[str] = []

    async def create(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["metadata"]["name"] in self.names:
            raise ApiError(409, "AlreadyExists", "it is there")
        self.names.append(item["metadata"]["name"])
        return item


class Full(Empty):
    """A namespace with a quota that has no room for another ConfigMap."""

    applied: list[str]
    status = 403

    async def create(self, item: dict[str, Any]) -> dict[str, Any]:
        raise ApiError(self.status, "Forbidden", "exceeded quota: " + "x" * 10_000)

    async def apply(self, item: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.applied.append(f"{item['kind']} {item['spec']['replicas']}")
        return item


@pytest.mark.parametrize("status", [400, 403, 413, 422])
@pytest.mark.parametrize(("replicas", "applied"), [(0, ["StatefulSet 0"]), (2, [])])
def test_a_refused_object_keeps_a_gang_from_starting_and_never_from_ending(replicas: int, applied: list[str], status: int) -> None:
    cluster = Full(None)
    cluster.applied, cluster.status = [], status
    log = {"kind": "ConfigMap", "metadata": {"name": "x-log"}}
    plan = Plan(create=(log,), apply=({"kind": "StatefulSet", "metadata": {"name": "x"}, "spec": {"replicas": replicas}},))
    observed = Observed({"metadata": item("x", 1)["metadata"], "spec": {}})
    notice = asyncio.run(Executor(cluster, lambda kind, found: None).write_objects(observed, plan))
    assert notice is not None and "exceeded quota" in notice.message and len(notice.message) < 2000
    assert cluster.applied == applied


class Names(Empty):
    """An API server where somebody has the Service's name."""

    def __init__(self, taken: str) -> None:
        super().__init__(None)
        self.taken = taken
        self.under_way = self.most_under_way = 0
        self.did: list[str] = []

    async def create(self, item: dict[str, Any]) -> dict[str, Any]:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if item["kind"] == self.taken:
            raise ApiError(409, "AlreadyExists", "it is there")
        self.did.append(f"POST {item['kind']}")
        return {**item, "metadata": {**item["metadata"], "uid": f"made-{item['kind']}"}}

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
        return {"metadata": {"name": name, "uid": "theirs"}}

    async def delete(self, kind: str, namespace: str | None, name: str, uid: str | None = None, grace_seconds: int | None = None) -> None:
        self.did.append(f"DELETE {kind} {uid}")


def started(cluster: Names, *kinds: str, **plan: Any) -> Notice | None:
    create = tuple({"kind": kind, "metadata": {"name": kind.lower()}, "spec": {"replicas": 2}} for kind in kinds)
    observed = Observed({"metadata": item("x", 1)["metadata"], "spec": {}})
    return asyncio.run(Executor(cluster, lambda kind, found: None).write_objects(observed, Plan(create=create, **plan)))


def test_a_start_is_one_round_trip_and_taken_back_where_somebody_has_a_name() -> None:
    free, taken = Names(""), Names("Service")
    assert started(free, "Secret", "Service", "StatefulSet", at_once=True) is None
    assert free.most_under_way == 3
    notice = started(taken, "Secret", "Service", "StatefulSet", at_once=True)
    assert notice is not None and notice.reason == "NameTaken"
    assert taken.did == ["POST Secret", "POST StatefulSet", "DELETE StatefulSet made-StatefulSet"]


async def test_many_starts_at_once_take_few_connections() -> None:
    cluster = Names("")
    executor = Executor(cluster, lambda kind, found: None)
    create = tuple({"kind": kind, "metadata": {"name": kind.lower()}} for kind in ("Secret", "Service", "ConfigMap"))
    observed = Observed({"metadata": item("x", 1)["metadata"], "spec": {}})
    await asyncio.gather(*(executor.write_objects(observed, Plan(create=create, at_once=True)) for _ in range(16)))
    assert (cluster.most_under_way, len(cluster.did)) == (CREATES_AT_ONCE, 48)


def test_a_start_in_whose_way_something_was_makes_its_pods_last() -> None:
    taken, free = Names("Service"), Names("")
    assert started(taken, "Secret", "Service", "StatefulSet") is not None
    assert taken.did == ["POST Secret"]
    assert started(free, "Secret", "Service", "StatefulSet") is None
    assert (free.did[-1], free.most_under_way) == ("POST StatefulSet", 2)


def test_a_start_that_another_operator_left_half_made_is_taken_back_too() -> None:
    there = {"kind": "StatefulSet", "metadata": {"name": "x", "uid": "half"}, "spec": {"replicas": 2}}
    taken = Names("Service")
    assert started(taken, "Secret", "Service", half_made=(there,)) is not None
    assert taken.did == ["POST Secret", "DELETE StatefulSet half"]


def test_an_event_that_another_operator_told_of_the_same_version_of_the_job_is_not_told_again() -> None:
    cluster, note = Events(), JobEvent("Normal", "Suspended", "no pods")
    for version in (7, 7, 8):
        executor = Executor(cluster, lambda kind, item: None)  # each time one that has just been started
        asyncio.run(executor.send_events(Observed(job(version)), (note,), 1.0))
    assert len(cluster.names) == 2


def test_the_operator_watches_none_of_the_events_that_it_writes() -> None:
    written: list[dict[str, Any]] = []

    class Written(Empty):
        async def create(self, item: dict[str, Any]) -> dict[str, Any]:
            written.append(item)
            return item

    asyncio.run(
        Executor(Written(None), lambda kind, item: None).send_events(Observed(job()), (JobEvent("Warning", "ClusterNotFound", "m"),), 1.0)
    )
    (selector,) = [watched.field_selector.split(",") for watched in WATCHED if watched.kind == "Event"]
    assert f"involvedObject.kind!={written[0]['involvedObject']['kind']}" in selector


class Takes(Cluster):
    """An API server that takes everything but what is there already."""

    def __init__(self, there: str = "") -> None:
        super().__init__(None)
        self.there = there

    async def create(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["metadata"]["name"] == self.there:
            raise ApiError(409, "AlreadyExists", "it is there")
        return item

    async def apply(self, item: dict[str, Any], **_: Any) -> dict[str, Any]:
        return item

    async def delete(self, kind: str, namespace: str | None, name: str, uid: str | None = None, grace_seconds: int | None = None) -> None:
        pass


def test_every_create_change_and_delete_is_one_line_of_the_log_with_the_job_s_uid(caplog: pytest.LogCaptureFixture) -> None:
    def item(kind: str, name: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "metadata": {"name": name, "uid": f"uid-{name}"}, **more}

    plan = Plan(
        delete=(item("ConfigMap", "x-run-old"),), force_delete=(item("Pod", "x-1"),),
            create=(item("Service", "x-headless"), item("Secret", "there")),
        apply=(item("StatefulSet", "x", spec={"replicas": 0}),), claims=(item("PersistentVolumeClaim", "w"),),
    )  # fmt: skip
    seen = Observed(job(7))
    with caplog.at_level("INFO"):
        assert asyncio.run(Executor(Takes("there"), lambda kind, item: None).write_objects(seen, plan)) is None
    begin = f"{seen.namespace}/{seen.name} (uid {seen.uid}): "
    assert all(line.startswith(begin) for line in caplog.messages)
    assert {line.removeprefix(begin) for line in caplog.messages} == {
        "deleted ConfigMap x-run-old", "deleted by force Pod x-1", "created Service x-headless", "created PersistentVolumeClaim w",
        "changed StatefulSet x, 0 replicas",
    }  # fmt: skip


def test_the_operator_may_list_and_watch_every_kind_that_it_watches() -> None:
    roles = [i for i in yaml.safe_load_all((MANIFESTS / "operator/base/clusterrole.yaml").read_text()) if i["kind"] == "ClusterRole"]
    rights = {
        (g, r, v) for role in roles for rule in role["rules"] for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]
    }
    needed = {(KINDS[w.kind].api_version.rpartition("/")[0], KINDS[w.kind].plural, v) for w in WATCHED for v in ("list", "watch")}
    assert needed <= rights
    assert {right for right in rights if right[2] in ("list", "watch")} == needed
    assert not any("*" in right for right in rights)


CODE = {"name": "python", "claim": "env", "mountPath": "/opt/lockstep", "storageClass": "c"}
MODELS = {"name": "models", "claim": "shared", "mountPath": "/models", "storageClass": "c"}


@pytest.mark.parametrize(("volumes", "image"), [([CODE, MODELS], "trainer:1"), ([MODELS], OPERATOR_IMAGE), ([], OPERATOR_IMAGE)])
def test_the_operator_runs_from_a_jobs_image_only_where_a_volume_has_its_code(volumes: list[dict[str, str]], image: str) -> None:
    spec = {"image": "trainer:1", "pod": {"volumes": volumes}}
    assert default_image(TrainingCluster.model_validate({"metadata": {"name": "p"}, "spec": spec})) == image


@pytest.mark.parametrize("platform", ["OpenShift", "Kubernetes"])
def test_deploy_sends_everything_before_what_needs_it(platform: str) -> None:
    rdma = {"enabled": True}
    spec = {
        "platform": platform, "network": {"rdma": rdma}, "security": {"ipcLock": True},
        "pod": {"volumes": [CODE, MODELS], "env": [{"name": "A", "value": "$b"}]},
    }  # fmt: skip
    profile = TrainingCluster.model_validate({"metadata": {"name": "p"}, "spec": spec})
    objects = operator_objects(profile, "registry/operator:1", namespace="jobs", manifests=MANIFESTS, revision="r1")
    kinds = [item["kind"] for item in objects]
    assert kinds[:2] == ["CustomResourceDefinition"] * 2
    deployment = objects[kinds.index("Deployment")]
    before = ("ServiceAccount", "Role", "RoleBinding", "Service", "TrainingCluster", "Lease", "PodDisruptionBudget")
    assert kinds.index("Deployment") > max(kinds.index(kind) for kind in before)
    claims = [(i["metadata"]["namespace"], i["metadata"]["name"]) for i in objects if i["kind"] == "PersistentVolumeClaim"]
    assert claims == [("lockstep-system", "env"), ("jobs", "env"), ("jobs", "shared")]
    pod = deployment["spec"]["template"]
    container = pod["spec"]["containers"][0]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert values == {"LOCKSTEP_AGENT_IMAGE": "registry/operator:1", "LOCKSTEP_POD": None, "LOCKSTEP_POD_IP": None, "A": "$$b"}
    assert {"name": "python", "mountPath": "/opt/lockstep", "readOnly": True} in container["volumeMounts"]
    assert not any(
        "models" in (item["name"], item.get("persistentVolumeClaim", {}).get("claimName"))
        for item in (*container["volumeMounts"], *pod["spec"]["volumes"])
    )
    assert pod["metadata"]["annotations"] == {"lockstep.dev/revision": "r1"}
    assert ("runAsUser" in pod["spec"]["securityContext"]) == (platform == "Kubernetes")
    bound = [i for i in objects if i["kind"] == "RoleBinding" and i["metadata"]["namespace"] == "jobs"]
    assert [i["roleRef"]["name"] for i in bound] == (["lockstep-rdma"] if platform == "OpenShift" else [])
    assert ("SecurityContextConstraints" in kinds) == (platform == "OpenShift")


def test_the_operators_pods_get_the_registry_logins_and_stay_off_gpu_nodes() -> None:
    pod = {"imagePullSecrets": ["login"], "tolerations": [{"operator": "Exists"}], "runtimeClassName": "nvidia"}
    for said in (pod, {}):
        profile = TrainingCluster.model_validate({"metadata": {"name": "p"}, "spec": {"pod": said}})
        objects = operator_objects(profile, "operator:1", namespace="jobs", manifests=MANIFESTS)
        found = next(item for item in objects if item["kind"] == "Deployment")["spec"]["template"]["spec"]
        assert found.get("imagePullSecrets") == ([{"name": "login"}] if said else None)
        assert "tolerations" not in found and "runtimeClassName" not in found


def test_paths_are_those_of_the_api() -> None:
    assert path_of("Pod", "ns", "x-0", "log") == "/api/v1/namespaces/ns/pods/x-0/log"
    assert path_of("TrainingCluster", None, "p") == "/apis/lockstep.dev/v1alpha1/trainingclusters/p"
    assert path_of("StatefulSet") == "/apis/apps/v1/statefulsets"


class Recorded(Cluster):
    """An API server that has everything and writes down what it is told to delete."""

    def __init__(self, claims: dict[str, list[str]]) -> None:
        self.claims = claims
        self.jobs = [{"kind": "TrainingJob", "metadata": {"name": "x", "namespace": "jobs"}}]
        self.deleted: list[tuple[str, str]] = []

    async def list(self, kind: str, namespace: str | None = None, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        items = {"TrainingJob": self.jobs, "PersistentVolumeClaim": self.claims.get(namespace or "", [])}
        return {"items": items.get(kind, [])}

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any] | None:
        return {}

    async def delete(self, kind: str, namespace: str | None, name: str, uid: str | None = None, grace_seconds: int | None = None) -> None:
        self.deleted.append((kind, name))


@pytest.mark.parametrize("kept", [True, False])
def test_uninstall_removes_jobs_first_and_everything_but_claims(kept: bool) -> None:
    profile = TrainingCluster.model_validate({"metadata": {"name": "p"}, "spec": {"platform": "Kubernetes"}})
    objects = operator_objects(profile, "operator:1", namespace="jobs", manifests=MANIFESTS)
    cluster = Recorded({"lockstep-system": ["a claim"]} if kept else {})
    said: list[str] = []
    asyncio.run(uninstall(cluster, objects, said.append))
    assert cluster.deleted[:2] == [("TrainingJob", "x"), ("Deployment", "lockstep-operator")]
    kinds = [kind for kind, _ in cluster.deleted]
    assert kinds.index("TrainingCluster") < kinds.index("CustomResourceDefinition")
    assert "PersistentVolumeClaim" not in kinds
    assert ("Namespace", "jobs") not in cluster.deleted
    assert (("Namespace", "lockstep-system") in cluster.deleted) != kept
    assert ("Namespace lockstep-system stays: it holds claims" in said) == kept


def test_nothing_stays_of_namespaces_and_of_jobs_that_labels_made_up() -> None:
    inventory = Inventory()
    for number in range(200):
        made = {**item(f"c-{number}", number + 1), "data": {}}
        made["metadata"] = {**made["metadata"], "namespace": f"ns-{number}", "labels": {"lockstep.dev/job": f"job-{number}"}}
        inventory.observe("ConfigMap", made, deleted=False)
        inventory.observe("ConfigMap", made, deleted=True)
    assert (len(inventory._by_job), len(inventory._in_namespace)) == (0, 0)


def test_a_pod_with_the_job_s_labels_that_is_no_node_of_it_counts_for_nothing() -> None:
    """`kubectl debug --copy-to --keep-labels` makes one, and a suspended job would wait for its end for ever."""
    inventory = Inventory()
    inventory.observe("TrainingJob", job(), deleted=False)
    for name in ("x-0", "x-10", "x-2", "x-0-debug", "x", "y-0", "x-", "x-y-1"):
        inventory.observe("Pod", {**item(name, 3), "spec": {}, "status": {}}, deleted=False)
    seen = inventory.observed(KEY)
    assert {pod["metadata"]["name"] for pod in seen.pods} == {"x-0", "x-10", "x-2"}


def test_what_a_policy_changes_back_is_sent_again_ever_less_often_and_another_wish_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reply of another version brings the next look at the job: the operator and the policy would write as fast as they can."""
    now, sent, policy = [1000.0], list[tuple[float, int]](), [True]

    class Store(Empty):
        async def apply(self, item: dict[str, Any], **_: Any) -> dict[str, Any]:
            sent.append((now[0], item["spec"]["replicas"]))
            stored = {"image": "mirror/a"} if policy[0] else item["spec"]["template"]
            metadata = {**item["metadata"], "resourceVersion": str(len(sent))}
            return {**item, "metadata": metadata, "spec": {**item["spec"], "template": stored}}

    monkeypatch.setattr(operator.time, "monotonic", lambda: now[0])
    executor = Executor(Store(None), lambda kind, reply: None)

    def wish(replicas: int) -> None:
        metadata = {"name": "x", "uid": "s", "resourceVersion": str(len(sent))}
        wanted = {"kind": "StatefulSet", "metadata": metadata, "spec": {"replicas": replicas, "template": {"image": "a"}}}
        asyncio.run(executor.write_objects(Observed(job()), Plan(apply=(wanted,))))
        now[0] += 1

    for _ in range(1800):
        wish(2)
    assert 5 < len(sent) < 40
    wish(0)  # a stop waits for nobody
    assert sent[-1] == (2800.0, 0)
    policy[0] = False
    for _ in range(200):
        wish(2)
    written = [at for at, replicas in sent if replicas == 2 and at > 2950]
    assert len(written) > 40  # and what is taken as it was sent is never held back


def test_of_a_policy_s_long_words_a_kibibyte_is_repeated() -> None:
    for text in (
        execute._refused(ApiError(403, "Forbidden", "x" * 5000)).message,
        execute.status_refused(ApiError(403, "Forbidden", "x" * 5000)).message,
    ):
        assert text.count("x" * 1024) == 1 and len(text) < 1200
