"""Whom a start waits for, for how long, what is said of it, and what it begins with; no process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.contract.fabric import FabricAsked
from lockstep_gang.contract.messages import Activity, Dumped, Finish, Leaving, Stop, StopMode, Stopped
from lockstep_gang.contract.reply import Fact, FactType
from lockstep_gang.contract.report import Cause, CheckpointReport, State
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.coordinator import coordinator
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.log_lines import log_lines
from lockstep_gang.lifecycle.gang import Budget, Facts, Phase, new_gang
from lockstep_gang.lifecycle.history import AttemptRecord, resume_gang
from lockstep_gang.lifecycle.losses import with_facts
from lockstep_spec.choices import Timeouts
from unit.gang.cases import KEY, make_run
from unit.gang.story import Story, all_stopped, hello, started

ADDRESSES = ("x-0.x-headless.ns.svc", "x-1.x-headless.ns.svc")


def waiting(**changes: Any) -> Story:
    """Node 0 is here, node 1 isn't."""
    story = Story(make_run(**{"timeouts": Timeouts(start_seconds=600), "addresses": ADDRESSES} | changes))
    return story.hears(0, hello(0))


def told(story: Story, *reasons: str) -> Story:
    """The operator's answer: why node 1's pod doesn't run; without a reason it has a node, and runs."""
    story.gang = with_facts(story.gang, [Fact(FactType.WAITING, 1, "x-1", reason) for reason in reasons], story.now)
    return story.decide()


def test_a_node_that_never_comes_fails_the_job_when_the_time_is_over_and_not_before() -> None:
    story = told(waiting())
    assert story.wake_at == story.now + 600
    assert story.waits(599).gang.phase is Phase.WAITING
    story.waits(1)
    assert (story.report.state, story.report.failure.cause, story.report.failure.node) == (State.FAILED, Cause.SETUP, 1)
    assert story.report.message == "node 1 of 2: x-1 did not come within the 600 s of startTimeoutSeconds"
    assert [type(order) for _, order in story.orders] == [Finish]
    assert story.records == ["end"]


def test_the_line_names_the_pod_and_what_it_waits_for() -> None:
    story = waiting()
    assert story.report.message == "waiting for node 1 of 2: x-1"
    story.gang = replace(story.gang, facts=Facts((Fact(FactType.WAITING, 1, "x-1", "ImagePulling"),)))
    assert story.report.message == "waiting for node 1 of 2: x-1 (ImagePulling)"
    assert waiting(addresses=("127.0.0.1", "127.0.0.1")).report.message == "waiting for node 1 of 2"


@pytest.mark.parametrize("reason", ["Unschedulable", "Scheduling", "NotCreated"])
def test_a_node_that_the_cluster_has_no_room_for_is_waited_for_until_it_has(reason: str) -> None:
    story = told(waiting(), reason)
    assert story.wake_at is None
    assert story.waits(10**6).gang.phase is Phase.WAITING
    told(story, "ImagePullBackOff")
    assert story.wake_at == story.now + 600
    assert story.waits(599).gang.phase is Phase.WAITING
    assert story.waits(1).report.message == "node 1 of 2: x-1 (ImagePullBackOff) did not come within the 600 s of startTimeoutSeconds"


@pytest.mark.parametrize("reason", ["ClaimNotBound", "ImagePullBackOff", "ContainerCreating", "Terminating"])
def test_a_node_whose_pod_has_room_and_does_not_come_up_is_given_up(reason: str) -> None:
    assert told(waiting(), reason).waits(600).report.state is State.FAILED


def test_a_node_of_which_nobody_says_that_there_is_room_for_it_is_waited_for() -> None:
    """Without an operator `lockstep run` looks at its pod, or its process; with one that is away, nobody does."""
    story = waiting()
    assert story.wake_at is None
    assert story.waits(10**6).gang.phase is Phase.WAITING
    assert told(story).waits(600).report.state is State.FAILED


@pytest.mark.parametrize("reasons", [(), ("Unschedulable",)], ids=["runs", "waits"])
def test_what_the_operator_said_before_a_node_was_here_says_nothing_of_its_loss(reasons: tuple[str, ...]) -> None:
    story = told(waiting(restart=RestartPolicy(3, 0)), *reasons).hears(1, hello(1)).waits(5)
    story.loses(1).waits(6).exits(0, None, signal="SIGKILL", ordered=True)
    all_stopped(story)
    assert story.waits(10**6).gang.phase is Phase.WAITING
    assert told(story).waits(600).report.state is State.FAILED


