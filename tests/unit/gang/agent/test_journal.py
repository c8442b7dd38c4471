"""The node's log on the job's volume."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep_gang.agent.log import BEGINS, Journal
from lockstep_gang.contract.run import ReportTarget, Run
from support.clusters.bed_hosts import eventually
from unit.gang.cases import make_run


def run_in(folder: Path) -> Run:
    return replace(make_run(nodes=2), run_dir=str(folder))


def test_every_line_has_its_time_and_attempt_and_follows_who_wrote_it(tmp_path: Path) -> None:
    journal = Journal(run_in(tmp_path), 1, lambda line: None)
    journal.write("[lockstep] waiting")
    journal.begin_attempt(3)
    journal.write("[rank 5] lösung\ud800")
    journal.close(5)
    lines = (tmp_path / "logs/output/node-1.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z ", line) for line in lines)
    assert [line.split(" ", 1)[1] for line in lines] == [
        f"0 {BEGINS} {make_run(nodes=2).job.uid}",
        "0 [lockstep] waiting",
        r"3 [rank 5] lösung\ud800",
    ]


def test_an_agent_that_comes_back_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for _ in range(2):
        Journal(run_in(tmp_path), 0, lambda line: None).close(5)
    assert (tmp_path / "logs/output/node-0.log").read_text().count(BEGINS) == 2


def test_a_file_that_is_full_gives_way_to_a_new_one_and_only_the_last_two_stay(tmp_path: Path) -> None:
    for number in range(6):
        journal = Journal(run_in(tmp_path), 0, lambda line: None, file_bytes=1000)
        for _ in range(8):
            journal.write(f"number {number} {'x' * 60}")
        journal.close(5)
    folder = tmp_path / "logs/output"
    assert sorted(path.name for path in folder.iterdir()) == ["node-0.log", "node-0.log.1", "run.json"]
    assert "number 5" in (folder / "node-0.log").read_text() and "number 4" in (folder / "node-0.log.1").read_text()
    assert all(BEGINS in path.read_text().splitlines()[0] for path in folder.glob("node-0.log*"))


def test_what_the_run_was_told_is_beside_it_without_variables(tmp_path: Path) -> None:
    run = replace(run_in(tmp_path), environment={"WANDB_API_KEY": "very-secret"}, report=ReportTarget("https://x", "pem", "token"))
    Journal(run, 0, lambda line: None).close(5)
    text = (tmp_path / "logs/output/run.json").read_text()
    assert "very-secret" not in text and json.loads(text)["job"]["name"] == run.job.name


def test_what_the_run_was_told_is_there_before_lines_have_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep_gang.agent.log.TOGETHER_SECONDS", 600.0)
    journal, folder = Journal(run_in(tmp_path), 0, lambda line: None), tmp_path / "logs/output"
    journal.write("[lockstep] waiting")
    assert eventually((folder / "run.json").exists)
    assert not (folder / "node-0.log").exists()
    journal.close(5)
    assert "waiting" in (folder / "node-0.log").read_text()


def test_a_volume_that_cannot_be_written_is_told_once_and_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    told: list[str] = []
    journal = Journal(run_in(tmp_path), 1, told.append)
    journal.write("lost")
    journal.close(5)
    assert len(told) == 1 and "node-1.log" in told[0] and "Not a directory" in told[0]


@pytest.mark.parametrize(("is_full", "waits"), [(False, [0.3, 0.3]), (True, [0.3, 10.0])])
def test_lines_come_together_for_a_moment_and_a_volume_that_does_not_take_them_has_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool, waits: list[float]
) -> None:
    asked: list[float] = []
    over = threading.Event()

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            asked.append(timeout or 0.0)
            over.set()
            return super().wait(20 if timeout == 10.0 else 0)

    if is_full:
        (tmp_path / "logs").write_text("in the way")
    journal = Journal.__new__(Journal)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    journal.__init__(run_in(tmp_path), 1, lambda line: None)  # type: ignore[misc]
    journal._closed = Event()
    journal._closed.set()
    journal._write_all()
    assert asked == waits[: len(asked)] and len(asked) == 2
