"""Runs of `lockstep run --in-namespace` in the list of jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from golden.plan_cases import job, profile
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.kube.cluster import ApiError
from lockstep.platforms.kubernetes.backend import KubernetesBackend
from lockstep.platforms.kubernetes.objects import Run, objects, prepare
from support.api_stub import ApiStub, served
from support.in_process import lockstep

Object = dict[str, Any]
CORE, APPS = "/api/v1/namespaces/team", "/apis/apps/v1/namespaces/team"


def ended(name: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("lockstep.platforms.kubernetes.objects.build_agent", lambda: b"agent")
    one = job()
    return prepare(one.model_copy(update={"metadata": one.metadata.model_copy(update={"name": name})}), profile(), "team")


def test_runs_are_listed_where_training_jobs_may_not_be_and_what_is_around_all_of_them_is_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists: dict[str, list[Object]] = {f"{CORE}/configmaps": [], f"{APPS}/statefulsets": []}
    for run in (ended("x", monkeypatch), ended("y", monkeypatch)):
        first, *rest = objects(run)
        lists[f"{CORE}/configmaps"].append(first)
        (stateful_set,) = [item for item in rest if item["kind"] == "StatefulSet"]
        lists[f"{APPS}/statefulsets"].append(
            {**stateful_set, "metadata": {**stateful_set["metadata"], "uid": run.name}, "spec": {**stateful_set["spec"], "replicas": 0}}
        )
    stub = ApiStub({path: {"metadata": {}, "items": items} for path, items in lists.items()}, forbidden={"trainingjobs"})
    with served(stub, tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        backend = KubernetesBackend(TargetOptions("local", "team").target())
        listed = backend.jobs()
        assert [(found.name, found.status["conditions"] != []) for found in listed] == [("x", True), ("y", True)]
        paths = [path for _, path, _ in stub.asked]
        assert paths.count(f"{CORE}/persistentvolumeclaims") == 1 and paths.count(f"{CORE}/events") == 1
        stub.objects.clear()
        with pytest.raises(ApiError, match="cannot get resource"):
            backend.jobs()


def test_a_run_whose_records_can_t_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "workspace/runs"
    for name, text in (
        ("broken", ""),
        ("whole", json.dumps({"jobUid": "1", "attempt": 1, "restarts": 0, "started": "2026-11-01T00:00:00Z"}) + "\n"),
    ):
        (runs / name / "gang").mkdir(parents=True)
        (runs / name / "gang/attempts.jsonl").write_text(text)
    done = lockstep("get", "--cluster", str(tmp_path))
    assert done.returncode == 1 and "whole" in done.stdout and "broken" not in done.stdout, done
    (line,) = done.stderr.splitlines()
    assert "no run broken can be read in" in line and "(no attempt was recorded)" in line
    alone = lockstep("get", "whole", "--cluster", str(tmp_path))
    assert (alone.returncode, alone.stderr) == (0, "")
    (runs / "whole/gang/attempts.jsonl").unlink()  # none that can be read is not none
    assert lockstep("get", "--cluster", str(tmp_path)).returncode == 1
