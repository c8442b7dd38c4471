"""Ranks that hang, as real processes: named, written down, and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep_gang.agent.ranks import stacks as rank_stacks
from lockstep_gang.agent.ranks.ranks import Survivors
from lockstep_gang.agent.ranks.stacks import dumped, main_thread
from lockstep_gang.contract.run import RestartPolicy
from lockstep_machine.processes import ProcessState
from lockstep_spec.choices import Timeouts
from unit.gang.cases import Gang, gone
from unit.virtual_time import VirtualClock

START = """
import json, os, signal, socket, sys, time
R, F = int(os.environ["RANK"]), os.environ["FOLDER"]
report = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
report.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
def tell(event, **fields):
    report.send(json.dumps({"event": event, "rank": R, **fields}).encode())
if os.environ["LOCKSTEP_ATTEMPT"] != "1":
    print("again", R, flush=True)
    signal.pause()
tell("step", step=1)
here = lambda: print("here", os.getpid(), flush=True)
sys.path.insert(0, F)
"""
OTHERS_WAIT = """
import torch.distributed.fake
def train_step():
    here()
    torch.distributed.fake.all_reduce()
def get_stuck():
    here()
    {stuck}
get_stuck() if R == 1 else train_step()
"""
LIMIT = 2


def write(agents: Gang, stuck: str, **changes: Any) -> None:
    """Ranks of which all but rank 1 wait in a collective operation."""
    folder = agents.folder / "torch" / "distributed"
    folder.mkdir(parents=True)
    (folder / "fake.py").write_text("import time\ndef all_reduce():\n    time.sleep(1000)\n")
    values: dict[str, Any] = {"timeouts": Timeouts(step_seconds=LIMIT), "restart": RestartPolicy(1, 0)}
    agents.write(START + OTHERS_WAIT.format(stuck=stuck), **values | changes)


def pids(agents: Gang, *nodes: int) -> list[int]:
    agents.start(*nodes)
    return [int(agents.until("] here", node).split()[-1]) for node in nodes]


def ended(agents: Gang) -> Any:
    """The failure of the first attempt, once the second one runs."""
    agents.until("attempt 2 starts", seconds=2 * LIMIT + 6)
    agents.until("] again")
    return agents.record("attempts.jsonl")[0]["restart"]["failure"]


def stacks(agents: Gang, rank: int) -> str:
    return (agents.folder / "run" / "logs" / f"hang-attempt-1-rank-{rank}.txt").read_text()


def test_a_frozen_rank_is_named_written_down_and_all_start_again(agents: Gang) -> None:
    write(agents, "time.sleep(1000)")
    running = pids(agents, 0, 1)
    os.kill(running[1], signal.SIGSTOP)
    failure = ended(agents)
    assert all(gone(pid, 2) for pid in running)
    assert (failure["cause"], failure["rank"], failure["node"]) == ("Hang", 1, 1)
    assert failure["stacks"] == str(agents.folder / "run" / "logs" / "hang-attempt-1-rank-1.txt")
    assert "its process is stopped (state T)" in failure["message"]
    assert "process" in stacks(agents, 1).splitlines()[0] and "stopped (T)" in stacks(agents, 1).splitlines()[0]
    assert "in get_stuck" in stacks(agents, 1)
    assert "in all_reduce" in stacks(agents, 0)
    assert "most recent call first" not in agents.log(0)  # the stacks are in the files, not in the log


def test_native_code_that_holds_the_interpreter_is_found_by_its_line(agents: Gang) -> None:
    write(agents, "import ctypes; ctypes.PyDLL(None).sleep(1000)", nodes=1, ranks_per_node=2)
    agents.start(0)
    failure = ended(agents)
    assert (failure["rank"], "it is in get_stuck (rank.py:" in failure["message"]) == (1, True)
    assert "in get_stuck" in stacks(agents, 1)


def test_a_rank_started_by_a_shell_script_is_asked_as_well(agents: Gang) -> None:
    (agents.folder / "start.sh").write_text(f"{sys.executable} -S rank.py\nexit $?\n")
    write(agents, "time.sleep(1000)", nodes=1, ranks_per_node=2, command=("/bin/sh", "start.sh"), restart=RestartPolicy(0, 0))
    agents.run(codes=[1])
    assert agents.record("end.json")["failure"]["rank"] == 1
    assert "in get_stuck" in stacks(agents, 1)


def test_a_rank_that_lets_nobody_ask_it_is_killed_and_that_is_said(agents: Gang) -> None:
    write(agents, "time.sleep(1000)", nodes=1, ranks_per_node=2, environment={"FOLDER": str(agents.folder), "PYTHONFAULTHANDLER": ""})
    agents.start(0)
    ended(agents)
    assert stacks(agents, 1).endswith("no Python stacks: the process did not write any\n")


def test_a_stopped_rank_is_the_failure_of_those_that_only_lost_it(agents: Gang) -> None:
    lost = 'here()\nwhile not os.path.exists(f"{F}/fail"): time.sleep(0.01)\nraise ConnectionResetError("Connection reset by peer")'
    agents.write(START + lost, restart=RestartPolicy(1, 0))
    running = pids(agents, 0, 1)
    os.kill(running[1], signal.SIGSTOP)
    (agents.folder / "fail").touch()
    failure = ended(agents)
    assert (failure["cause"], failure["rank"]) == ("Hang", 1)


def test_the_main_thread_is_the_last_one_that_faulthandler_writes() -> None:
    lines = [
        "Fatal Python error: Aborted", "Thread 0x1 (most recent call first):", '  File "/a/other.py", line 1 in run',
        "Current thread 0x2 (most recent call first):", '  File "/a/main.py", line 2 in inner', '  File "/a/main.py", line 9 in <module>',
        "Extension modules: numpy (total: 1)",
    ]  # fmt: skip
    assert [frame["function"] for frame in main_thread(lines)] == ["inner", "<module>"]


@pytest.mark.parametrize(
    ("line", "waits"),
    [("total += loss.item()", True), ("torch.cuda.synchronize()", True), ("values = slots.tolist()", True), ("batch = next(data)", False)],
)
def test_a_rank_that_waits_for_its_gpu_waits_for_the_others_as_far_as_can_be_seen(tmp_path: Path, line: str, waits: bool) -> None:
    """The call has no Python frame, so the line that makes it is read."""
    (tmp_path / "train.py").write_text(f"def step():\n    {line}\n")
    lines = ["Current thread 0x1 (most recent call first):", f'  File "{tmp_path}/train.py", line 2 in step']
    assert dumped(1, 0, ProcessState("S"), lines, None).waits_for_others is waits


def test_a_rank_inside_of_torch_s_synchronize_waits_too() -> None:
    lines = ["Current thread 0x1 (most recent call first):", '  File "/x/torch/cuda/streams.py", line 250 in synchronize']
    assert dumped(1, 0, ProcessState("S"), lines, None).waits_for_others


def test_every_pace_of_a_rank_reaches_the_verdict(agents: Gang) -> None:
    """Steps are sent sparsely, the newest ones; of paces none may be left out, or the window would never fill."""
    tell = 'for n in range(25): tell("pace", step=n, steps=1, microseconds=1000 * (R + 1)); time.sleep(0.02)\nsignal.pause()'
    agents.write(START + tell, nodes=1, ranks_per_node=2)
    agents.start(0)
    assert "rank 1 on node 0 is slow: its own work takes 2.00 times as long" in agents.until("is slow")


def test_a_volume_that_hangs_has_a_second_for_a_rank_s_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            limits.append(timeout or 0.0)
            return False

    class Thread(threading.Thread):
        def start(self) -> None:
            pass

        def join(self, timeout: float | None = None) -> None:
            limits.append(timeout or 0.0)

    monkeypatch.setattr(rank_stacks, "threading", SimpleNamespace(Event=Event, Thread=Thread))
    assert rank_stacks.write_stacks(tmp_path / "x", "head", []) is None
    assert rank_stacks._source_line(str(tmp_path / "x"), 1) == ""
    assert limits == [1.0, 1.0]


async def test_ranks_that_outlive_a_kill_are_reported_every_five_seconds(clock: VirtualClock) -> None:
    sent = list[float]()
    ranks: Any = SimpleNamespace(attempt=1, left=lambda: [0], survivors=lambda: ["dump"])
    Survivors(lambda dump: sent.append(clock.now - 1000.0)).killed(ranks)
    await asyncio.sleep(16)
    assert sent == pytest.approx([5, 10, 15], abs=0.01)
