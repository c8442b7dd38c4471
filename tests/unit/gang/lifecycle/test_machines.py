"""Losses that nobody but the agent can explain, since no operator looks at its machine: it was off, or it slept."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.contract.messages import Checkpoint, Hello, RankExit, RankState, Start, Started, Step, Stopped, agent_message
from lockstep_gang.contract.report import Cause, State
from lockstep_gang.contract.run import ReportTarget, RestartPolicy
from lockstep_gang.coordinator import coordinator, machine
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.lifecycle.gang import Phase, Silence
from lockstep_gang.lifecycle.hang import with_pause
from lockstep_gang.lifecycle.history import begun_records, corrected_records, resume_gang
from lockstep_gang.lifecycle.losses import with_own_sleep
from lockstep_gang.lifecycle.observe import connection_closed
from lockstep_gang.lifecycle.silences import with_silence
from lockstep_spec.choices import Timeouts
from unit.gang.cases import KEY, make_run
from unit.gang.story import Story, hello
from unit.virtual_time import VirtualClock

HOSTS = {"restart": RestartPolicy(0, 0), "timeouts": Timeouts(return_seconds=86400)}
"""Nothing spare, and a day for a host that is away."""


def of_machine(node: int, boot: str = "boot-1", slept: float = 0.0, **known: Any) -> Hello:
    return replace(hello(node, **known), boot_id=boot, slept_seconds=slept)


def training(**changes: Any) -> Story:
    """A gang of two hosts whose ranks run, after a commit and seven steps more."""
    story = Story(make_run(**{"restart": RestartPolicy(3, 0)} | changes))
    for node in range(2):
        story.hears(node, of_machine(node))
    for node in range(2):
        story.hears(node, Started(1))
    return story.reports(0, Step(0, 40), Checkpoint(0, 40, "/c"), Step(0, 47))


def silent(story: Story, node: int = 1, seconds: float = 30.0) -> Story:
    """Nothing more is heard of a node, until its connection is given up and the others have stopped."""
    story.gang = with_silence(story.gang, Silence(node, story.now, arrives=False))
    story.waits(seconds)
    story.gang = connection_closed(story.gang, node, story.now, unheard=True)
    return story.waits(6).hears(1 - node, Stopped(1))


def test_a_machine_that_was_off_is_no_failure_of_the_job() -> None:
    story = silent(training())
    assert story.report.restarts_counted == 1
    story.waits(7200).hears(1, of_machine(1, "boot-2", known=1, instance="another"))
    (entry,) = story.report.history
    assert (entry.failure.message, entry.failure.cause) == ("node 1 was lost: its machine was off or started anew", Cause.NODE_LOST)
    assert (entry.counts, entry.lost_steps, story.report.restarts_counted, story.gang.attempt) == (False, 7, 0, 2)


def test_a_machine_that_is_back_before_its_loss_was_noticed_is_no_failure_of_the_job() -> None:
    story = training().waits(12).hears(1, of_machine(1, "boot-2", known=0, instance="another")).hears(0, Stopped(1))
    (entry,) = story.report.history
    assert (entry.failure.message, entry.counts) == ("node 1 was lost: its machine was off or started anew", False)


@pytest.mark.parametrize(
    ("back", "changes"),
    [
        (of_machine(1, "boot-1", known=1, instance="another"), {}),
        (of_machine(1, "", known=1, instance="another"), {}),
        (of_machine(1, "boot-1", slept=7200, known=1, instance="another"), {}),
        (of_machine(1, "boot-1", slept=60, known=1, attempt=1), {}),
        (of_machine(1, "boot-2", known=1, instance="another"), {"report": ReportTarget("https://here/v1/report", "", "")}),
    ],
    ids=["the agent ended", "an agent of an older version", "another agent, after a sleep", "a nap in a long absence",
        "an operator explains losses"],
)  # fmt: skip
def test_any_other_loss_counts(back: Hello, changes: dict[str, Any]) -> None:
    story = silent(training(**changes)).waits(7200).hears(1, back)
    assert (story.report.restarts_counted, story.report.history[0].counts) == (1, True)


def test_a_machine_that_slept_while_it_was_away_is_no_failure_of_the_job() -> None:
    story = silent(training()).waits(28800).hears(1, of_machine(1, slept=28700, attempt=1, known=1))
    (entry,) = story.report.history
    assert (entry.failure.message, entry.counts) == ("node 1 was lost: its machine slept for 28700 s", False)
    assert story.hears(1, Stopped(1)).gang.attempt == 2


def test_only_what_it_slept_since_it_was_heard_last_counts() -> None:
    story = silent(training().hears(1, of_machine(1, slept=9000, attempt=1, known=1)), seconds=30)
    story.waits(7200).hears(1, of_machine(1, slept=9010, attempt=1, known=1))
    assert story.report.restarts_counted == 1


def test_each_time_off_explains_one_loss() -> None:
    story = silent(training()).waits(60).hears(1, of_machine(1, "boot-2", known=1, instance="another"))
    story.hears(0, Started(2)).hears(1, Started(2)).loses(1).waits(6).hears(0, Stopped(2))
    story.hears(1, of_machine(1, "boot-2", known=2, instance="a third"))
    assert [entry.counts for entry in story.report.history] == [False, True]


def test_a_time_off_between_attempts_explains_no_later_loss() -> None:
    story = training().exits(0, 1, last_lines=("ValueError: no",)).hears(0, Stopped(1))
    story.loses(1).hears(1, of_machine(1, "boot-2", known=1, instance="another"))
    assert (story.gang.phase, story.gang.facts.machines) == (Phase.ACTIVE, ())


def test_with_nothing_spare_a_host_that_is_away_may_yet_say_that_it_was_off() -> None:
    story = silent(training(**HOSTS)).waits(50000)
    assert story.report.state is State.BACKING_OFF
    story.hears(1, of_machine(1, "boot-2", known=1, instance="another"))
    assert [order.attempt for _, order in story.orders if isinstance(order, Start)] == [2, 2]


def test_with_nothing_spare_a_host_that_is_back_without_a_reason_fails_the_job() -> None:
    story = silent(training(**HOSTS)).waits(50000).hears(1, of_machine(1, known=1, instance="another"))
    assert story.report.state is State.FAILED


def test_with_nothing_spare_a_host_that_stays_away_fails_the_job_in_the_end() -> None:
    story = silent(training(**HOSTS)).waits(86300)
    assert story.report.state is State.BACKING_OFF
    assert story.waits(100).report.state is State.FAILED


def test_without_a_limit_for_hosts_the_job_fails_at_once() -> None:
    assert silent(training(restart=RestartPolicy(0, 0))).report.state is State.FAILED


@pytest.mark.parametrize(("boot", "state"), [("boot-2", State.STARTING), ("boot-1", State.FAILED), ("", State.FAILED)])
def test_node_zero_s_machine_is_compared_with_the_record_on_its_volume(boot: str, state: State) -> None:
    before = training(**HOSTS)
    records = begun_records([], before.gang, before.run, "1970-01-01T00:16:40Z")
    assert records[-1].boots == ("boot-1", "boot-1")
    story = Story(before.run, resume_gang(before.run, records, None, 2000.0)).decide()
    assert story.report.state is State.BACKING_OFF
    story.now = 2000.0
    story.hears(0, of_machine(0, boot, instance="new")).hears(1, of_machine(1, known=1))
    assert story.report.state is state
    if state is State.STARTING:
        assert story.report.history[0].failure.message == "node 0 was lost: its machine was off or started anew"
        again = resume_gang(story.run, corrected_records(records, story.gang), None, 3000.0)
        assert again.history[0].counts is False


def test_the_record_has_the_machines_of_the_newest_attempt_alone_and_of_none_with_an_operator() -> None:
    story = training()
    first = begun_records([], story.gang, story.run, "1970-01-01T00:16:40Z")
    second = begun_records(first, replace(story.gang, attempt=2), story.run, "1970-01-01T00:16:40Z")
    assert [record.boots for record in second] == [(), ("boot-1", "boot-1")]
    operated = training(report=ReportTarget("https://here/v1/report", "", ""))
    assert begun_records([], operated.gang, operated.run, "1970-01-01T00:16:40Z")[-1].boots == ()


def test_the_sleep_of_the_coordinator_s_machine_is_no_failure_of_the_job() -> None:
    """Node 1 has heard nothing, has stopped its ranks by itself, and says so when node 0 is awake."""
    story = training()
    story.now += 3600
    story.gang = with_own_sleep(with_pause(story.gang, 3590), story.run, 3590, story.now)
    stopped = RankState(1, True, RankExit(1, None, "SIGKILL", ordered=True))
    story.loses(1).hears(1, of_machine(1, known=1, ranks=(stopped,))).exits(0, None, signal="SIGKILL", ordered=True).hears(0, Stopped(1))
    (entry,) = story.report.history
    assert (entry.failure.message, entry.counts) == ("node 0 was lost: its machine slept for 3590 s", False)


def test_a_coordinator_notices_that_its_machine_has_slept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = 0.0
    monkeypatch.setattr(coordinator, "seconds_since_boot", lambda: machine.seconds_since_boot() + slept)
    monkeypatch.setattr(coordinator, "slept_seconds", lambda: slept)
    monkeypatch.setattr(coordinator, "PULSE_SECONDS", 0.01)
    run = make_run(run_dir=str(tmp_path))

    async def noticed() -> Coordinator:
        nonlocal slept
        made = Coordinator(run, KEY, Output(lambda _: None, tuple, lambda _: None))
        serving = asyncio.ensure_future(made.run())
        await asyncio.sleep(0)
        while made._recording is not None:  # until it has its folder
            await asyncio.wait([serving], timeout=0.001)
        made.gang = training().gang
        slept = 3600.0
        while not made.gang.facts.machines:
            await asyncio.wait([serving], timeout=0.01)
        serving.cancel()
        await asyncio.wait([serving])
        return made

    gang = asyncio.run(asyncio.wait_for(noticed(), 60)).gang
    assert [(fact.node, fact.message) for fact in gang.facts.machines] == [(0, "its machine slept for 3600 s")]
    assert gang.paused_seconds >= 3599


def test_the_machine_s_clocks_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    monkeypatch.setattr(machine.time, "clock_gettime", lambda clock: 1000.0 if clock == machine.time.CLOCK_MONOTONIC else 4600.0)
    assert (machine.slept_seconds(), machine.seconds_since_boot()) == (3600.0, 4600.0)
    monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "none")
    assert machine.boot_id() == ""


def test_a_hello_of_an_older_version_says_nothing_of_its_machine() -> None:
    message = agent_message({"type": "Hello", "node": 1, "instance": "a", "knownAttempt": 0, "attempt": 0})
    assert message == Hello(1, "a", 0, 0)
    assert (Hello(1, "a", 0, 0).boot_id, Hello(1, "a", 0, 0).slept_seconds) == ("", 0.0)


async def test_a_coordinator_looks_every_second_whether_it_runs(clock: VirtualClock) -> None:
    looks: list[float] = []
    made = Coordinator.__new__(Coordinator)
    made._pulse_due, made._now = clock.now + 1.0, clock.monotonic  # type: ignore[method-assign]
    made._excuse = lambda: looks.append(clock.now - 1000.0)  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5.5):
            await made._pulse()
    assert looks == pytest.approx([1, 2, 3, 4, 5], abs=0.01)
