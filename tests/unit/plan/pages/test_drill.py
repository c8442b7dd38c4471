"""Drills: what speaks against one, which rights it needs, when a job has recovered, and what is done inside a pod."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.api.objects import Object
from lockstep.plan.pages.drill import (
    AFTER_INTERRUPT,
    RISKS,
    DrillOutcome,
    Fault,
    Right,
    cost_of,
    drill_page,
    has_recovered,
    rights,
    why_not_now,
)
from lockstep.platforms.inpod import drill, source_of
from lockstep.platforms.places import drills
from lockstep.platforms.places.drilledjob import DrilledJob

SOURCE = source_of(drill).decode()
FOLDER = "/workspace/runs/x"


def job(reason: str = "Running", *, training: bool = True, committed: int | None = 40, counted: int = 0) -> Object:
    status: Object = {"conditions": [{"type": "Progressing", "status": "True", "reason": reason, "message": "m"}], "attempts": 1}
    status |= {"checkpoint": {"lastCommittedStep": committed}} if committed is not None else {}
    status["restartsCountTowardsMax"] = counted
    return {"spec": {"training": {}} if training else {"script": {}}, "status": status}


def test_a_job_that_runs_well_may_be_drilled_in_every_way() -> None:
    assert [why_not_now(job(), fault) for fault in Fault] == [""] * len(Fault)


@pytest.mark.parametrize(
    ("a_job", "fault", "says"),
    [
        (job("Starting"), Fault.KILL_RANK, "the job is not running (Starting: m)"),
        ({"spec": {}, "status": {}}, Fault.KILL_OPERATOR, "the job is not running (Unknown"),
        (job(counted=3), Fault.FREEZE_RANK, "restart.maxRestarts is 3 and 3 are used"),
        (job(committed=None), Fault.KILL_RANK, "nothing is committed yet"),
        (job(training=False), Fault.CORRUPT_CHECKPOINT, "needs a job of Lockstep's trainer"),
    ],
)
def test_what_speaks_against_a_drill_is_said(a_job: Object, fault: Fault, says: str) -> None:
    assert says in why_not_now(a_job, fault)


def test_a_killed_operator_costs_no_restart_so_a_spent_budget_allows_it() -> None:
    assert why_not_now(job(counted=3), Fault.KILL_OPERATOR) == ""
    assert why_not_now(job(counted=3), Fault.LOSE_NODE) != ""


def test_every_drill_says_what_it_risks_and_which_rights_it_needs() -> None:
    assert set(RISKS) == set(Fault) == set(AFTER_INTERRUPT)
    assert list(map(str, rights(Fault.KILL_RANK, "ns"))) == ["list pods in namespace ns", "create pods/exec in namespace ns"]
    node = {Right(verb, "pods", namespace="ns") for verb in ("get", "delete")} | {
        Right(verb, "nodes", cluster_wide=True) for verb in ("get", "patch")
    }
    assert set(rights(Fault.LOSE_NODE, "ns")) - set(rights(Fault.KILL_RANK, "ns")) == node
    assert {right.namespace for right in rights(Fault.KILL_OPERATOR, "ns")} == {"lockstep-system"}


def test_a_job_has_recovered_when_a_later_attempt_has_made_a_step() -> None:
    entry: dict[str, Any] = {"attempt": 1, "cause": "Internal", "message": "m", "lostSteps": 3}
    status = {**job()["status"], "attempts": 2, "restartHistory": [entry]}
    assert not has_recovered(job()["status"], 1, tells_steps=False)
    assert not has_recovered({**status, "conditions": []}, 1, tells_steps=False)
    assert not has_recovered(status, 1, tells_steps=True)
    assert has_recovered(status, 1, tells_steps=False)
    assert has_recovered({**status, "restartHistory": [{**entry, "downtimeSeconds": 4}]}, 1, tells_steps=True)
    assert not has_recovered({**status, "attempts": 1}, 1, tells_steps=False)


def test_an_attempt_that_was_stopped_in_order_costs_what_its_stop_says() -> None:
    stop = {"attempt": 1, "time": "t", "save": "NotSaved", "lostSteps": 7, "message": "not every rank saved"}
    status = {**job()["status"], "attempts": 2, "stop": stop}
    assert cost_of(status, 1) == {"cause": "Stopped", "message": "not every rank saved", "lostSteps": 7}
    assert has_recovered(status, 1, tells_steps=True)
    assert cost_of(status, 2) is None


def test_an_outcome_is_told_without_what_was_not_measured() -> None:
    said = drill_page(DrillOutcome(Fault.KILL_RANK, "rank 1 on node 1", 1, stopped_seconds=0.31, lost_steps=0, named="Internal: m"))
    assert said.splitlines() == [
        "kill-rank: recovered",
        "  done                   rank 1 on node 1",
        "  ranks stopped after    0.3 s",
        "  named as               Internal: m",
        "  steps done again       0",
    ]


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like rank 987654 of attempt 5 of a run in FOLDER, with a child that does, too."""
    monkeypatch.setattr(drill, "run_dir", lambda: Path(FOLDER))
    (tmp_path / "run.json").write_text(json.dumps({"runDir": FOLDER}))
    program = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    variables = {
        "RANK": "987654",
        "LOCKSTEP_ATTEMPT": "5",
        "LOCKSTEP_REPORT_SOCKET": str(tmp_path),
        "LOCKSTEP_RUN": str(tmp_path / "run.json"),
        "PATH": os.environ["PATH"],
    }
    process = subprocess.Popen([sys.executable, "-c", program], env=variables, start_new_session=True)
    while not any(found["rank"] == 987654 for found in drill.processes()):  # until then it still has this process's variables
        assert process.poll() is None
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_the_ranks_own_process_is_hit_and_not_its_workers(rank: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]) -> None:
    drill.hit(987654, signal.SIGSTOP)
    assert json.loads(capfd.readouterr().out) == {"hit": 987654}
    pid, status = os.waitpid(rank.pid, os.WUNTRACED)
    assert (pid, os.WIFSTOPPED(status)) == (rank.pid, True)
    with pytest.raises(SystemExit, match="there is no process of rank 5"):
        drill.leader(5)


