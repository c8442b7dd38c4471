"""`lockstep run -f job.yaml --local` from the outside: real processes, real torch ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.checkout import ROOT
from support.in_process import lockstep
from unit.gang.cases import gone

TIMEOUT_SECONDS = 180

ALL_REDUCE = """
import atexit, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), flush=True)
if dist.get_rank() == 1:
    atexit.register(os._exit, 1)  # else a thread of gloo now and then aborts the interpreter as it ends (pytorch issue 190489)
    raise ValueError("boom")
dist.barrier()
"""
FAILS_AT_FIRST = """
import os, time
if os.environ["RANK"] == "0":
    print("begins at", time.time(), flush=True)
    raise SystemExit(int(os.environ["LOCKSTEP_ATTEMPT"]) < int(os.environ["ENDS"]))
"""
STAND_IN = """
import json, os, signal, sys
from pathlib import Path
if "LOCKSTEP_STANDBY" in os.environ:
    os.environ.update({name: value for name, value in json.loads(sys.stdin.readline())["environment"].items() if value is not None})
nodes = os.environ["WORLD_SIZE"]
if nodes == "1":
    raise ValueError("there is no such model")
if os.environ["RANK"] == "0":
    logs = Path(json.loads(Path(os.environ["LOCKSTEP_RUN"]).read_text())["runDir"]) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "train_log.jsonl").write_text('{"step": 1}\\n')
signal.pause()
"""
"""A trainer that fails alone, and takes its first step beside another one. It imports nothing that takes seconds."""
PATIENT = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("pid", os.getpid(), flush=True)
while True:
    signal.pause()
"""
BUSY = """
import os, time
print("pid", os.getpid(), flush=True)
while True:
    [None for _ in range(10**6)]
    time.sleep(0.1)
"""


class Folder:
    """A workspace with a script, and the command line on a job of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "workspace").mkdir()
        (root / "datasets").mkdir()

    def job(self, script: str | None = None, **spec: Any) -> None:
        if script is not None:
            (self.root / "workspace/script.py").write_text(script)
            spec["script"] = {"path": "script.py"}
        base = {"nodes": 2, "gpusPerNode": 0, "restart": {"maxRestarts": 0}}
        job = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": base | spec}
        (self.root / "job.yaml").write_text(yaml.safe_dump(job))

    def words(self, *options: str) -> list[str]:
        return ["run", "-f", str(self.root / "job.yaml"), "--cluster", str(self.root), *options]

    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "lockstep.cli.main", *self.words(*options)]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*options), **OPTIONS, capture_output=True, timeout=TIMEOUT_SECONDS, check=False)

    def end(self) -> dict[str, Any]:
        return json.loads((self.root / "workspace/runs/x/gang/end.json").read_text())

    def attempts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.root / "workspace/runs/x/gang/attempts.jsonl").read_text().splitlines()]

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """Run the job, and end it if it still runs."""
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(self.command(), **OPTIONS, **streams, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=TIMEOUT_SECONDS)


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/operator:{ROOT}/workspace"}
OPTIONS: dict[str, Any] = {"env": ENVIRONMENT, "stdin": subprocess.DEVNULL, "text": True}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def line_with(process: subprocess.Popen[str], text: str) -> str:
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the output ended without {text!r}")


def test_the_first_restart_does_not_wait_for_the_backoff(folder: Folder) -> None:
    folder.job(FAILS_AT_FIRST, restart={"maxRestarts": 1, "backoffSeconds": 3600}, env=[{"name": "ENDS", "value": "2"}])
    ended = folder.run()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [attempt["outcome"] for attempt in folder.attempts()] == ["Failed", "Complete"]


def test_the_second_restart_waits_for_the_backoff(folder: Folder) -> None:
    backoff = 8  # more than a start takes on busy cores
    folder.job(FAILS_AT_FIRST, restart={"maxRestarts": 2, "backoffSeconds": backoff}, env=[{"name": "ENDS", "value": "3"}])
    ended = folder.run()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    _, second, third = (float(line.split()[-1]) for line in ended.stdout.splitlines() if "[rank 0] begins at " in line)
    assert third - second >= backoff


def test_the_failing_rank_of_a_collective_is_named_and_not_its_peer(folder: Folder) -> None:
    folder.job(ALL_REDUCE)
    ended = folder.run()
    assert ended.returncode == 1
    assert "[rank 0] sum 3.0 of 2" in ended.stdout
    failure = folder.end()["failure"]
    assert (failure["rank"], failure["exception"]) == (1, "ValueError")
    assert "rank 1 on node 1 exited with 1: ValueError: boom" in ended.stdout


def prepare_training(folder: Folder, model: Path, data: Path) -> None:
    (folder.root / "workspace/models").mkdir()
    (folder.root / "workspace/models/tiny").symlink_to(model)
    (folder.root / "datasets/data.jsonl").symlink_to(data)
    training = {
        "model": {"name": "/workspace/models/tiny"},
        "lora": {"rank": 4, "targetModules": ["q_proj", "v_proj"]},
        "data": {"path": "/datasets/data.jsonl", "maxLength": 64},
        "optimization": {"maxSteps": 2, "microBatchSize": 2},
        "checkpoint": {"everySteps": 2},
    }
    folder.job(training=training)


def test_the_data_of_a_job_is_shown_as_the_model_would_learn_it_and_nothing_is_started(folder: Folder, model: Path, data: Path) -> None:
    prepare_training(folder, model, data)
    shown = folder.run("--preview", "2")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    record = json.loads(data.read_text().splitlines()[0])
    path = folder.root / "datasets/data.jsonl"
    assert shown.stdout.startswith(f"{path}:1: ")
    assert f"{record['prompt']}[{record['completion']}«</s>»]" in shown.stdout
    assert [line.split(": ")[0] for line in shown.stdout.splitlines() if line.endswith(" learned")] == [f"{path}:1", f"{path}:2"]
    assert not (folder.root / "workspace/runs").exists()


def bench(folder: Folder, *options: str) -> list[str]:
    words = ["bench", "scaling", str(folder.root / "job.yaml"), "--cluster", str(folder.root), *options]
    return [sys.executable, "-m", "lockstep.cli.main", *words]


def test_scaling_is_measured_by_short_runs_of_which_nothing_stays(folder: Folder, model: Path, data: Path) -> None:
    prepare_training(folder, model, data)
    command = bench(folder, "--nodes", "2", "--steps", "3", "-o", "json", "--set", "training.optimization.warmupSteps=1")
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (two,) = json.loads(ended.stdout)["runs"]
    assert (two["nodes"], two["ranks"], two["steps"], two["efficiency"]) == (2, 2, 3, 1.0)
    assert two["tokensPerSecond"] > 0 and two["stepSeconds"] > 0 and 0 <= two["waiting"] <= 1
    assert list((folder.root / "workspace/runs").iterdir()) == []


def prepare_stand_in(folder: Folder) -> dict[str, str]:
    """A job of STAND_IN in place of Lockstep's trainer, and the environment of the command line that finds it."""
    trainer = folder.root / "stand-in/lockstep_train"
    trainer.mkdir(parents=True)
    (trainer / "__init__.py").touch()
    (trainer / "__main__.py").write_text(STAND_IN)
    (folder.root / "workspace/models/tiny").mkdir(parents=True)
    (folder.root / "workspace/models/tiny/config.json").write_text("{}")
    (folder.root / "datasets/data.jsonl").write_text('{"text": "a"}\n')
    folder.job(training={"model": {"name": "/workspace/models/tiny"}, "data": {"path": "/datasets/data.jsonl"}})
    return {**ENVIRONMENT, "PYTHONPATH": f"{trainer.parent}:{ENVIRONMENT['PYTHONPATH']}"}


