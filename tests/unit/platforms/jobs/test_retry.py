"""`lockstep retry`: a failed job goes on; one that runs or is complete is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from lockstep.api.errors import ConfigError
from lockstep.cli.jobs import change
from lockstep.cli.main import app
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.platforms.kubernetes import job as kubernetes_job
from lockstep.platforms.kubernetes.backend import KubernetesBackend
from lockstep.platforms.kubernetes.job import KubernetesJob
from support.checkout import ROOT

JOB = """
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: x}
spec: {cluster: local, nodes: 1, script: {path: rank.py}, restart: {maxRestarts: 0}}
"""
FAILS_ONCE = "import os, sys\nsys.exit(0 if os.path.exists('mended') else 3)\n"


def condition(kind: str, status: str, reason: str = "R") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": "all ranks run"}


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is sent to the API server."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(kubernetes_job, "patch_spec", lambda client, namespace, name, spec: sent.append(spec))
    return sent


def with_status(monkeypatch: pytest.MonkeyPatch, conditions: list[dict[str, str]], **spec: Any) -> None:
    job = {"metadata": {"name": "x", "namespace": "ns"}, "spec": spec, "status": {"conditions": conditions}}
    target = cast(Any, SimpleNamespace(client=None, namespace="ns", options=""))
    monkeypatch.setattr(change, "find_job", lambda *_: KubernetesJob(target, job, KubernetesBackend(target)))


@pytest.mark.parametrize(("before", "after"), [({}, 1), ({"restart": {"retry": 4}}, 5)])
def test_a_failed_job_s_number_of_retries_is_raised(
    monkeypatch: pytest.MonkeyPatch, patched: list[dict[str, Any]], before: dict[str, Any], after: int
) -> None:
    with_status(monkeypatch, [condition("Failed", "True")], **before)
    change.retry(TargetOptions(), "x")
    assert patched == [{"restart": {"retry": after}}]


def test_a_job_without_a_status_is_not_retried(monkeypatch: pytest.MonkeyPatch, patched: list[dict[str, Any]]) -> None:
    with_status(monkeypatch, [])
    with pytest.raises(ConfigError, match="job x has not failed, so there is nothing to retry: its status says nothing yet"):
        change.retry(TargetOptions(), "x")
    assert patched == []


def test_it_says_which_job_or_which_file(patched: list[dict[str, Any]]) -> None:
    for words, message in (
        ([], "name the failed job"),
        (["-f", "job.yaml"], "name the failed job"),
        (["-f", "job.yaml", "--local", "--in-namespace"], "use one of them"),
    ):
        result = CliRunner().invoke(app, ["retry", *words])
        assert message in str(result.exception)


def test_a_local_run_goes_on_as_the_same_job_until_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace/rank.py").write_text(FAILS_ONCE)

    def lockstep(verb: str) -> Any:
        return CliRunner().invoke(app, [verb, "-f", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path)])

    assert "no run x can be read" in str(lockstep("retry").exception)
    assert lockstep("run").exit_code == 1
    assert lockstep("retry").exit_code == 1
    (tmp_path / "workspace/mended").touch()
    assert lockstep("retry").exit_code == 0
    records = [json.loads(line) for line in (tmp_path / "workspace/runs/x/gang/attempts.jsonl").read_text().splitlines()]
    assert [(record["attempt"], record["outcome"], record["retry"]) for record in records] == [
        (1, "Failed", 0),
        (2, "Failed", 1),
        (3, "Complete", 2),
    ]
    assert len({record["jobUid"] for record in records}) == 1
    assert "is complete: there is nothing to retry" in str(lockstep("retry").exception)


def test_fresh_is_resume_from_none_and_no_matter_of_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run_local(order: Any, workspace: Path, earlier: Any = None) -> int:
        asked.append(order.job.spec.training.checkpoint.resume_from)
        return 0

    monkeypatch.setattr("lockstep.platforms.local.run.run_local", run_local)
    sample = str(ROOT / "manifests/samples/trainingjob.yaml")
    assert CliRunner().invoke(app, ["run", "-f", sample, "--local"]).exit_code == 0
    assert CliRunner().invoke(app, ["run", "-f", sample, "--local", "--fresh"]).exit_code == 0
    assert asked == ["Auto", "None"]
    script = tmp_path / "job.yaml"
    script.write_text("apiVersion: lockstep.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: x}\nspec: {nodes: 1, script: {path: a.py}}\n")
    refused = CliRunner().invoke(app, ["run", "-f", str(script), "--local", "--fresh"])
    assert "runs a script, which finds its own checkpoints" in refused.output + str(refused.exception)
    assert "--fresh is for a job file" in str(CliRunner().invoke(app, ["run", "--fresh", "train.py"]).exception)
