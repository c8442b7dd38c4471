"""`--set path=value`: what counts instead of a job file's own fields, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from lockstep.api.errors import ConfigError
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.job import TrainingJob
from lockstep.cli.main import app
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.places.orders import Order
from unit.api.test_jobfile import JOB


def made(*changes: str) -> TrainingJob:
    return parse_job_file(JOB, "j.yaml", changes)


def told(*changes: str) -> str:
    with pytest.raises(ConfigError) as caught:
        made(*changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "where", "value"),
    [
        ("nodes=1", "nodes", 1),
        ("spec.nodes=1", "nodes", 1),
        ("training.lora.rank=8", "training.lora.rank", 8),
        ("training.lora.targetModules=[q_proj, v_proj]", "training.lora.targetModules", ["q_proj", "v_proj"]),
        ("training.optimization.learningRate=2e-4", "training.optimization.learningRate", "2e-4"),
        ("training.optimization.learningRate=0.001", "training.optimization.learningRate", "0.001"),
        ("training.model.name=/workspace/other=1", "training.model.name", "/workspace/other=1"),
        ("restart={maxRestarts: 7}", "restart.maxRestarts", 7),
        ("suspend=true", "suspend", True),
    ],
)
def test_a_field_said_at_the_command_line_counts(change: str, where: str, value: Any) -> None:
    found: Any = made(change).spec.model_dump(mode="json", by_alias=True)
    for part in where.split("."):
        found = found[part]
    assert found == value


def test_what_the_file_says_beside_it_stays_and_the_last_word_counts() -> None:
    job = made("nodes=3", "nodes=4")
    assert job.spec.nodes == 4 and job.spec.training is not None and job.spec.training.model.name == "/m"


def test_null_leaves_a_field_out() -> None:
    assert made("nodes=null").spec.nodes is None


def test_the_name_can_be_said_and_an_entry_of_a_list() -> None:
    assert made("metadata.name=y").metadata.name == "y"
    changed = made("env=[{name: A, value: a}, {name: B, value: b}]", "env[1].value=c")
    assert [variable.value for variable in changed.spec.env] == ["a", "c"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "training.lora.rnk=8",
            ["spec.training.lora.rnk: unknown field; did you mean rank?", "valid here: ", "(--set training.lora.rnk=8)"],
        ),
        ("node=1", ["spec.node: unknown field; did you mean nodes?"]),
        ("nodes=many", ["spec.nodes: must be a whole number, without quotes (--set nodes=many)"]),
        ("nodes='2'", ["spec.nodes: must be a whole number"]),
        (
            "fabric.mode=Off",
            ["spec.fabric.mode: false is not valid (valid: 'Auto', 'RDMA' or 'TCP')", "YAML reads On, Off, Yes and No without quotes"],
        ),
        ("training.zeroStage=Stage9", ["spec.training.zeroStage", "valid: "]),
        ("nodes", ["must be path=value"]),
        ("nodes=", ["must be path=value", "null leaves a field out"]),
        ("a..b=1", ["is not a path"]),
        ("nodes.x=1", ["nodes is not a mapping"]),
        ("env[0].value=c", ["there is no entry [0]", "the list has 0"]),
        ("nodes=[1", ["is not valid YAML"]),
        ("nodes=!!python/name:os.system", ["tags such as"]),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_is_valid(change: str, words: list[str]) -> None:
    message = told(change)
    for word in words:
        assert word in message


def test_a_run_without_a_cluster_says_where_else_it_could_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("lockstep.cli.shared.target.remembered", list)
    (tmp_path / "job.yaml").write_text(JOB)
    refused = CliRunner().invoke(app, ["run", "-f", str(tmp_path / "job.yaml")])
    assert isinstance(refused.exception, ConfigError)
    assert all(
        word in str(refused.exception) for word in ("lockstep devcluster up", "--cluster", "KUBECONFIG", "--local", "--in-namespace")
    )


@pytest.mark.parametrize("how", [["--local"], ["--cluster", "local", "--in-namespace"]])
def test_run_starts_the_changed_job_wherever_it_runs(how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[TrainingJob] = []

    def start(order: Order, *_: object) -> int:
        started.append(order.job)
        return 0

    monkeypatch.setattr("lockstep.platforms.local.run.run_local", start)
    monkeypatch.setattr(TargetOptions, "target", lambda _: Target(cast(Any, None), "default", "local"))
    monkeypatch.setattr("lockstep.platforms.kubernetes.innamespace.InNamespace.run", lambda _, order: start(order))
    (tmp_path / "job.yaml").write_text(JOB)
    arguments = ["run", "-f", str(tmp_path / "job.yaml"), *how, "--set", "nodes=5", "--set", "training.lora.rank=4"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert started[0].spec.nodes == 5 and started[0].spec.training is not None and started[0].spec.training.lora.rank == 4
