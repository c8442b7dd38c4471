"""`lockstep doctor` on the embedded cluster, and where nothing answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lockstep.cli.main import main

API_DOWN = "https://127.0.0.1:1"


def doctor(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return lockstep(monkeypatch, "doctor", *arguments)


def lockstep(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["lockstep", *arguments])
    try:
        return main()
    except SystemExit as ended:
        return int(ended.code or 0)


def test_a_deployed_cluster_is_found_well(
    operator: None, cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(monkeypatch, "local", "-o", "json") == 0
    findings = {found["subject"]: found for found in json.loads(capsys.readouterr().out)}
    assert {
        name: findings[name]["verdict"] for name in ("API server", "rights", "CRDs", "service account", "nodes", "storage", "fabric")
    } == dict.fromkeys(("API server", "rights", "CRDs", "service account", "nodes", "storage", "fabric"), "ok")
    assert "ready" in findings["operator"]["message"]


def test_a_namespace_without_anything_is_told_what_it_lacks(
    operator: None, namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(monkeypatch, "local", "-n", namespace) == 1
    assert f"kubectl create serviceaccount ml-dev-sa -n {namespace}" in capsys.readouterr().out


def test_a_server_that_does_not_answer_is_one_sentence(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeconfig = yaml.safe_load(cluster.read_text())
    kubeconfig["clusters"][0]["cluster"]["server"] = API_DOWN
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    assert doctor(monkeypatch, "local", "--context", kubeconfig["current-context"]) == 1
    told = capsys.readouterr().out
    assert f"failed   API server       {API_DOWN} doesn't answer as it should" in told and "Traceback" not in told


def test_the_versions_on_the_cluster_are_told(operator: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert lockstep(monkeypatch, "version") == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert told["Kubernetes"].startswith("v1.") and told["operator"] == "localhost/lockstep/base:1"
