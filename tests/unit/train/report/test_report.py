"""JSONL files, lines and the terminal: what people and tools read of a run."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep_train.report import Reporter, jsonl
from lockstep_train.report.agent import Agent, PaceTeller
from lockstep_train.report.jsonl import JsonLog
from lockstep_train.report.terminal import Terminal, bar, clock, metric_text


def records(path: Path) -> list[dict[str, Any]]:
    """Every line, read as strictly as jq does."""

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write_steps(path: Path, steps: range, *, resumed: int = 0, attempt: int = 1, history: bool = False) -> None:
    log = JsonLog(path, resumed, attempt, history)
    for step in steps:
        log.write({"step": step})
    log.close()


def test_a_resumed_log_has_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "train_log.jsonl"
    write_steps(path, range(1, 6))
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # the last write before a kill
    write_steps(path, range(4, 6), resumed=3, attempt=2)
    assert [(record["step"], record["attempt"]) for record in records(path)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]


@pytest.mark.parametrize("torn", ['{"schema": 1, "step": 4', "null", "[]", '{"loss": 1}', '{"step": "4"}', "\0\0\0", '{"step": 4}'])
def test_whatever_a_power_loss_left_at_the_end_the_log_is_valid_after_the_next_start(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "train_log.jsonl"
    write_steps(path, range(1, 4))
    with path.open("a") as file:
        file.write(torn)
    write_steps(path, range(4, 6), resumed=3)
    assert [record["step"] for record in records(path)] == [1, 2, 3, 4, 5]


def test_a_log_that_nothing_was_undone_of_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "train_log.jsonl"
    write_steps(path, range(1, 4))
    before = path.stat().st_ino
    write_steps(path, range(4, 5), resumed=3)
    assert path.stat().st_ino == before
    write_steps(path, range(4, 5), resumed=3)
    assert path.stat().st_ino != before


def test_events_of_undone_steps_stay_and_are_marked(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_steps(path, range(1, 4), history=True)
    write_steps(path, range(3, 4), resumed=2, history=True)
    assert [(record["step"], record.get("undone", False)) for record in records(path)] == [(1, False), (2, False), (3, True), (3, False)]


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "log.jsonl", 0, 1)
    log.write({"step": 1, "loss": float("nan"), "norm": float("-inf"), "layers": {"0": [1.0, float("inf")]}})
    log.close()
    (record,) = records(tmp_path / "log.jsonl")
    assert (record["loss"], record["norm"], record["layers"]) == (None, None, {"0": [1.0, None]})


def test_a_record_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "log.jsonl", 0, 1)
    log.write({"step": 1})
    assert [record["step"] for record in records(tmp_path / "log.jsonl")] == [1]
    log.close()


class FullDisk(io.FileIO):
    """A file whose disk has room for so many bytes."""

    room = 0

    def write(self, data: Any) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(bytes(data)[: self.room])
        self.room -= written
        return written


def test_what_a_full_disk_has_no_room_for_follows_when_it_has(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "log.jsonl", 0, 1)
    log._file.close()
    log._file = disk = FullDisk(tmp_path / "log.jsonl", "a")
    log.write({"step": 1})
    disk.room = 10  # half of a line
    log.write({"step": 2})
    disk.room = 1000
    log.write({"step": 3})
    assert [record["step"] for record in records(tmp_path / "log.jsonl")] == [1, 2, 3]
    disk.room = 0
    log.write({"step": 4})
    disk.room = 1000
    log.close()
    assert [record["step"] for record in records(tmp_path / "log.jsonl")] == [1, 2, 3, 4]


def test_a_reporter_writes_what_its_calls_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(None, 0)
    reporter.event("imported", seconds=1.5)
    reporter.open_logs(tmp_path, 0, attempt=7)
    reporter.evaluation(0, 2.0, tokens=50)
    reporter.step(1, 3, 0.25, 61.0, {"loss": 2.231, "learningRate": 1.33e-7, "gradientNorm": 0.5, "tokensPerSecond": 99.6, "mfu": None})
    reporter.checkpoint(1, Path("/runs/x/step-1.a7"), 2_500_000, 0.75, stall_seconds=0.012)
    reporter.experts(1, {"3": [5, 0, 7]})
    reporter.close()
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("Start-up: ")]  # how long this took so far
    assert said == [
        "Eval Loss: 2.0000 | Perplexity: 7.39 | Step 0",
        "Step 1/3 | Loss: 2.2310 | LR: 1.33e-07 | Grad norm: 0.5000 | Tokens/s: 100 | Epoch: 0.25 | ETA: 0:01:01",
        "CHECKPOINT step 1 | /runs/x/step-1.a7 | 2.5 MB a rank | 0.75 s | training waited 0.012 s",
    ]
    (step,), (evaluation,), (usage,) = (records(tmp_path / f"{name}.jsonl") for name in ("train_log", "eval_log", "expert_usage"))
    assert (step["step"], step["totalSteps"], step["loss"], step["mfu"], step["attempt"], step["schema"]) == (1, 3, 2.231, None, 7, 1)
    assert (evaluation["evalLoss"], evaluation["tokens"], usage["layers"]) == (2.0, 50, {"3": [5, 0, 7]})
    events = [(event["kind"], event["step"]) for event in records(tmp_path / "events.jsonl")]
    assert (events[0], events[-1]) == (("imported", 0), ("checkpoint", 1))


def test_an_evaluation_that_is_done_again_after_a_resume_is_there_once(tmp_path: Path) -> None:
    for resumed in (0, 0, 4):  # killed before the first commit; then started again after its last step
        reporter = Reporter(None, 0)
        reporter.open_logs(tmp_path, resumed, attempt=1)
        for step in (0, 4) if resumed == 0 else (4,):
            reporter.evaluation(step, 1.0)
        reporter.close()
    assert [record["step"] for record in records(tmp_path / "eval_log.jsonl")] == [0, 4]


def test_only_rank_0_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(None, 1)
    reporter.open_logs(tmp_path / "logs", 0)
    reporter.step(1, 2, 0.5, None, {"loss": 1.0})
    reporter.event("anything", line="a line")
    reporter.close()
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "logs").exists()


def test_a_folder_that_cannot_be_written_costs_the_logs_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    reporter = Reporter(None, 0)
    reporter.open_logs(tmp_path / "logs", 0)
    reporter.step(1, 2, 0.5, None, {"loss": 1.0})
    reporter.close()
    assert "can't be written" in capsys.readouterr().out


def test_metrics_are_short_texts() -> None:
    assert metric_text("loss", 2.23101) == "2.2310"
    assert metric_text("learningRate", 1.33e-7) == "1.33e-07"
    assert metric_text("tokensPerSecond", 1234.5) == "1234"
    assert metric_text("peakMemoryBytes", 2e9) == "2000000000"
    assert clock(3725.4) == "1:02:05"


class Screen(io.StringIO):
    """A terminal that keeps what was written to it."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        """The lines a person sees in the end."""
        seen = [""]
        for part in self.getvalue().replace("\x1b[K", "").replace("\n", "\0\n").split("\0"):
            text = part
            if text.startswith("\n"):
                seen.append("")
                text = text[1:]
            seen[-1] = text.rpartition("\r")[2] if "\r" in text else seen[-1] + text
        return seen


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Screen()


def test_on_a_terminal_lines_stand_above_one_bar(screen: Screen) -> None:
    terminal = Terminal(screen)
    terminal.progress(1, 4, "Step 1/4 | Loss: 2.0")
    terminal.progress(2, 4, "Step 2/4 | Loss: 1.0")
    terminal.line("Eval Loss: 1.5")
    terminal.progress(3, 4, "Step 3/4 | Loss: 0.5")
    terminal.close()
    terminal.line("Done")
    assert screen.shown() == ["Eval Loss: 1.5", "[###############.....]  75 % | Step 3/4 | Loss: 0.5", "Done", ""]


def test_the_bar_never_wraps(screen: Screen) -> None:
    assert len(bar(1, 2, "x" * 500, 79)) == 79
    Terminal(screen).progress(1, 2, "y" * 500)
    assert len(screen.getvalue().removeprefix("\r\x1b[K")) == 99


def test_into_a_pipe_every_step_is_a_plain_line() -> None:
    pipe = io.StringIO()
    terminal = Terminal(pipe)
    terminal.progress(1, 2, "Step 1/2")
    terminal.close()
    assert pipe.getvalue() == "Step 1/2\n"


def test_a_reader_that_has_gone_away_does_not_end_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    terminal = Terminal(stream)
    terminal.line("nobody reads this")
    terminal.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[tuple[Agent, socket.socket]]:
    """A rank's agent, and the end at which its datagrams arrive."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as arriving:
        arriving.bind(str(tmp_path / "agent"))
        arriving.setblocking(False)
        agent = Agent(str(tmp_path / "agent"), 3)
        with agent._socket:
            yield agent, arriving


