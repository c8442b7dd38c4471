"""Nobody's clock is believed alone: a machine's that is ahead fails, deletes and delays nothing."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any

import pytest

from lockstep.api.objects import Object
from lockstep.api.status import ActiveTime
from lockstep.kube.clock import ServerClock
from lockstep.kube.cluster import Cluster
from lockstep.kube.kubeconfig import Server
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.clocks import active_seconds, active_time, held_until, until_expired, until_start_overdue
from lockstep.plan.reconcile.events import JobEvent
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.reconcile.status import due
from lockstep.plan.times import timestamp
from lockstep.platforms.operator import operator
from lockstep.platforms.operator.certificate import make_certificates
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, asked, fresh, report, settled

OFF_SECONDS = 30.0
SLOW_SECONDS = 5.0
PROGRESS_SECONDS = 15.0

YEAR = 366 * 86400.0


class World:
    """A machine and an API server, each with a clock."""

    def __init__(self, machine: float = NOW, server: float = NOW) -> None:
        self.machine, self.server, self.uptime = machine, server, 1000.0
        self.clock = ServerClock(lambda: self.machine, lambda: self.uptime)

    def hears(self, took: float = 0.1) -> None:
        self.clock.heard(formatdate(self.server, usegmt=True), self.uptime - took)

    def wait(self, seconds: float) -> None:
        self.machine, self.server, self.uptime = self.machine + seconds, self.server + seconds, self.uptime + seconds


def test_a_clock_that_agrees_is_believed() -> None:
    world = World(machine=NOW + 0.7)
    world.hears()
    assert (world.clock.now(), world.clock.off_seconds) == (NOW + 0.7, 0.0)


@pytest.mark.parametrize("off", [YEAR, -YEAR, OFF_SECONDS + 2])
def test_a_clock_that_is_off_is_replaced_by_the_server_s(off: float) -> None:
    world = World(machine=NOW + off)
    world.hears()
    world.wait(5)
    world.hears()
    assert world.clock.off_seconds == off
    assert abs(world.clock.now() - world.server) <= 1
    world.machine = world.server  # somebody sets it
    world.hears()
    assert (world.clock.now(), world.clock.off_seconds) == (world.server, 0.0)


def test_a_date_that_is_set_changes_nothing_before_a_reply_is_there() -> None:
    world = World()
    world.hears()
    world.machine += YEAR
    assert world.clock.now() == NOW
    world.hears()
    assert (world.clock.now(), world.clock.off_seconds) == (NOW, YEAR)


def test_what_is_no_date_or_came_late_says_nothing() -> None:
    world = World(machine=NOW + YEAR)
    for date in (None, "", "yesterday"):
        world.clock.heard(date, world.uptime)
    world.hears(took=SLOW_SECONDS + 1)
    assert world.clock.off_seconds == 0.0


class Answers:
    """A connection to an API server with another clock."""

    server = Server("https://cluster")
    status = 200

    def __init__(self, ahead: float) -> None:
        self.headers = {"Date": formatdate(ServerClock().now() - ahead, usegmt=True)}

    async def request(self, *_: Any) -> Any:
        return self

    async def read(self) -> bytes:
        return b"{}"


def led_by(ahead: float) -> operator.Operator:
    """An operator that has heard one reply."""
    tls = make_certificates(("localhost",), datetime.now(UTC))
    led = operator.Operator(Cluster(Answers(ahead)), operator.Settings("agent:1"), b"", tls)  # type: ignore[arg-type]
    asyncio.run(led.cluster.get("Pod", "ns", "x"))
    return led


def test_every_reply_says_what_time_it_is_there() -> None:
    assert led_by(0).cluster.clock.off_seconds == 0
    assert abs(led_by(3600).cluster.clock.off_seconds - 3600) < 60


@pytest.mark.parametrize("ahead", [0, 3600])
def test_what_waits_for_clocks_to_agree_is_looked_at_again_soon_and_said(ahead: float, monkeypatch: pytest.MonkeyPatch) -> None:
    led, told = led_by(ahead), list[str]()
    led.inventory.unsettled_seconds = lambda: 0.0  # its API server has answered for long enough

    async def send_events(observed: Observed, notes: tuple[JobEvent, ...], now: float) -> None:
        told.extend(note.reason for note in notes)

    async def write(*_: Any) -> None:
        pass

    for name, does in (("send_events", send_events), ("write_objects", write), ("write_status", write)):
        monkeypatch.setattr(led.executor, name, does)
    key = ("ns", "x")
    waits = []
    for number, spec in enumerate(({"ttlSecondsAfterFinished": 86400}, {"ttlSecondsAfterFinished": None})):
        job = ended().job
        metadata = {**job["metadata"], "resourceVersion": str(number + 1)}
        led.inventory.observe("TrainingJob", {**job, "metadata": metadata, "spec": {**job["spec"], **spec}}, deleted=False)
        waits.append(asyncio.run(led.work(key)))
    assert told.count("ClocksDiffer") == (1 if ahead else 0)  # nothing would be done to the second
    assert all((wait or 1e9) <= 60.0 for wait in waits) == bool(ahead)


def test_no_time_has_passed_since_a_moment_that_lies_ahead() -> None:
    assert active_seconds(ActiveTime(since=timestamp(NOW + YEAR), earlier_seconds=7), NOW) == 7


def ended(**spec: object) -> Observed:
    observed = settled(report())
    conditions = [
        {
            "type": "Complete",
            "status": "True",
            "reason": "Complete",
            "message": "",
            "lastTransitionTime": timestamp(NOW),
            "observedGeneration": 1,
        }
    ]
    job = {**observed.job, "spec": {**observed.job["spec"], **spec}, "status": {"conditions": conditions, "completionTime": timestamp(NOW)}}
    return replace(observed, job=job, pods=(), objects={})


def test_while_clocks_differ_no_job_is_deleted_by_its_ttl() -> None:
    observed = ended(ttlSecondsAfterFinished=60)
    assert reconcile(observed, None, CONTEXT, NOW + 61).delete == (observed.job,)
    assert reconcile(observed, None, replace(CONTEXT, clock_off=True), NOW + YEAR).delete == ()


def test_while_clocks_differ_no_job_fails_by_its_deadline_or_its_start() -> None:
    observed = settled(report())
    observed = asked(observed, activeDeadlineSeconds=60, startTimeoutSeconds=60)
    observed.job["status"]["active"] = {"since": timestamp(NOW - 3600), "earlierSeconds": 0}
    assert "DeadlineExceeded" in json.dumps(reconcile(observed, None, CONTEXT, NOW).status)
    plan = reconcile(observed, None, replace(CONTEXT, clock_off=True), NOW)
    assert "DeadlineExceeded" not in json.dumps(plan.status) and "StartTimeout" not in json.dumps(plan.status)


def trainer(step: int, at: float) -> Object:
    return {"trainer": {"step": step, "lastUpdateTime": timestamp(at)}}


@pytest.mark.parametrize("ahead", [60.0, 3600.0, YEAR])
def test_progress_is_written_though_a_fast_clock_wrote_the_last(ahead: float) -> None:
    assert due(trainer(5, NOW + ahead), trainer(50, NOW), NOW) == (True, None)


def test_progress_waits_for_its_turn() -> None:
    write, wait = due(trainer(5, NOW - 5), trainer(50, NOW), NOW)
    assert not write and wait is not None and 0 < wait <= PROGRESS_SECONDS


def test_times_that_lie_ahead_are_stored_anew() -> None:
    observed = ended()
    observed.job["status"] |= {"completionTime": timestamp(NOW + YEAR)}
    plan = reconcile(observed, None, CONTEXT, NOW)
    assert plan.status is not None and plan.status["completionTime"] == timestamp(NOW)
    running = settled(report())
    running.job["status"]["active"] = {"since": timestamp(NOW + YEAR), "earlierSeconds": 7}
    active = active_time(running, NOW)
    assert active is not None and active.to_dict() == {"since": timestamp(NOW), "earlierSeconds": 7}


def test_no_wait_is_longer_than_what_was_asked_for() -> None:
    expiring = ended(ttlSecondsAfterFinished=60)
    expiring.job["status"]["completionTime"] = timestamp(NOW + YEAR)
    assert until_expired(expiring, NOW) == 60
    held = settled(report())
    failed = {"type": "Failed", "status": "True", "reason": "RanksFailed"}
    job = {**held.job, "spec": {**held.job["spec"], "restart": {"holdOnFailureSeconds": 60}}}
    until = held_until(replace(held, job={**job, "status": {"conditions": [failed], "completionTime": timestamp(NOW + YEAR)}}), None, NOW)
    assert until is None or until <= NOW + 60
    starting = after(fresh(), reconcile(fresh(), None, CONTEXT, NOW))
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(NOW + YEAR)}
    pod = {
        "metadata": {"name": "x-0", "uid": "p", "creationTimestamp": timestamp(NOW - 10)},
        "spec": {"nodeName": "n"},
        "status": {"conditions": [placed]},
    }
    starting.objects["StatefulSet", "x"]["spec"]["replicas"] = 1
    left = until_start_overdue(replace(starting, pods=(pod,)), NOW)
    assert left is not None and left <= float(starting.job["spec"].get("startTimeoutSeconds", 1800)) - 10
