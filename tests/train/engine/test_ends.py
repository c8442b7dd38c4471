"""How a rank ends, and the exit code and report that say so."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_harness import SOURCES, TIMEOUT_SECONDS, ForkServer, RunFile, torchrun_environment

from lockstep_machine.network import free_ports


def test_sigterm_on_one_rank_makes_all_save_the_same_step_and_end_with_75(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    path = run_file("stopped")
    ranks.run("terminate_at", [path] * 2, arguments={"step": 3, "rank": 1}, codes=75)
    assert (tmp_path / "stopped/checkpoints/step-3.a1/manifest.json").exists()
    again = ranks.run("main", [path] * 2)
    assert "(step 3)" in again.output


def test_a_loss_that_is_not_finite_ends_with_79_and_names_rank_and_step(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    ended = ranks.run("non_finite", [run_file("nan")] * 2, arguments={"step": 4, "rank": 1}, codes=79)
    assert "the loss of step 4 is not finite on rank 1;" in ended.outputs[0]
    assert not (tmp_path / "nan/checkpoints/step-4.a1").exists()


def test_out_of_memory_ends_with_77(ranks: ForkServer, run_file: RunFile) -> None:
    ranks.run("out_of_memory", [run_file("oom")], codes=77)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"zeroStage": "Stage4"}, 'training.zeroStage is "Stage4", but must be one of Stage1, Stage2, Stage3'),
        ({"optimization": {"learningrate": "1"}}, "training.optimization.learningrate is not a setting; valid here: epochs, learningRate"),
        ({"lora": {"targetModules": ["query"]}}, "no module named query in this model; available: down_proj, gate_proj, k_proj, lm_head"),
        ({"model": {"name": "/nowhere"}}, "training.model.name /nowhere holds no config.json"),
        ({"data": {"path": "/nowhere.jsonl"}}, "training.data.path /nowhere.jsonl can't be read"),
        ({"checkpoint": {"resumeFrom": "/nowhere"}}, "training.checkpoint.resumeFrom /nowhere holds no commit"),
    ],
)
def test_a_wrong_setting_ends_with_78_and_one_sentence(ranks: ForkServer, run_file: RunFile, change: dict[str, Any], named: str) -> None:
    ended = ranks.run("main", [run_file("wrong", **change)], codes=78)
    assert named in ended.output
    assert "Traceback" not in ended.output


def test_broken_lines_are_named_with_file_and_line(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n{"text": 3}\nnot json\n')
    ended = ranks.run("main", [run_file("broken", data={"path": str(broken)})], codes=78)
    assert f"{broken}:2: `text` is not a string; {broken}:3: not valid JSON" in ended.output


def test_the_agent_hears_of_every_stage_of_a_run(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "agent.sock"))
        agent.settimeout(60)
        path = run_file("told", optimization={"maxSteps": 2, "globalBatchSize": 4})
        outputs = ranks.start("main", [path], LOCKSTEP_REPORT_SOCKET=str(tmp_path / "agent.sock"))
        heard: list[dict[str, Any]] = []
        while not heard or heard[-1]["event"] not in {"end", "error"}:
            heard.append(json.loads(agent.recv(65536)))
        ended = ranks.wait(outputs)
        assert ended.codes == [0], ended.output
    assert [event["activity"] for event in heard if event["event"] == "activity"][:3] == ["Init", "Load", "Evaluate"]
    step = [event for event in heard if event["event"] == "step"][-1]
    assert (step["step"], step["totalSteps"], step["rank"]) == (2, 2, 0)
    assert set(step["metrics"]) >= {
        "loss", "learningRate", "gradientNorm", "tokensPerSecond", "stepSeconds", "saveFailures", "savesSkipped",
    }  # fmt: skip
    assert all(isinstance(value, str) for value in step["metrics"].values())
    commit = next(event for event in heard if event["event"] == "checkpoint")
    assert Path(commit["path"], "manifest.json").exists()
    assert commit["bytes"] > 0
    result = heard[-1]["result"]
    assert Path(result["adapter"]) == tmp_path / "told/adapter"
    assert float(result["evalLossBefore"]) > 0
    assert float(result["evalLossAfter"]) > 0


def test_the_agent_hears_of_an_error_with_its_traceback(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "agent.sock"))
        ranks.run("out_of_memory", [run_file("told", evaluation=None)], codes=77, LOCKSTEP_REPORT_SOCKET=str(tmp_path / "agent.sock"))
        heard = []
        while not heard or heard[-1]["event"] != "error":
            heard.append(json.loads(agent.recv(65536)))
    assert heard[-1]["exception"] == "OutOfMemoryError"
    assert any("exhausted" in line for line in heard[-1]["traceback"])


def test_two_processes_started_as_the_agent_starts_them_end_cleanly(run_file: RunFile, tmp_path: Path) -> None:
    """Real starts: `python -m lockstep_train` in torchrun's environment, with no home, no PATH and no compiler."""
    port = free_ports(1)[0]
    path = run_file("real", zeroStage="Stage3", optimization={"maxSteps": 1, "globalBatchSize": 4})
    processes = []
    for rank in range(2):
        environment = {**torchrun_environment(rank, 2, 2, port), "OMP_NUM_THREADS": "1", "LOCKSTEP_RUN": str(path), "PATH": "/nowhere"}
        environment |= {"PYTHONPATH": str(SOURCES), "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
        with (tmp_path / f"rank-{rank}.log").open("w") as log:
            processes.append(subprocess.Popen([sys.executable, "-m", "lockstep_train"], env=environment, stdout=log, stderr=log))
    codes = [process.wait(TIMEOUT_SECONDS) for process in processes]
    output = "".join((tmp_path / f"rank-{rank}.log").read_text() for rank in range(2))
    assert codes == [0, 0], output
    assert "Warning" not in output


def test_without_a_run_file_the_trainer_says_what_is_missing() -> None:
    environment = {"PYTHONPATH": str(SOURCES), "PATH": os.environ["PATH"]}
    ended = subprocess.run(
        [sys.executable, "-m", "lockstep_train"], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 78
    assert "give its file with --run or LOCKSTEP_RUN" in ended.stderr
