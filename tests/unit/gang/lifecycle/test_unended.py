"""Ranks that SIGKILL does not end: the stop is over in time all the same, says where to look, and nothing new starts beside them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.agent.ranks import stacks
from lockstep_gang.agent.ranks.stacks import state_after_kill
from lockstep_gang.contract.messages import Dumped, Exited, Leaving, RankExit, RankState, Start, Step, Stop, Stopped
from lockstep_gang.contract.report import Save, State
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.lifecycle.gang import Phase
from lockstep_gang.lifecycle.hang import with_pause
from lockstep_spec.choices import Timeouts
from unit.gang.cases import gang
from unit.gang.story import Story, failed_before, hello, started

NOTE = (
    "node 1 could not end rank 1; its process can't be interrupted (state D, in the kernel's nfs_wait): a device or a volume"
    " doesn't answer; check that node"
)
STATE = Dumped(1, 1, state="D", kernel_function="nfs_wait")


def stopping(**changes: Any) -> Story:
    """Rank 0 has failed, and rank 1 doesn't end."""
    values: dict[str, Any] = {"restart": RestartPolicy(3, 10), "timeouts": Timeouts(start_seconds=600)}
    story = failed_before(started(**values | changes)).exits(0, 1, last_lines=("ValueError: no",)).hears(0, Stopped(1))
    return story.waits(5).hears(1, STATE)


def given_up(**changes: Any) -> Story:
    return stopping(**changes).waits(55)


def test_a_rank_that_cannot_be_ended_is_waited_for_a_minute_and_then_told_of() -> None:
    story = stopping()
    assert story.wake_at == 1060
    assert story.waits(54.9).gang.phase is Phase.STOPPING
    story.waits(0.1)
    assert (story.report.state, story.records) == (State.BACKING_OFF, ["begin", "Failed"])
    assert story.report.failure.message == f"rank 0 on node 0 exited with 1: ValueError: no; {NOTE}"
    assert story.report.message == f"waiting for node 1 of 2, after rank 0 on node 0 exited with 1: ValueError: no; {NOTE}"


def test_nothing_starts_beside_it_and_once_it_has_ended_the_next_attempt_does() -> None:
    story = given_up().waits(300)
    assert not any(isinstance(order, Start) for _, order in story.orders)
    story.loses(1).hears(1, hello(1, attempt=1, ranks=(RankState(1, True),)))
    assert [order.attempt for _, order in story.orders if isinstance(order, Stop)] == [1]
    assert NOTE in story.report.message
    story.hears(1, Exited(1, RankExit(1, None, "SIGKILL", ordered=True)), Stopped(1))
    assert {order.attempt for _, order in story.orders if isinstance(order, Start)} == {2}


def test_a_node_that_never_gets_rid_of_it_fails_the_job_when_the_start_s_time_is_over() -> None:
    story = given_up()
    assert story.wake_at == story.now + 600
    assert story.waits(600).report.state is State.FAILED
    assert story.report.failure.node == 1
    assert (
        story.report.message == "node 1 of 2 did not end their earlier ranks within the 600 s of startTimeoutSeconds,"
        f" after rank 0 on node 0 exited with 1: ValueError: no; {NOTE}"
    )


def test_the_last_allowed_failure_says_it_too() -> None:
    story = given_up(restart=RestartPolicy(0, 0))
    assert (story.report.state, story.report.message) == (State.FAILED, f"rank 0 on node 0 exited with 1: ValueError: no; {NOTE}")


def test_a_save_has_its_grace_and_then_a_minute() -> None:
    story = started(training={}, save_grace_seconds=120).reports(0, Step(0, 5, 9)).hears(1, Leaving())
    story.exits(0, 75, ordered=True).hears(0, Stopped(1)).hears(1, STATE)
    assert story.waits(179.9).gang.phase is Phase.STOPPING
    stop = story.waits(0.1).report.stop
    assert (stop.save, stop.message) == (Save.NOT_SAVED, f"stopped without a save: 5 steps since the start are lost: {NOTE}")