def test_a_rank_of_another_run_on_the_same_machine_is_not_this_runs(rank: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "run_dir", lambda: Path(f"{FOLDER}-2"))
    with pytest.raises(SystemExit, match="there is no process of rank 987654"):
        drill.hit(987654, signal.SIGKILL)
    assert rank.poll() is None


def on_node(verb: str, source: str = SOURCE, folder: str = FOLDER, **arguments: Any) -> subprocess.Popen[str]:
    """The verb as a node runs it, once it has said its first word."""
    command = [sys.executable, "-I", "-c", source, folder, verb, json.dumps(arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    return process


def test_a_frozen_rank_goes_on_when_nobody_listens_any_more(rank: subprocess.Popen[bytes]) -> None:
    with on_node("freeze", rank=987654) as gone:
        assert drill.state_letter(rank.pid) == "T"
        gone.stdin.close()
    assert drill.state_letter(rank.pid) in ("R", "S")
    with on_node("freeze", SOURCE.replace("SILENCE_SECONDS = 60.0", "SILENCE_SECONDS = 0.2"), rank=987654) as silent:
        silent.wait(30)
        assert drill.state_letter(rank.pid) in ("R", "S")


def test_a_rank_that_is_let_go_on_or_killed_ends_its_freezing(rank: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]) -> None:
    with on_node("freeze", rank=987654) as freezing:
        drill.thaw(987654)
        drill.thaw(987654)
        assert [json.loads(line) for line in capfd.readouterr().out.splitlines()] == [{"thawed": True}, {"thawed": False}]
        rank.kill()
        rank.wait()
        assert freezing.wait(30) == 0


def test_what_watches_ends_with_whoever_asked_for_it() -> None:
    with on_node("watch", attempt=5, seconds=600.0) as watching:
        watching.stdin.close()
        assert watching.wait(30) == 0


def test_a_full_volume_is_emptied_when_nobody_listens_any_more(tmp_path: Path) -> None:
    source = SOURCE.replace("if free > most:", "if False:")
    with on_node("fill", source, str(tmp_path), most=1 << 20, seconds=600.0) as filling:
        assert (tmp_path / "drill-fill").stat().st_size == 1 << 20
        filling.stdin.close()
        assert filling.wait(30) == 0
    assert list(tmp_path.iterdir()) == []


class FrozenJob:
    """A job whose node is a process of this machine."""

    name, namespace = "x", "ns"

    def __init__(self) -> None:
        self.said: list[str] = []
        self.say = self.said.append

    def on_node(self, node: int, verb: str, **arguments: Any) -> Object:
        assert verb == "thaw"
        return {"thawed": drill.let_go_on(drill.leader(arguments["rank"]))}


class LocalStream:
    def __init__(self, place: Any, node: int, verb: str, **arguments: Any) -> None:
        self.process, self.problem = on_node(verb, **arguments), ""

    def __enter__(self) -> LocalStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__(None, None, None)

    def wait(self, key: str, seconds: float) -> bool:
        return True

    def close(self) -> None:
        self.process.stdin.close()


def test_ctrl_c_lets_a_frozen_rank_go_on_and_says_so(rank: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drills, "VerbStream", LocalStream)
    job = FrozenJob()
    with pytest.raises(KeyboardInterrupt), drills._frozen(cast(DrilledJob, job), 1, 987654):
        assert drill.state_letter(rank.pid) == "T"
        raise KeyboardInterrupt
    assert drill.state_letter(rank.pid) in ("R", "S")
    assert job.said == ["freeze-rank: rank 987654 on node 1 goes on"]


def commit(root: Path, name: str) -> Path:
    folder = root / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "shard-r00000-of-00001.safetensors").write_bytes(bytes(1000))
    return folder


