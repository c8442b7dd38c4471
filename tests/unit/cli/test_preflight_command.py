"""`lockstep preflight`: what is sent to a cluster, and the whole command with processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from golden.plan_cases import job, profile
from lockstep.api.files.yamltext import dump_yaml
from lockstep.cli.main import app
from lockstep.platforms.kubernetes.shortruns import prepared
from lockstep_gang.contract.run import Run, WhenDone, parse_run


def sent(name: str = "x", **spec: Any) -> tuple[str, Run]:
    """(name of the objects, run.json)"""
    wanted = job(**spec)
    wanted = wanted.model_copy(update={"metadata": wanted.metadata.model_copy(update={"name": name})})
    run = prepared(wanted, profile(), "ns")
    return run.name, parse_run(run.frozen.run)


def test_on_a_shared_volume_it_runs_beside_the_job_in_the_job_s_own_folder() -> None:
    name, run = sent(storage={"mode": "Shared"})
    assert (name, run.run_dir, run.addresses[0]) == ("x-preflight", "/workspace/runs/x", "x-preflight-0.x-preflight-headless")
    assert run.preflight.only


def test_volumes_of_a_pod_s_own_are_found_by_the_job_s_name() -> None:
    assert sent(storage={"mode": "PerPod"})[0] == "x"


def test_a_long_name_stays_valid() -> None:
    name, _ = sent("a" * 41 + "-" + "b" * 10, storage={"mode": "Shared"})
    assert name == "a" * 41 + "-preflight"


def test_agents_wait_to_be_told_to_go_since_the_kubelet_would_start_them_again() -> None:
    assert sent()[1].when_done is WhenDone.WAIT


def test_asking_for_it_switches_it_on() -> None:
    assert sent(preflight="None")[1].preflight is not None


@pytest.mark.parametrize(("script", "code", "seen"), [("there.py", 0, "passed"), ("absent.py", 1, "workspace/absent.py on node 1")])
def test_the_command_prints_a_table_and_ends_with_its_verdict(tmp_path: Path, script: str, code: int, seen: str) -> None:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace/there.py").touch()
    spec = {"cluster": "local", "nodes": 2, "script": {"path": script}}
    (tmp_path / "job.yaml").write_text(
        dump_yaml({"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": spec})
    )
    command = ["preflight", "-f", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path)]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert done.exit_code == code, done.output
    assert seen in done.output
    assert json.loads(CliRunner().invoke(app, [*command, "-o", "json"]).stdout)["ok"] is (code == 0)
    assert not (tmp_path / "workspace/runs/x").exists()