def test_the_time_begins_anew_once_all_nodes_were_here() -> None:
    story = waiting(restart=RestartPolicy(3, 0)).waits(500).hears(1, hello(1)).waits(500)
    story.hears(1, Leaving()).exits(0, 75, ordered=True).exits(1, 75, ordered=True)
    all_stopped(story)
    assert told(story).gang.phase is Phase.WAITING
    assert story.waits(599).gang.phase is Phase.WAITING
    assert story.waits(1).report.state is State.FAILED


def test_ranks_that_never_report_are_written_down_and_fail_the_job_for_good() -> None:
    story = started(training={}, timeouts=Timeouts(start_seconds=600), restart=RestartPolicy(3, 0)).reports(0, Activity(0, "Init"))
    assert story.report.message == "1 of 2 ranks have reported; waiting for rank 1 on node 1"
    assert story.waits(599).gang.phase is Phase.ACTIVE
    story.waits(1)
    assert [order.mode for _, order in story.orders if isinstance(order, Stop)] == [StopMode.DUMP] * 2
    story.hears(1, Dumped(1, 1, state="D", kernel_function="nfs_wait", stacks="/r/1"))
    for rank in (0, 1):
        story.exits(rank, None, signal="SIGKILL", ordered=True)
    all_stopped(story)
    failure = story.report.failure
    assert (story.report.state, failure.cause, failure.rank, failure.node, failure.stacks) == (State.FAILED, Cause.SETUP, 1, 1, "/r/1")
    assert failure.message.startswith(
        "rank 1 on node 1 did not report within the 600 s of startTimeoutSeconds; its process can't be interrupted"
    )


def test_ranks_that_have_reported_are_not_judged_by_the_start_s_time() -> None:
    story = started(training={}, timeouts=Timeouts(start_seconds=600)).reports(0, Activity(0, "Init")).reports(1, Activity(1, "Init"))
    assert story.waits(10**6).gang.phase is Phase.ACTIVE


def test_every_attempt_begins_with_what_it_runs_on_and_goes_on_from() -> None:
    run = make_run(addresses=ADDRESSES, gpus_per_node=4, ranks_per_node=4)
    before = new_gang(run)
    begun = replace(before, phase=Phase.ACTIVE, attempt=2, restarts=1, checkpoint=CheckpointReport(7, "/c/step-7.a1", "t"))
    counted = replace(begun, budget=Budget(failures=1, counted=1))
    assert next(iter(log_lines(before, counted, run))) == "attempt 2 starts: 8 ranks on 2 nodes, restart 1 of at most 0"
    assert list(log_lines(before, begun, run)) == [
        "attempt 2 starts: 8 ranks on 2 nodes, restart 1 (0 of at most 0 counted)",
        "  nodes: x-0, x-1, 4 ranks and 4 GPUs each",
        "  fabric: not stated, used as it is",
        "  run: /workspace/runs/x, works in /workspace, log of what happens in /workspace/runs/x/logs",
        "  from: the newest commit is step 7, /c/step-7.a1; the script finds its own, if it looks for any",
    ]


@pytest.mark.parametrize(("gpus", "words"), [(2, "1 to 2 ranks each, one a GPU"), (0, "1 to 2 ranks each, on CPUs")])
def test_unlike_numbers_of_ranks_are_told_from_the_least_to_the_most(gpus: int, words: str) -> None:
    run = make_run(nodes=3, gpus_per_node=gpus, ranks_per_node=2, node_ranks=(2, 1, 1))
    before = new_gang(run)
    lines = list(log_lines(before, replace(before, phase=Phase.ACTIVE, attempt=1), run))
    assert lines[:2] == ["attempt 1 starts: 4 ranks on 3 nodes", f"  nodes: 3, {words}"]


def test_one_of_a_thing_is_told_in_the_singular() -> None:
    run = make_run(nodes=1, addresses=ADDRESSES[:1], gpus_per_node=0, ranks_per_node=1)
    before = new_gang(run)
    lines = list(log_lines(before, replace(before, phase=Phase.ACTIVE, attempt=1), run))
    assert lines[0] == "attempt 1 starts: 1 rank on 1 node"
    assert lines[1].endswith(", 1 rank each, on CPUs")