def test_the_newest_commit_is_damaged_and_only_when_there_is_one_before_it(
    tmp_path: Path, rank: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drill, "run_dir", lambda: tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"runDir": str(tmp_path)}))
    commit(tmp_path, "step-100.a1")
    with pytest.raises(SystemExit, match="there are 1 commits"):
        drill.corrupt(987654)
    newest = commit(tmp_path, "step-20.a2")
    drill.corrupt(987654)
    shard = newest / "shard-r00000-of-00001.safetensors"
    assert json.loads(capfd.readouterr().out) == {"hit": 987654, "damaged": str(shard), "step": 20}
    assert shard.read_bytes().count(b"\xff") == 64
    assert rank.wait(10) == -signal.SIGKILL


def test_the_commit_that_an_attempt_began_with_is_read_from_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drill, "run_dir", lambda: tmp_path)
    (tmp_path / "checkpoints" / "chain").mkdir(parents=True)
    record = {"attempt": 7, "given": 3, "jobUid": "u", "start": "step-30.a6"}
    (tmp_path / "checkpoints" / "chain" / "a7.json").write_text(json.dumps(record))
    drill.started_from(3)
    drill.started_from(4)
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert found == [{"record": "a7.json", "start": "step-30.a6", "step": 30}, {"record": None, "start": None, "step": None}]


def test_a_volume_with_more_room_than_may_be_filled_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "run_dir", lambda: tmp_path)
    with pytest.raises(SystemExit, match="MiB free, and no more than 1 are to be written"):
        drill.fill(1 << 20, 1.0)
    assert list(tmp_path.iterdir()) == []


def test_what_is_sent_to_pods_needs_nothing_but_python() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", "-c", SOURCE, FOLDER, "hit", '{"rank": -1, "number": 9}'], capture_output=True,
        text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "there is no process of rank -1 here\n")
