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
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.checkout import ROOT

TIMEOUT_SECONDS = 180

ALL_REDUCE = """
import atexit, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), flush=True)
if os.environ.get("FAIL") == os.environ["RANK"]:
    atexit.register(os._exit, 1)  # else a thread of gloo now and then aborts the interpreter as it ends (pytorch issue 190489)
    raise ValueError("boom")
dist.barrier()
dist.destroy_process_group()
"""
FAILS_TWICE = """
import os, time
if os.environ["RANK"] == "0":
    print("begins at", time.time(), flush=True)
    raise SystemExit(os.environ["LOCKSTEP_ATTEMPT"] < "3")
"""
PATIENT = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("pid", os.getpid(), flush=True)
while True:
    signal.pause()
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

    def command(self, *options: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "lockstep.cli.main",
            "run",
            "-f",
            str(self.root / "job.yaml"),
            "--local",
            "--workspace",
            str(self.root),
            *options,
        ]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*options),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
        )

    def end(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.root / "workspace/runs/x/gang/end.json").read_text())
        return value

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """The job of PATIENT while its rank 0 runs."""
        process = subprocess.Popen(
            self.command(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=30)


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/operator:{ROOT}/workspace"}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def line_with(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the output ended without {text!r}")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_script_of_torch_runs_on_two_nodes_as_it_would_under_torchrun(folder: Folder) -> None:
    folder.job(ALL_REDUCE)
    ended = folder.run()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "[rank 0] sum 3.0 of 2" in ended.stdout
    assert folder.end()["state"] == "Complete"


def test_the_first_restart_follows_at_once_and_the_second_after_the_backoff(folder: Folder) -> None:
    backoff = 8
    folder.job(FAILS_TWICE, restart={"maxRestarts": 2, "backoffSeconds": backoff})
    ended = folder.run()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    begun = [float(line.split()[-1]) for line in ended.stdout.splitlines() if "[rank 0] begins at " in line]
    first, second = (again - before for before, again in pairwise(begun))
    assert first < backoff / 2
    assert second >= backoff


def test_the_failing_rank_of_a_collective_is_named_and_not_its_peer(folder: Folder) -> None:
    folder.job(ALL_REDUCE, env=[{"name": "FAIL", "value": "1"}])
    ended = folder.run()
    assert ended.returncode == 1
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


def test_lockstep_s_trainer_trains_an_adapter(folder: Folder, model: Path, data: Path) -> None:
    prepare_training(folder, model, data)
    ended = folder.run()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    adapter = folder.end()["result"]["adapter"]
    assert adapter == str(folder.root / "workspace/runs/x/adapter")
    assert (Path(adapter) / "adapter_config.json").is_file()


def bench(folder: Folder, *options: str) -> list[str]:
    words = ["bench", "scaling", str(folder.root / "job.yaml"), "--local", "--workspace", str(folder.root), *options]
    return [sys.executable, "-m", "lockstep.cli.main", *words]


def test_scaling_is_measured_by_short_runs_of_which_nothing_stays(folder: Folder, model: Path, data: Path) -> None:
    prepare_training(folder, model, data)
    command = bench(folder, "--steps", "3", "-o", "json", "--set", "training.optimization.warmupSteps=1")
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    one, two = json.loads(ended.stdout)["runs"]
    assert (one["nodes"], one["ranks"], two["nodes"], two["ranks"]) == (1, 1, 2, 2)
    assert one["steps"] == two["steps"] == 3 and one["efficiency"] == 1.0
    assert all(run["tokensPerSecond"] > 0 and run["stepSeconds"] > 0 and 0 <= run["waiting"] <= 1 for run in (one, two))
    assert list((folder.root / "workspace/runs").iterdir()) == []


def test_a_measurement_that_is_interrupted_leaves_nothing_behind(folder: Folder, model: Path, data: Path) -> None:
    prepare_training(folder, model, data)
    log = folder.root / "workspace/runs/.measured-x/logs/train_log.jsonl"
    process = subprocess.Popen(
        bench(folder, "--steps", "10000"), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while process.poll() is None and not (log.is_file() and log.stat().st_size):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # (as `timeout` does, which signals its group, too)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "the run that was measured is removed" in output
    assert list((folder.root / "workspace/runs").iterdir()) == []


def test_a_run_that_fails_says_why_in_its_row(folder: Folder, model: Path, data: Path) -> None:
    prepare_training(folder, model, data)
    (folder.root / "workspace/empty").mkdir()
    (folder.root / "workspace/empty/config.json").write_text("{}")
    command = bench(folder, "--nodes", "1", "--set", "training.model.name=/workspace/empty")
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert [line for line in ended.stdout.splitlines() if line.startswith("     1      1  ") and "rank 0" in line], ended.stdout


def test_ctrl_c_lets_the_ranks_save_and_leaves_nothing_behind(folder: Folder) -> None:
    folder.job(PATIENT)
    with folder.running() as process:
        pid = int(line_with(process, "pid ").split()[-1])
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert (process.returncode, gone(pid)) == (130, True)
    assert "the ranks save first" in output
    attempts = (folder.root / "workspace/runs/x/gang/attempts.jsonl").read_text().splitlines()
    assert json.loads(attempts[-1])["outcome"] == "Stopped"


def test_top_shows_the_cpu_memory_and_gpu_of_every_rank_while_they_run(folder: Folder) -> None:
    tool = folder.root / "nvidia-smi"
    rows = "".join(f"{index}, GPU-{index}, NVIDIA L4, {100 + index}, 23034, 9{index}, 6{index}, 70.4, 72.0\\n" for index in range(2))
    tool.write_text(f"#!/bin/sh\nprintf '{rows}'\n")
    tool.chmod(0o755)
    devices = [{"name": "CUDA_VISIBLE_DEVICES", "value": "1,0"}]
    folder.job(PATIENT.replace("signal.pause()", "pass"), gpusPerNode=1, env=devices, preflight={"mode": "Off"})
    command = [sys.executable, "-m", "lockstep.cli.main", "top", "x", "--local", "--workspace", str(folder.root)]
    environment = {**ENVIRONMENT, "PATH": f"{folder.root}:{os.environ['PATH']}"}
    with folder.running() as process:
        line_with(process, "pid ")
        shown = subprocess.run([*command, "-o", "json"], env=environment, capture_output=True, check=True, timeout=TIMEOUT_SECONDS)
        page = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=TIMEOUT_SECONDS).stdout
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
        assert process.wait(5) == -signal.SIGKILL
        output, _ = process.communicate(timeout=30)  # the agents hold its output until they end
    assert gone(pid), output
    assert list(private.iterdir()) == []


def test_the_same_job_cannot_run_twice_at_once(folder: Folder) -> None:
    folder.job(PATIENT)
    with folder.running() as process:
        line_with(process, "pid ")
        second = folder.run()
    assert second.returncode == 2
    assert "this job already runs here" in second.stderr


def test_a_missing_input_is_one_sentence_before_anything_starts(folder: Folder) -> None:
    folder.job(training={"model": {"name": "/workspace/models/none"}, "data": {"path": "/datasets/none.jsonl"}})
    ended = folder.run()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert "spec.training.model.name: there is no folder" in ended.stderr
    assert not (folder.root / "workspace/runs").exists()


def test_nodes_on_the_command_line_count_instead_of_the_job_s(folder: Folder) -> None:
    folder.job(ALL_REDUCE)
    ended = folder.run("--nodes", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "[rank 0] sum 1.0 of 1" in ended.stdout
