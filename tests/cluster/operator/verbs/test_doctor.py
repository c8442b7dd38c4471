"""`lockstep doctor` on the embedded cluster, and where nothing answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from support.in_process import lockstep

API_DOWN = "https://127.0.0.1:1"


def test_a_deployed_cluster_is_found_well(operator: None, cluster: Path) -> None:
    done = lockstep("doctor", "local", "-o", "json")
    findings = {found["subject"]: found for found in json.loads(done.stdout)}
    well = ("API server", "rights", "CRDs", "service account", "nodes", "storage", "fabric")
    assert (done.returncode, {name: findings[name]["verdict"] for name in well}) == (0, dict.fromkeys(well, "ok"))
    assert "ready" in findings["operator"]["message"]


def test_a_namespace_without_anything_is_told_what_it_lacks(operator: None, namespace: str) -> None:
    done = lockstep("doctor", "local", "-n", namespace)
    assert done.returncode == 1 and f"kubectl create serviceaccount ml-dev-sa -n {namespace}" in done.stdout


def test_a_server_that_does_not_answer_is_one_sentence(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubeconfig = yaml.safe_load(cluster.read_text())
    kubeconfig["clusters"][0]["cluster"]["server"] = API_DOWN
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    done = lockstep("doctor", "local", "--context", kubeconfig["current-context"])
    assert done.returncode == 1
    assert f"failed   API server       {API_DOWN} doesn't answer as it should" in done.stdout and "Traceback" not in done.stdout


def test_the_versions_on_the_cluster_are_told(operator: None) -> None:
    done = lockstep("version")
    versions = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert done.returncode == 0 and versions["Kubernetes"].startswith("v1.") and versions["operator"] == "localhost/lockstep/base:1"
