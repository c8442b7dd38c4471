"""The report as a file: where no operator takes reports, real coordinators write them into the run's folder."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep_gang.contract.preflight import Expected
from lockstep_gang.contract.report import Report, State, parse_report, report_file_text
from lockstep_gang.contract.run import RestartPolicy, Run
from lockstep_gang.contract.times import seconds_of
from lockstep_gang.coordinator import reports
from lockstep_gang.coordinator.owner import Ownership
from lockstep_gang.coordinator.records import Records
from lockstep_gang.coordinator.reports import ReportFile, reports_of
from lockstep_gang.lifecycle.gang import new_gang
from lockstep_gang.lifecycle.history import EndRecord
from lockstep_gang.lifecycle.summary import summarize
from unit.gang.cases import KEY, Gang, make_run

STEPS = """
import json, os, pathlib, socket, time
report = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
report.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
rank, go = int(os.environ["RANK"]), pathlib.Path(os.environ["FOLDER"], "go")
report.send(json.dumps({"rank": rank, "event": "step", "step": 7, "totalSteps": 9}).encode())
while not go.exists():
    time.sleep(0.02)
if go.read_text() == "fail" and rank == 1:
    raise ValueError("boom")
"""


@dataclass(frozen=True)
class WrittenReport:
    written: str
    report: Report


def parse_report_file(text: bytes) -> WrittenReport:
    value = json.loads(text)
    return WrittenReport(value["written"], parse_report(json.dumps(value["report"]).encode()))


def of_run(agents: Gang) -> WrittenReport | None:
    """The report in the run's folder; None: there is none yet. A file that is half written is an error."""
    path = agents.folder / "run/gang/report.json"
    return parse_report_file(path.read_bytes()) if path.exists() else None


def until(agents: Gang, holds: Callable[[Report], bool]) -> Report:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        written = of_run(agents)
        if written is not None and holds(written.report):
            return written.report
        time.sleep(0.02)
    raise AssertionError(of_run(agents))


def test_the_file_shows_a_run_from_its_step_to_its_end(agents: Gang) -> None:
    agents.write(STEPS)
    agents.start(0, 1)
    running = until(agents, lambda report: report.state is State.RUNNING and report.trainer is not None and report.trainer.step == 7)
    assert (running.attempt, running.ranks.ready, [node.connected for node in running.nodes]) == (1, 2, [True, True])
    (agents.folder / "go").touch()
    assert agents.codes() == [0, 0]
    written = of_run(agents)
    assert (written.report.state, written.report.job.uid) == (State.COMPLETE, "uid-1")
    assert written.report.sequence > running.sequence
    assert abs((seconds_of(written.written) or 0.0) - (agents.folder / "run/gang/report.json").stat().st_mtime) < 60
    assert sorted(path.name for path in (agents.folder / "run/gang").iterdir()) == [
        "attempts.jsonl", "end.json", "goodput.json", "owner.1.json", "report.json",
    ]  # fmt: skip


def test_the_file_ends_with_the_failure(agents: Gang) -> None:
    agents.write(STEPS)
    (agents.folder / "go").write_text("fail")
    agents.run(codes=[1, 1])
    written = of_run(agents)
    assert (written.report.state, written.report.failure.rank, written.report.failure.exception) == (State.FAILED, 1, "ValueError")


def test_a_preflight_alone_has_no_place_for_reports(tmp_path: Path) -> None:
    run = make_run(run_dir=str(tmp_path), preflight=Expected(only=True))
    assert reports_of(run, KEY, Records(run.run_dir), lambda _: None, print) is None
    assert isinstance(reports_of(make_run(), KEY, Records(run.run_dir), lambda _: None, print), ReportFile)


def test_a_file_that_can_t_be_written_is_told_once_and_the_job_goes_on(agents: Gang) -> None:
    agents.write("import os, sys; sys.exit(os.environ['LOCKSTEP_ATTEMPT'] == '1')", restart=RestartPolicy(1, 0))
    (agents.folder / "run/gang/report.json").mkdir(parents=True)
    agents.run(codes=[0, 0])
    assert agents.log().count("report.json (Is a directory): the job goes on, but commands can't see how it does") == 1


def test_a_coordinator_that_was_replaced_leaves_the_newer_one_s_report(tmp_path: Path) -> None:
    lines: list[str] = []

    async def write(run: Run) -> None:
        older, newer = Ownership(run), Ownership(run)
        older.take()
        newer.take()
        Records(run.run_dir, newer.check).write_report("newer")
        file = ReportFile(Records(run.run_dir, older.check), lines.append)
        await delivered(file, lambda: file.transition(summarize(new_gang(run), run)))

    asyncio.run(write(make_run(run_dir=str(tmp_path))))
    assert (tmp_path / "gang/report.json").read_text() == "newer"
    assert len(lines) == 1
    assert f"has taken over {tmp_path}" in lines[0]


async def delivered(file: ReportFile, offer: Callable[[], None]) -> None:
    """Offer something, and flush it."""
    offer()
    running = asyncio.ensure_future(file.run())
    await file.flush(60)
    running.cancel()
    await asyncio.wait([running])


async def test_the_last_flush_writes_what_is_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "PERIOD_SECONDS", 1e6)
    run = make_run(run_dir=str(tmp_path))
    async with asyncio.timeout(60):
        file = ReportFile(Records(run.run_dir), print)
        await delivered(file, lambda: file.transition(summarize(new_gang(run), run)))
        await delivered(file, lambda: file.refresh(lambda: summarize(new_gang(make_run(nodes=3)), make_run(nodes=3))))
    assert len(parse_report_file((tmp_path / "gang/report.json").read_bytes()).report.nodes) == 3


def test_the_file_s_texts_are_lines_that_can_be_printed() -> None:
    run = make_run()
    text = report_file_text(summarize(new_gang(run), run), "2026-11-24T00:00:00Z")
    value = json.loads(text)
    value["report"]["message"] = "a\x1b[31mb"
    assert "\x1b" not in parse_report_file(json.dumps(value).encode()).report.message


def test_a_folder_that_was_removed_after_the_end_stays_away(tmp_path: Path) -> None:
    records = Records(str(tmp_path / "run"))
    records.write_report("{}\n")
    records.write_end(EndRecord("u", State.COMPLETE, "done", 1, 0, "2026-01-01T00:00:00Z"))
    shutil.rmtree(tmp_path / "run")
    records.write_report("{}\n")
    assert not (tmp_path / "run").exists()
