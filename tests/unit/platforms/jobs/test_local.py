"""What a job becomes on this machine, and what it is refused for before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import Resolved
from lockstep.platforms.jobs.machine import check_inputs
from lockstep.platforms.local import run as run_module
from lockstep.platforms.local.placement import local_defaults, local_run, node_devices
from lockstep_gang.contract.run import Run, WhenDone
from lockstep_spec.choices import StorageMode

TRAINING = {"model": {"name": "/workspace/models/tiny"}, "data": {"path": "/datasets/all.jsonl"}}


def resolved(root: Path, **spec: Any) -> Resolved:
    if "script" not in spec:
        spec.setdefault("training", TRAINING)
    job = TrainingJob.model_validate(
        {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": spec}
    )
    profile = TrainingCluster.model_validate(
        {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingCluster", "metadata": {"name": "local"}, "spec": {}}
    )
    return resolve(job, profile, local_defaults(root, "uid-1"))


def made(root: Path, inherited: dict[str, str] | None = None, **spec: Any) -> Run:
    return local_run(resolved(root, nodes=2, gpusPerNode=0, **spec), root / "key", (4000, 5000), inherited or {})


def with_inputs(root: Path) -> Path:
    (root / "workspace/models/tiny").mkdir(parents=True)
    (root / "workspace/models/tiny/config.json").touch()
    (root / "datasets").mkdir()
    (root / "datasets/all.jsonl").touch()
    return root


def test_volumes_are_folders_and_nodes_are_on_loopback(tmp_path: Path) -> None:
    run = made(tmp_path)
    assert (run.run_dir, run.working_directory) == (str(tmp_path / "workspace/runs/x"), str(tmp_path / "workspace"))
    assert (run.addresses, run.coordinator_port, run.master_port) == (("127.0.0.1", "127.0.0.1"), 4000, 5000)
    assert run.storage is StorageMode.SHARED
    assert (run.training["model"]["name"], run.training["data"]["path"]) == (
        str(tmp_path / "workspace/models/tiny"),
        str(tmp_path / "datasets/all.jsonl"),
    )


def test_ranks_run_in_this_python_and_agents_end_with_the_job(tmp_path: Path) -> None:
    run = made(tmp_path)
    assert (run.command, run.when_done, run.report) == ((sys.executable, "-m", "lockstep_train"), WhenDone.EXIT, None)


def test_a_script_runs_from_the_workspace_with_its_arguments_as_they_are(tmp_path: Path) -> None:
    run = made(tmp_path, script={"path": "train.py", "args": ["--name", "a b; $(c)"]})
    assert run.command == (sys.executable, "train.py", "--name", "a b; $(c)")


def test_the_job_s_own_variables_reach_the_ranks(tmp_path: Path) -> None:
    job = resolved(tmp_path, gpusPerNode=1, env=[{"name": "A", "value": "b"}, {"name": "NCCL_ALGO", "value": "Ring"}])
    assert local_run(job, tmp_path / "key", (4000, 5000), {}).environment == {"A": "b", "NCCL_ALGO": "Ring"}


@pytest.mark.parametrize(
    ("each", "inherited", "present", "devices"),
    [
        (1, {}, 2, ("0", "1")),
        (2, {}, 8, ("0,1", "2,3")),
        (2, {"CUDA_VISIBLE_DEVICES": "7,6,5,4"}, 8, ("7,6", "5,4")),
        (1, {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, 8, ("GPU-a", "GPU-b")),
        (0, {"CUDA_VISIBLE_DEVICES": "0"}, 8, ("", "")),
        (0, {}, 0, ("", "")),
    ],
)
def test_nodes_on_one_machine_divide_its_gpus(
    each: int, inherited: dict[str, str], present: int, devices: tuple[str, ...], tmp_path: Path
) -> None:
    assert node_devices(resolved(tmp_path, nodes=2, gpusPerNode=each), inherited, present) == devices


def test_the_job_s_own_choice_of_gpus_is_divided_and_not_given_to_every_node(tmp_path: Path) -> None:
    env = [{"name": "CUDA_VISIBLE_DEVICES", "value": "4,5"}]
    job = resolved(tmp_path, nodes=2, gpusPerNode=1, env=env)
    assert node_devices(job, {"CUDA_VISIBLE_DEVICES": "0"}, 8) == ("4", "5")
    assert "CUDA_VISIBLE_DEVICES" not in local_run(job, tmp_path / "key", (4000, 5000), {}).environment


@pytest.mark.parametrize(
    ("inherited", "words"), [({}, "this machine has 1"), ({"CUDA_VISIBLE_DEVICES": "3,-1"}, "CUDA_VISIBLE_DEVICES names 1")]
)
def test_fewer_gpus_than_the_nodes_ask_for_are_refused(inherited: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"spec\.gpusPerNode is 1, so 2 nodes need 2 GPUs, and {words}: lower gpusPerNode or --nodes"):
        node_devices(resolved(tmp_path, nodes=2, gpusPerNode=1), inherited, 1)


SECRET = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}]


def test_a_variable_of_the_cluster_comes_from_this_shell(tmp_path: Path) -> None:
    assert "HF_TOKEN" not in made(tmp_path, {"HF_TOKEN": "x"}, env=SECRET).environment  # inherited, never written down


def test_a_variable_of_the_cluster_that_is_not_set_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"spec\.env takes HF_TOKEN from the cluster, .* set it in this shell instead"):
        made(tmp_path, env=SECRET)


def test_an_optional_variable_of_the_cluster_may_be_missing(tmp_path: Path) -> None:
    optional = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token", "optional": True}}}]
    assert "HF_TOKEN" not in made(tmp_path, env=optional).environment


def test_a_job_whose_inputs_are_there_may_start(tmp_path: Path) -> None:
    check_inputs(resolved(with_inputs(tmp_path)))


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (
            "datasets/all.jsonl",
            (
                "spec.training.data.path: there is no file or folder {} (/datasets/all.jsonl of the job): put it there, or name by"
                " --workspace the folder that contains workspace/ and datasets/"
            ),
        ),
        (
            "workspace/models/tiny/config.json",
            "spec.training.model.name: there is no file {} (/workspace/models/tiny/config.json of the job): put it",
        ),
    ],
)
def test_an_input_that_is_missing_is_one_sentence(tmp_path: Path, missing: str, sentence: str) -> None:
    (with_inputs(tmp_path) / missing).unlink()
    with pytest.raises(ConfigError) as caught:
        check_inputs(resolved(tmp_path))
    assert str(caught.value).startswith(sentence.format(tmp_path / missing))


def test_a_chat_template_is_looked_for_where_it_is_on_this_machine(tmp_path: Path) -> None:
    training = {**TRAINING, "data": {**TRAINING["data"], "chatTemplate": "/datasets/chat.jinja"}}
    with pytest.raises(ConfigError) as caught:
        check_inputs(resolved(with_inputs(tmp_path), training=training))
    assert str(caught.value).startswith(
        f"spec.training.data.chatTemplate: there is no file {tmp_path}/datasets/chat.jinja (/datasets/chat.jinja of the job)"
    )
    (tmp_path / "datasets/chat.jinja").touch()
    check_inputs(resolved(tmp_path, training=training))


def test_a_script_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"spec\.script\.path: there is no file .*/workspace/train\.py"):
        check_inputs(resolved(tmp_path, script={"path": "train.py"}))


def test_a_preview_is_of_a_training_s_data_on_this_machine(tmp_path: Path) -> None:
    from lockstep.cli.main import app

    spec: dict[str, Any] = {"nodes": 1, "gpusPerNode": 0, "script": {"path": "train.py"}}
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps({"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": spec}))
    for options, said in (
        (
            ["-f", str(path), "--local", "--workspace", str(tmp_path)],
            "--preview shows what spec.training would learn of its data, but this job runs a script",
        ),
        (["-f", str(path), "--in-namespace"], "--preview is for a job on this machine"),
        (["train.py"], "--preview is for a job file: name one with -f"),
    ):
        ended = CliRunner().invoke(app, ["run", "--preview", "3", *options])
        assert isinstance(ended.exception, ConfigError)
        assert said in str(ended.exception)
    assert not (tmp_path / "workspace").exists()


@pytest.mark.parametrize(("ended", "code"), [(0, 0), (78, 2), (1, 1), (-9, 1)])
def test_a_preview_ends_as_the_trainer_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int, code: int) -> None:
    from lockstep.cli.main import app

    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(returncode=ended)

    monkeypatch.setattr("lockstep.platforms.local.run.subprocess.run", run)
    spec = {"nodes": 2, "gpusPerNode": 0, "training": TRAINING}
    path = with_inputs(tmp_path) / "job.yaml"
    path.write_text(json.dumps({"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": spec}))
    shown = CliRunner().invoke(app, ["run", "-f", str(path), "--local", "--preview", "3", "--workspace", str(tmp_path)])
    assert shown.exit_code == code, shown.output
    assert [command[-2:] for command in asked] == [["--preview", "3"]]


def test_a_commit_to_resume_from_must_be_there(tmp_path: Path) -> None:
    training = {**TRAINING, "checkpoint": {"resumeFrom": "/workspace/runs/y/checkpoints/step-5.a1"}}
    with pytest.raises(ConfigError, match=r"spec\.training\.checkpoint\.resumeFrom: there is no folder"):
        check_inputs(resolved(with_inputs(tmp_path), training=training))


def test_each_agent_gets_the_devices_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}

    class Ended:
        def __init__(self, command: list[str], **how: Any) -> None:
            given[command[command.index("--node") + 1]] = how["env"]["CUDA_VISIBLE_DEVICES"]

        def wait(self, timeout: float | None = None) -> int:
            return 0

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(run_module.subprocess, "Popen", Ended)
    assert run_module.run_agents(tmp_path / "run.json", 2, tmp_path / "logs", devices=("0,1", "2,3")) == 0
    assert given == {"0": "0,1", "1": "2,3"}


class Played:
    """An agent that ends as it is written down for its node: its codes, one a start; None: when it is told to."""

    codes: ClassVar[dict[str, list[int | None]]] = {}

    def __init__(self, command: list[str], **how: Any) -> None:
        self._told = threading.Event()
        self._code = self.codes[command[command.index("--node") + 1]].pop(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None and not self._told.wait(timeout):
            raise subprocess.TimeoutExpired("agent", timeout or 0.0)
        return 75 if self._code is None else self._code

    def poll(self) -> int | None:
        return None if self._code is None and not self._told.is_set() else self.wait(0)

    def send_signal(self, number: int) -> None:
        self._told.set()


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ({"0": [-9, 0], "1": [None]}, 0, "the agent of node 0 was ended by SIGKILL: it is started again"),
        ({"0": [-9, -9], "1": [None]}, 1, "the agent of node 0 was ended by SIGKILL: it is started again"),
        ({"0": [70], "1": [None]}, 1, ""),
        ({"0": [None], "1": [-9]}, 1, "the agent of node 1 was ended by SIGKILL, its log is"),
        ({"0": [None], "1": [75]}, 1, "the agent of node 1 was stopped, but the job goes on without it: stopping the job"),
    ],
)
def test_an_agent_that_is_ended_from_outside(
    codes: dict[str, list[int | None]],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_module, "END_SECONDS", 0.2)
    monkeypatch.setattr(run_module.subprocess, "Popen", Played)
    Played.codes = codes
    assert run_module.run_agents(tmp_path / "run.json", 2, tmp_path / "logs") == code
    assert said in capsys.readouterr().err


def test_a_program_of_a_shell_is_no_script_path(tmp_path: Path) -> None:
    (tmp_path / "workspace/sub").mkdir(parents=True)
    (tmp_path / "workspace/sub/start").write_text("#!/usr/bin/env bash\nif true; then echo; fi\n")
    with pytest.raises(
        ConfigError, match=r"start is a program of bash, which Python can't read: write script.command: \[bash, sub/start\]"
    ):
        check_inputs(resolved(tmp_path, script={"path": "sub/start"}))


@pytest.mark.parametrize(
    ("script", "expected"),
    [({"path": "a.py"}, None), ({"path": "a.py", "localRank": True}, True), ({"module": "a", "localRank": False}, False),
        ({"module": "a"}, None), ({"command": ["a"]}, False)],
)  # fmt: skip
def test_agents_hear_whether_ranks_get_their_local_rank(script: dict[str, Any], expected: bool | None, tmp_path: Path) -> None:
    assert (made(tmp_path, script=script).local_rank, made(tmp_path).local_rank) == (expected, False)