def test_time_in_which_the_coordinator_did_not_run_is_none_of_the_nodes() -> None:
    story = stopping()
    story.gang = with_pause(story.gang, 100)
    assert story.waits(100).gang.phase is Phase.STOPPING
    assert story.hears(1, Stopped(1)).report.failure.message == "rank 0 on node 0 exited with 1: ValueError: no"


def test_a_later_state_does_not_take_the_stacks_away() -> None:
    story = started(restart=RestartPolicy(3, 10)).exits(0, 1).hears(1, Dumped(1, 1, state="S", at="f (a.py:3)", stacks="/r/1"), STATE)
    assert story.gang.dumps == (Dumped(1, 1, state="D", kernel_function="nfs_wait", at="f (a.py:3)", stacks="/r/1"),)


def test_the_thread_that_cannot_be_interrupted_is_what_is_told_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_after_kill(os.getpid()).letter in "RS"
    files = {"/status": "State:\tZ (zombie)\n", "/task/7/status": "State:\tS (sleeping)\n", "/task/8/status": "State:\tD (disk sleep)\n"}
    for name, text in {**files, "/task/8/wchan": "nfs_wait"}.items():
        path = tmp_path / f"4{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(stacks, "PROC", tmp_path)
    assert (state_after_kill(4).letter, state_after_kill(4).kernel_function) == ("D", "nfs_wait")


UNKILLABLE = """
import sys
from lockstep_gang.agent import main
from lockstep_gang.agent.ranks import processes, ranks
from lockstep_gang.lifecycle import stops
ranks.SURVIVED_SECONDS, stops.END_SECONDS = 0.1, 1.0
processes.send_to_group = ranks.send_to_group = lambda leader, number: None
ranks.kill_strays = lambda variable: None
raise SystemExit(main.main(sys.argv[1:]))
"""
RANK = """
import os, signal, sys, time
R, F, A = os.environ["RANK"], os.environ["FOLDER"], os.environ["LOCKSTEP_ATTEMPT"]
print("attempt", A, "here", os.getpid(), flush=True)
while A == "1" and R == "0" and not os.path.exists(f"{F}/fail"): time.sleep(0.01)
if A == "1" and R == "0": raise ValueError("boom")
if A == "1": signal.pause()
"""


def test_real_agents_go_on_once_the_rank_that_outlived_sigkill_has_ended(tmp_path: Path) -> None:
    with gang(tmp_path) as agents:
        agents.program = ("-c", UNKILLABLE)
        agents.write(RANK, restart=RestartPolicy(1, 0))
        agents.start(0, 1)
        pid = int(agents.until("] attempt 1 here", 1).split()[-1])
        agents.until("] attempt 1 here", 0)
        (tmp_path / "fail").touch()
        agents.until(
            "waiting for node 1 of 2, after rank 0 on node 0 exited with 1: ValueError: boom; node 1 could not end rank 1; check that node"
        )
        assert "attempt 2" not in agents.log(0) + agents.log(1)
        os.kill(pid, signal.SIGKILL)
        assert agents.codes() == [0, 0]
        assert [line["outcome"] for line in agents.record("attempts.jsonl")] == ["Failed", "Complete"]


def test_a_child_that_outlives_its_rank_is_waited_for_as_well(tmp_path: Path) -> None:
    child = (
        'import subprocess\nif A == "1": print("child", subprocess.Popen([sys.executable, "-S", "-c", "import signal;'
        ' signal.pause()"]).pid, flush=True)\n'
    )
    with gang(tmp_path) as agents:
        agents.program = ("-c", UNKILLABLE)
        agents.write(RANK.split("while", maxsplit=1)[0] + child + 'sys.exit(A == "1")', nodes=1, restart=RestartPolicy(1, 0))
        agents.start(0)
        pid = int(agents.until("] child").split()[-1])
        agents.until("exited with 1; node 0 could not end all processes of attempt 1; check that node")
        assert "attempt 2" not in agents.log()
        os.kill(pid, signal.SIGKILL)
        assert agents.codes() == [0]
