"""A volume that doesn't answer: nothing is started or ended unrecorded, everybody hears why, and the coordinator still obeys SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.contract.messages import Exited, RankExit, Started, Stopped
from lockstep_gang.contract.reply import Fact, FactType, Reply
from lockstep_gang.contract.run import RestartPolicy, WhenDone
from lockstep_gang.coordinator import coordinator
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.records import Records
from lockstep_gang.lifecycle.gang import Phase
from lockstep_gang.lifecycle.history import AttemptRecord
from lockstep_gang.lifecycle.summary import summarize
from unit.gang.cases import KEY, gang, gone, make_run
from unit.gang.story import hello

SILENT = "doesn't answer: the job's record was not written within 0 s, and nothing starts or ends before it is"


class Wire:
    """Where a channel would be: what was sent."""

    backlog_bytes = 0
    is_given_up = False

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass

    def types(self) -> list[str]:
        return [message["type"] for message in self.sent]


class Scene:
    """A coordinator whose volume answers only while `answers` is set, and the agents' ends of its two connections."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.error: OSError | None = None
        write = Records.write_attempts

        def slow(records: Records, attempts: Sequence[AttemptRecord]) -> None:
            assert self.answers.wait(20)
            if self.error is not None:
                raise self.error
            write(records, attempts)

        monkeypatch.setattr(Records, "write_attempts", slow)
        monkeypatch.setattr(coordinator, "SLOW_SECONDS", 0.05)
        self.lines: list[str] = []
        self.run = make_run(run_dir=str(folder), restart=RestartPolicy(3, 0), when_done=WhenDone.WAIT)
        self.coordinator = Coordinator(self.run, KEY, Output(self.lines.append, tuple, self.lines.append))
        self.wires = [Wire(), Wire()]

    def connect(self, node: int, **known: Any) -> None:
        self.wires[node] = Wire()
        self.coordinator.connected(node, self.wires[node], hello(node, **known))  # type: ignore[arg-type]

    def disconnect(self, node: int) -> None:
        self.coordinator.disconnected(node, self.wires[node])  # type: ignore[arg-type]

    @property
    def message(self) -> str:
        return summarize(self.coordinator.gang, self.run).message

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(2000):
            if holds():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(self.lines)

    async def starts(self) -> None:
        """Both nodes run attempt 1, and the volume hangs from here on."""
        self.answers.set()
        for node in (0, 1):
            self.connect(node)
        await self.until(lambda: self.coordinator.gang.phase is Phase.ACTIVE)
        for node in (0, 1):
            self.coordinator.heard(node, Started(1))
        self.answers.clear()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(tmp_path, monkeypatch)
    yield made
    made.answers.set()


async def test_no_rank_starts_before_its_attempt_is_on_the_volume_and_why_is_told(scene: Scene) -> None:
    for node in (0, 1):
        scene.connect(node)
    await scene.until(lambda: SILENT in scene.message)
    assert any(SILENT in line for line in scene.lines)
    assert scene.wires[0].sent + scene.wires[1].sent == []
    scene.answers.set()
    await scene.until(lambda: scene.wires[0].types() == scene.wires[1].types() == ["Start"])
    assert "doesn't answer" not in scene.message


async def test_what_agents_say_meanwhile_counts_afterwards_in_its_order(scene: Scene) -> None:
    for node in (0, 1):
        scene.connect(node)
    scene.disconnect(1)
    scene.connect(1)
    first = scene.wires[1]
    scene.disconnect(1)
    scene.connect(1)
    scene.answers.set()
    await scene.until(lambda: scene.wires[1].types() == ["Start"])
    assert first.sent == []
    scene.coordinator.heard(0, Started(1))
    assert [node.connected for node in scene.coordinator.gang.nodes] == [True, True]


async def test_a_failure_is_told_while_its_record_is_not_written_and_the_next_attempt_waits(scene: Scene) -> None:
    await scene.starts()
    scene.coordinator.heard(1, Exited(1, RankExit(1, 3, None, ordered=False)))
    await scene.until(lambda: scene.wires[1].types() == ["Start", "Stop"])
    for node in (0, 1):
        scene.coordinator.heard(node, Stopped(1))
    await scene.until(lambda: SILENT in scene.message)
    assert scene.message.startswith("stopping all ranks: rank 1 on node 1 exited with 3; the volume with ")
    scene.answers.set()
    await scene.until(lambda: scene.wires[1].types() == ["Start", "Stop", "Start"])


