"""Runs of `lockstep run --in-namespace` in the list of jobs."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from golden.plan_cases import job, profile
from lockstep.cli.jobs import get
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.kube.cluster import ApiError
from lockstep.platforms.kubernetes import status
from lockstep.platforms.kubernetes.backend import KubernetesBackend
from lockstep.platforms.kubernetes.objects import Run, objects, prepare
from lockstep_gang.contract.report import Report, State, report_file_text
from support.api_stub import ApiStub, served
from support.in_process import lockstep
from support.process_place import ProcessPlace
from unit.plan.reconcile.test_reconcile import report
from unit.virtual_time import clock_of

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


def without_pods(run: Run, monkeypatch: pytest.MonkeyPatch, report: Report) -> tuple[ApiStub, list[str]]:
    """Return an API server with the objects of a run that is scaled to zero, and the jobs whose volumes were read. `report`: on the
    volume.
    """
    first, *rest = objects(run)
    (stateful_set,) = [item for item in rest if item["kind"] == "StatefulSet"]
    stateful_set["metadata"]["uid"] = run.name
    stateful_set["spec"]["replicas"] = 0
    readers = list[str]()

    @asynccontextmanager
    async def beside(_: object, namespace: str, name: str) -> AsyncIterator[ProcessPlace]:
        readers.append(name)
        yield ProcessPlace("pod x-reader")

    async def output_of(*_: object) -> str:
        return report_file_text(replace(report, job=run.frozen.parsed.job), "2026-01-01T00:00:00Z")

    monkeypatch.setattr(status, "beside", beside)
    monkeypatch.setattr(status, "output_of", output_of)
    lists = {f"{CORE}/configmaps": [first], f"{APPS}/statefulsets": [stateful_set]}
    return ApiStub({path: {"metadata": {}, "items": items} for path, items in lists.items()}), readers


@pytest.mark.parametrize(("state", "code"), [(State.COMPLETE, 0), (State.FAILED, 1)])
def test_wait_for_a_run_whose_pods_are_gone_answers_by_its_volume(
    state: State, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, readers = without_pods(ended("x", monkeypatch), monkeypatch, report(state).report)
    with served(stub, tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        done = lockstep("wait", "x", "-n", "team", "--timeout", "1")
    assert (done.returncode, done.stderr, readers) == (code, "", ["x"]), done
    assert re.fullmatch(rf"x: {state.value}: .+\n", done.stdout), done


def test_the_volume_of_a_run_that_has_not_ended_is_read_once_however_long_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, readers = without_pods(ended("x", monkeypatch), monkeypatch, report(State.RUNNING).report)
    clock_of(monkeypatch, get)
    with served(stub, tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        done = lockstep("wait", "x", "-n", "team", "--timeout", "9")
    assert (done.returncode, readers) == (1, ["x"]), done
    assert "job x is not Ended after 9 s: NoPods: no pods: it was interrupted" in done.stderr
    assert len([path for _, path, _ in stub.asked if path == f"{APPS}/statefulsets"]) > 3


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