def test_a_measurement_that_fails_or_is_interrupted_says_so_and_leaves_nothing_behind(folder: Folder) -> None:
    environment = prepare_stand_in(folder)
    log = folder.root / "workspace/runs/.measured-x/logs/train_log.jsonl"
    process = subprocess.Popen(bench(folder), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        row = line_with(process, "     1      1  ")
        while process.poll() is None and not (log.is_file() and log.stat().st_size):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # (as `timeout` does, which signals its group, too)
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert "rank 0" in row and "ValueError: there is no such model" in row
    assert process.returncode == 130 and "the run that was measured is removed" in output
    assert list((folder.root / "workspace/runs").iterdir()) == []


def test_a_measurement_that_fails_ends_with_1(folder: Folder) -> None:
    environment = prepare_stand_in(folder)
    command = bench(folder, "--nodes", "1")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "ValueError: there is no such model" in ended.stdout


def test_top_shows_the_cpu_memory_and_gpu_of_every_rank_while_they_run(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder.root / "nvidia-smi"
    rows = "".join(f"{index}, GPU-{index}, NVIDIA L4, {100 + index}, 23034, 9{index}, 6{index}, 70.4, 72.0\\n" for index in range(2))
    tool.write_text(f"#!/bin/sh\nprintf '{rows}'\n")
    tool.chmod(0o755)
    devices = [{"name": "CUDA_VISIBLE_DEVICES", "value": "1,0"}]
    folder.job(BUSY, gpusPerNode=1, env=devices, preflight="None")
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{folder.root}:{os.environ['PATH']}")
    monkeypatch.setenv("PATH", ENVIRONMENT["PATH"])
    with folder.running() as process:
        line_with(process, "pid ")
        shown = lockstep("top", "x", "--cluster", str(folder.root), "-o", "json")
        monkeypatch.chdir(folder.root)
        page = lockstep("top", "x", "--cluster", "./").stdout
    assert shown.returncode == 0, shown.stderr
    assert "not running" not in page, "its ranks are found by a relative workspace, too"
    (node,) = json.loads(shown.stdout)["nodes"]
    assert (node["ranks"], node["ranksRunning"]) == ([0, 1], [0, 1])
    assert [(load["rank"], load["gpu"]) for load in node["rankLoads"]] == [(0, 1), (1, 0)]
    assert all(load["cores"] > 0 and load["bytes"] > 1 << 20 for load in node["rankLoads"])
    assert node["cpu"]["cores"] > 0 and 0 < node["memory"]["bytes"] < node["memory"]["limitBytes"]
    (row,) = [line for line in page.splitlines() if line.startswith("0 ") and "91%" in line]
    assert " ".join(row.split()).endswith("1 91% 101 MiB of 22.5 GiB 61 °C 70 W of 72")


def test_a_killed_command_line_leaves_nothing_behind(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.job(PATIENT)
    private = folder.root / "private"
    private.mkdir()
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(private))
    with folder.running() as process:
        pid = int(line_with(process, "pid ").split()[-1])
        assert [path.name for path in private.glob("*/key")] == ["key"]
        process.kill()
        assert process.wait(TIMEOUT_SECONDS) == -signal.SIGKILL
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)  # the agents hold its output until they end
    assert gone(pid, 0), output
    assert list(private.iterdir()) == []