async def test_a_write_that_fails_is_tried_again_after_a_while_and_not_with_every_word(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "STORAGE_RETRY_SECONDS", 0.3)
    hosting = asyncio.ensure_future(scene.coordinator._decide_in_time())
    scene.error = OSError(errno.ENOSPC, "No space left on device")
    scene.answers.set()
    for node in (0, 1):
        scene.connect(node)
    await scene.until(lambda: "No space left on device" in scene.message)
    scene.answers.clear()
    scene.coordinator.heard(0, Started(7))
    assert scene.coordinator._recording is None
    scene.error = None
    scene.answers.set()
    await scene.until(lambda: scene.wires[0].types() == ["Start"])
    hosting.cancel()


async def test_an_explanation_of_the_operator_is_written_like_all_records_and_its_failure_stops_nothing(scene: Scene) -> None:
    await scene.starts()
    scene.answers.set()
    scene.coordinator.heard(1, Exited(1, RankExit(1, None, "SIGKILL", ordered=True)))
    for node in (0, 1):
        scene.coordinator.heard(node, Stopped(1))
    await scene.until(lambda: scene.coordinator.gang.attempt == 2)
    scene.error = OSError(errno.ENOSPC, "No space left on device")
    since = scene.coordinator.gang.history[-1].failed
    fact = Fact(FactType.NODE_LOST, 1, "x-1", "NotReady", "Node b is NotReady", "pod-1", "b", since)
    scene.coordinator._replied(Reply(facts=(fact,)))
    await scene.until(lambda: any("cannot write" in line for line in scene.lines))
    await scene.until(lambda: scene.coordinator._recording is None)
    assert (scene.coordinator.gang.history[-1].counts, scene.coordinator.gang.unwritten) == (False, None)


async def test_a_failure_that_cannot_be_recorded_is_reported_until_the_record_is_written(scene: Scene) -> None:
    await scene.starts()
    scene.answers.set()
    scene.error = OSError(errno.EIO, "Input/output error")
    scene.coordinator.heard(1, Exited(1, RankExit(1, 3, None, ordered=False)))
    for node in (0, 1):
        scene.coordinator.heard(node, Stopped(1))
    await scene.until(lambda: scene.coordinator.gang.unwritten is not None)
    told = summarize(scene.coordinator.gang, scene.run)
    assert told.unwritten is not None and "Input/output error" in told.unwritten.problem
    assert told.failure is not None and told.failure.rank == 1
    assert [(entry.attempt, entry.failure.rank) for entry in told.history] == [(1, 1)]
    scene.error, scene.coordinator._retry_at = None, 0.0
    scene.coordinator._decide_soon()
    await scene.until(lambda: scene.coordinator.gang.attempt == 2)
    told = summarize(scene.coordinator.gang, scene.run)
    assert (told.unwritten, len(told.history)) == (None, 1)


HANGING = """
import os, sys, time
from lockstep_gang.agent import main
from lockstep_gang.coordinator import coordinator
from lockstep_gang.coordinator.records import Records
coordinator.SLOW_SECONDS = coordinator.SETTLE_SECONDS = 0.5
replace, hang = Records._replace, os.environ["HANG"]  # the agent itself does without a job's variables
def hanging(self, path, text):
    while os.path.exists(hang): time.sleep(0.05)
    replace(self, path, text)
Records._replace = hanging
raise SystemExit(main.main(sys.argv[1:]))
"""
RANK = """
import os, signal, sys, time
R, F = os.environ["RANK"], os.environ["FOLDER"]
print("here", R, flush=True)
while R == "0" and not os.path.exists(f"{F}/hang"): time.sleep(0.01)
if R == "0": raise ValueError("boom")
signal.pause()
"""


def test_a_real_coordinator_with_a_hung_volume_ends_when_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gang(tmp_path) as agents:
        agents.program = ("-c", HANGING)
        monkeypatch.setenv("HANG", str(tmp_path / "hang"))
        agents.write(RANK, restart=RestartPolicy(3, 0))
        agents.start(0, 1)
        agents.until("] here", 1)
        agents.until("] here", 0)
        (tmp_path / "hang").touch()
        agents.until("gang doesn't answer: the job's record was not written within 0 s")
        agents.signal(0, signal.SIGTERM)
        assert gone(agents.processes[0].pid, 10)
        assert "node 1 is gone" not in agents.log(0)