def arrivals(arriving: socket.socket) -> list[dict[str, Any]]:
    """What has arrived and not been received."""
    received: list[dict[str, Any]] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            received.append(json.loads(arriving.recv(1 << 20)))
    return received


def test_an_agent_gets_no_datagram_of_more_than_60_000_bytes(agent: tuple[Agent, socket.socket]) -> None:
    sender, arriving = agent
    sender.send("end", result="x" * 60_000)
    sender.send("end", result="x" * 59_900)
    assert [len(arrival["result"]) for arrival in arrivals(arriving)] == [59_900]


def test_an_agent_gets_the_last_thirty_lines_of_a_traceback(agent: tuple[Agent, socket.socket]) -> None:
    sender, arriving = agent

    def fail(depth: int) -> None:
        [fail(depth - 1) for _ in range(1)] if depth else int("x")

    with pytest.raises(ValueError) as failed:
        fail(20)
    sender.send_error(failed.value)
    lines = arrivals(arriving)[0]["traceback"]
    assert (len(lines), lines[-1].partition(":")[0]) == (30, "ValueError")


@pytest.mark.parametrize(("event", "seconds"), [("beat", 0), ("step", 0), ("error", 2.0), ("checkpoint", 2.0)])
def test_what_matters_later_waits_two_seconds_for_an_agent_whose_queue_is_full(
    agent: tuple[Agent, socket.socket], event: str, seconds: float
) -> None:
    waits: list[float] = []

    def full(*_: object) -> None:
        raise TimeoutError

    agent[0]._socket = cast(Any, SimpleNamespace(settimeout=waits.append, sendto=full))
    agent[0].send(event)
    assert waits == [seconds]


def test_the_pace_of_a_rank_is_sent_every_two_seconds(agent: tuple[Agent, socket.socket]) -> None:
    sender, arriving = agent
    now = [0.0]
    teller = PaceTeller(sender, lambda: now[0])
    for step in range(1, 6):
        now[0] += 0.8
        teller.step(step, 0.5)
    assert arrivals(arriving) == [{"rank": 3, "event": "pace", "step": 3, "steps": 3, "microseconds": 500_000}]


def test_of_a_long_log_the_last_mebibyte_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train_log.jsonl"
    with path.open("wb") as file:
        file.truncate(5 << 20)
        file.seek(5 << 20)
        file.write(b'\n{"step": 4}\n')
    assert len(jsonl._tail(path)) == 1 << 20
    assert jsonl._last_step(path) == 4


def test_of_the_events_before_the_files_are_open_the_first_two_hundred_are_kept(tmp_path: Path) -> None:
    reporter = Reporter(None, 0)
    for number in range(250):
        reporter.event("early", number=number)
    reporter.open_logs(tmp_path, 0)
    reporter.close()
    assert [event["number"] for event in records(tmp_path / "events.jsonl")] == list(range(200))