def test_a_rank_that_has_ended_well_does_not_make_a_gang_start_again() -> None:
    story = started().exits(0)
    assert (story.report.state, story.report.message) == (State.RUNNING, "attempt 1 is running; 1 of 2 ranks have ended")


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"checkpoint": {"resumeFrom": "Auto"}}, "the newest whole commit in /workspace/runs/x/checkpoints, or step 0 where there is none"),
        ({"checkpoint": {"resumeFrom": "None"}}, "step 0, since resumeFrom is None"),
        ({"checkpoint": {"resumeFrom": "/workspace/runs/y/checkpoint-7"}}, "/workspace/runs/y/checkpoint-7"),
        (None, "no checkpoint was reported yet; the script finds its own, if it looks for any"),
    ],
)
def test_a_first_attempt_says_where_a_start_looks_and_not_that_there_is_nothing(training: dict[str, Any] | None, words: str) -> None:
    run = make_run(training=training)
    before = new_gang(run)
    assert f"  from: {words}" in log_lines(before, replace(before, phase=Phase.ACTIVE, attempt=1), run)


def test_an_attempt_names_the_devices_that_were_asked_for_without_nccl_s_sign_for_exactly() -> None:
    run = make_run(addresses=ADDRESSES, gpus_per_node=4, ranks_per_node=4, fabric=FabricAsked("RDMA", ("=mlx5_0", "=mlx5_1")))
    before = new_gang(run)
    assert "  fabric: asked for RDMA on mlx5_0, mlx5_1" in log_lines(before, replace(before, phase=Phase.ACTIVE, attempt=1), run)


async def test_node_0_says_again_and_again_whom_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "WAITING_LINE_SECONDS", 0.01)
    lines: list[str] = []
    twice = asyncio.Event()

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            twice.set()

    hosted = Coordinator(make_run(run_dir=str(tmp_path)), KEY, Output(say, lambda: (), lambda line: None))
    hosted.heard(0, hello(0))
    lines.clear()
    saying = asyncio.ensure_future(hosted._say_what_is_missing())
    await asyncio.wait_for(twice.wait(), 10)
    saying.cancel()
    assert lines[:2] == ["waiting for node 1 of 2", "waiting for node 1 of 2"]


def away(**changes: Any) -> Story:
    """No operator, and a limit for hosts: node 1 was lost from a running attempt."""
    limits = Timeouts(start_seconds=600, return_seconds=86400)
    story = started(**{"timeouts": limits, "restart": RestartPolicy(3, 0), "addresses": ("10.0.0.1", "10.0.0.2")} | changes)
    story.loses(1).waits(6).exits(0, None, signal="SIGKILL", ordered=True)
    return story.hears(0, Stopped(1))


def test_a_host_that_was_here_is_waited_for_as_long_as_hosts_may_be_away() -> None:
    story = away()
    assert story.waits(86399).gang.phase is Phase.WAITING
    story.waits(1)
    assert (story.report.state, story.report.failure.cause, story.report.failure.node) == (State.FAILED, Cause.NODE_LOST, 1)
    assert story.report.message.startswith("node 1 of 2 did not come back within the 86400 s of away_seconds, after node 1 ")


def test_a_host_that_comes_back_in_time_begins_the_next_attempt() -> None:
    story = away().waits(50000).hears(1, hello(1, known=1, instance="another"))
    assert (story.gang.phase, story.gang.attempt) == (Phase.ACTIVE, 2)


def test_a_host_that_never_came_is_waited_for_as_long_as_a_start_takes() -> None:
    story = waiting(timeouts=Timeouts(start_seconds=600, return_seconds=86400))
    assert story.waits(599).gang.phase is Phase.WAITING
    assert story.waits(1).report.message == "node 1 of 2: x-1 did not come within the 600 s of startTimeoutSeconds"
    assert story.report.failure.cause is Cause.SETUP


def test_hosts_that_a_new_coordinator_waits_for_were_here_if_the_job_had_an_attempt() -> None:
    run = make_run(timeouts=Timeouts(start_seconds=600, return_seconds=86400), restart=RestartPolicy(3, 0))
    record = AttemptRecord(4, "uid-1", 0, "2026-01-01T00:00:00Z", outcome="Stopped")
    story = Story(run, resume_gang(run, [record], None, 1000.0)).hears(0, hello(0, known=4))
    assert story.waits(86399).gang.phase is Phase.WAITING
    assert story.waits(1).report.message == "node 1 of 2 did not come back within the 86400 s of away_seconds"


def test_a_host_that_is_here_and_can_t_end_its_ranks_has_the_start_s_time() -> None:
    story = away()
    story.hears(1, hello(1, attempt=1, known=1))
    assert story.waits(600).report.message.startswith("node 1 of 2 did not end their earlier ranks within the 600 s of startTimeoutSeconds")


def test_a_job_that_states_no_time_for_its_start_has_half_an_hour() -> None:
    story = told(waiting(timeouts=Timeouts()))
    assert story.waits(1799).gang.phase is Phase.WAITING
    assert story.waits(1).report.message == "node 1 of 2: x-1 did not come within the 1800 s of startTimeoutSeconds"
