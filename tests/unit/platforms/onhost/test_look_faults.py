"""A look at a host on which something is broken: what it can't tell it says, and it tells all the rest."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.plan.hosts.facts import read_host
from lockstep.platforms.onhost import look
from unit.virtual_time import VirtualClock

ROW = "0, GPU-0, RTX 4090, 24564, 550.54, 8.9, 0, 00000000:01:00.0, [N/A]"
Json = Any
REQUEST = {"workspace": "~/ws", "datasets": "~/ds", "ports": [29400, 29499]}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("XDG_STATE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def smi(home: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put an nvidia-smi on the PATH that does this."""
    path = home / "bin" / "nvidia-smi"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("script", "count", "problem"),
    [
        (f"case $1 in --query-gpu*) echo '{ROW}';; esac", 1, ""),
        ("echo 'No devices were found'; exit 6", 0, ""),
        ("echo 'Unable to determine the device handle'; exit 15", 0, "nvidia-smi ends with 15: Unable to determine the device handle"),
        ("exit 9", 0, "nvidia-smi ends with 9: it says nothing"),
        ("exec sleep 60", 0, "nvidia-smi gives no answer in 1 s"),
        (f"case $1 in --query-gpu*) echo '{ROW}';; *) exit 3;; esac", 1,
            "who uses its GPUs is not known: nvidia-smi ends with 3: it says nothing"),
        (f"case $1 in --query-gpu*) echo '{ROW}'; echo 'WARNING: infoROM is corrupted at gpu 0000:01:00.0';; esac", 1, ""),
        (f"echo '{ROW}'; echo 'Unknown Error'", 1, "nvidia-smi says of a GPU: Unknown Error"),
        (f"echo '{ROW}'; echo '{ROW.replace('24564', '[GPU requires reset]').replace('GPU-0', 'GPU-1')}'", 1,
            "nvidia-smi doesn't describe GPU GPU-1: index 0, memory.total [GPU requires reset]"),
        (
            'case $1 in *compute_cap*) echo \'Field "compute_cap" is not a valid field to query.\'; exit 2;; '
            f"--query-gpu*) echo '{ROW.replace(', 8.9', '')}';; esac", 1, "",
        ),
        ('echo \'Field "uuid" is not a valid field to query.\'; exit 2', 0,
            'nvidia-smi ends with 2: Field "uuid" is not a valid field to query.'),
    ],
    ids=["well", "none", "lost", "mute", "hangs", "users", "warns", "odd", "reset", "old", "ancient"],
)  # fmt: skip
def test_gpus_that_the_driver_does_not_tell_are_not_taken_for_none(
    home: Path, monkeypatch: pytest.MonkeyPatch, script: str, count: int, problem: str
) -> None:
    smi(home, monkeypatch, script)
    monkeypatch.setattr(look, "SMI_SECONDS", 1.0)
    told = read_host("lab0", json.loads(json.dumps(look.look(REQUEST))))
    assert (len(told.gpus), told.gpu_problem) == (count, problem)
    if count and not problem:
        assert told.gpus[0].capability == (None if "is not a valid" in script else (8, 9))


def test_a_job_whose_files_cannot_be_read_hides_no_other_one(home: Path) -> None:
    jobs = home / ".local/state/lockstep/jobs"
    for name, text in {
        "broken": '{"workspace": 5}',
        "long": json.dumps({"workspace": "/" + "a" * 300}),
        "other": '{"format": "lockstep-host-job/9"}',
        "torn": "{",
    }.items():
        (jobs / name).mkdir(parents=True)
        (jobs / name / "job.json").write_text(text)
    (jobs / "torn" / "run.json").write_text('{"restart": {"retry": "x"}, "coordinatorPort": Infinity}')
    gang = home / "ws/runs/torn/gang"
    gang.mkdir(parents=True)
    (gang / "attempts.jsonl").write_text('{"attempt": 1}\n{"attempt": Infinity}\n' + "[" * 100_000 + "\n{}\n5\n")
    (gang / "report.json").write_text('{"report": 5}')
    (gang / "end.json").write_text('{"retry": "x", "jobUid": "u"}')
    told = read_host("lab0", json.loads(json.dumps(look.look(REQUEST))))
    assert "File name too long" in told.jobs["long"].problem and str(jobs / "broken") in told.jobs["broken"].problem
    assert "job.json" in told.jobs["other"].problem
    torn = told.jobs["torn"]
    assert (torn.problem, torn.highest_attempt, torn.retry, torn.report) == ("", 1, 0, None)


def report_of(home: Path, uid: str, state: str, ready: int) -> None:
    """Put a report of the job x in place, as its coordinator does."""
    report = {"job": {"uid": uid}, "state": state, "ranks": {"desired": 2, "ready": ready}}
    path = home / "ws/runs/x/gang/report.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".draft").write_text(json.dumps({"report": report}))
    path.with_suffix(".draft").replace(path)


@pytest.mark.parametrize(("state", "ready"), [("Running", 2), ("Failed", 0)])
def test_an_answer_about_one_job_waits_until_its_own_ranks_run_or_it_has_ended(
    home: Path, monkeypatch: pytest.MonkeyPatch, state: str, ready: int
) -> None:
    smi(home, monkeypatch, "exit 9")
    record = home / ".local/state/lockstep/jobs/x/job.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"workspace": str(home / "ws"), "job": {"metadata": {"uid": "u2"}}}))
    report_of(home, "u1", "Running", 2)  # (of an earlier start)
    answers: list[Json] = []
    asking = threading.Thread(target=lambda: answers.append(look.look({**REQUEST, "job": "x", "patience": 60.0})))
    asking.start()
    for tells_nothing in (("u2", "Waiting", 0), ("u2", "Starting", 1)):
        asking.join(0.1)
        report_of(home, *tells_nothing)
    asking.join(0.1)
    assert asking.is_alive()
    report_of(home, "u2", state, ready)
    asking.join(30)
    assert answers[0]["jobs"]["x"]["report"]["state"] == state
    assert answers[0]["gpuProblem"] == "", "nobody asked the driver"


@pytest.mark.parametrize(
    ("record", "least", "most"),
    [('{"job": {"metadata": {"uid": "u"}}}', 1.0, 1.03), ("{", 1.0, 1.03), ('{"workspace": 5}', 0.0, 0.0)],
    ids=["silent", "torn", "damaged"],
)
def test_an_answer_about_one_job_waits_no_longer_than_it_may(
    home: Path, monkeypatch: pytest.MonkeyPatch, record: str, least: float, most: float
) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(look, "time", clock)
    path = home / ".local/state/lockstep/jobs/x/job.json"
    path.parent.mkdir(parents=True)
    path.write_text(record)
    read_host("lab0", json.loads(json.dumps(look.look({**REQUEST, "job": "x", "patience": 1.0}))))
    assert least <= clock.now - 1000.0 <= most


def test_a_commit_that_is_removed_while_one_looks_at_it_has_no_time(tmp_path: Path) -> None:
    assert look.time_of(tmp_path / "step-1.a1") is None
    assert look.time_of(tmp_path) == tmp_path.stat().st_mtime


def test_a_path_that_cannot_be_looked_at_is_not_there() -> None:
    entry = ["spec.model", "/" + "a" * 300, "folder"]
    assert look.missing([entry, ["spec.data", "/", "folder"]]) == [entry]
    assert "File name too long" in look.folder(entry[1])["problem"]
