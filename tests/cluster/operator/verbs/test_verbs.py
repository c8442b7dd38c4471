"""The verbs about a job, typed by a person: on a real cluster, and where there is nothing to act on."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from support.checkout import ROOT
from support.clusters.cluster_jobs import API, Jobs, kubeconfig_of
from support.in_process import Told
from support.in_process import lockstep as typed


def lockstep(jobs: Jobs, *arguments: str, namespaced: bool = True, stdin: str = "") -> Told:
    """Type the verb in the jobs' namespace."""
    return typed(*arguments, *(["-n", jobs.namespace] if namespaced else []), stdin=stdin)


def job_file(folder: Path, name: str, script: str) -> str:
    """A file of a job on two nodes of the `local` cluster, which states no namespace."""
    volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": "scripts"}}
    spec = {"nodes": 2, "script": {"path": f"/scripts/{script}"}, "podTemplate": {"volumes": [volume]}, "restart": {"maxRestarts": 0}}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}))
    return str(file)


def test_a_person_with_the_role_edit_runs_a_job(jobs: Jobs, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = job_file(tmp_path, "by-edit", "ok.py")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of("edit", jobs, cluster, tmp_path)))
    done = lockstep(jobs, "run", "-f", file, "--cluster", "local")
    assert done.returncode == 0 and "hello from 0" in done.stdout, done.stderr
    jobs.end("by-edit")


def test_what_a_cluster_would_refuse_is_refused_before_anything_is_created(jobs: Jobs, tmp_path: Path) -> None:
    refused = lockstep(jobs, "run", "-f", job_file(tmp_path, "greedy", "ok.py"), "--cluster", "local", "--set", "gpusPerNode=8")
    assert refused.returncode == 2 and jobs.job("greedy") == {}, refused.stderr


def test_a_job_that_the_operator_refuses_leaves_nothing_in_the_way_of_the_corrected_one(jobs: Jobs, tmp_path: Path) -> None:
    away = tmp_path / "away.yaml"
    away.write_text((ROOT / "clusters/local.yaml").read_text().replace("name: local", "name: away", 1))
    file = job_file(tmp_path, "lost", "ok.py")
    refused = lockstep(jobs, "run", "-f", file, "--cluster", str(away))
    assert refused.returncode == 2, refused.stderr
    assert "spec.cluster is away, but there is no such TrainingCluster" in refused.stderr and "it was removed again" in refused.stderr
    assert jobs.job("lost") == {}
    corrected = lockstep(jobs, "run", "-f", file, "--cluster", "local", "--detach")
    assert corrected.returncode == 0, corrected.stderr
    jobs.end("lost")
