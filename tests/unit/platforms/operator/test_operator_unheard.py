"""An operator that is away, doesn't lead or lacks rights: what get, describe, why and top then say of jobs, and how they end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.names import ANNOTATION_TROUBLE
from lockstep.cli import main as entry
from lockstep.kube.cluster import Answers
from lockstep.plan.pages.table import marked, unheard_of
from lockstep.plan.times import timestamp
from support.api_stub import ApiStub, served

STALE_SECONDS = 30.0

NOW = 1_800_000_000.0
Object = dict[str, Any]


def lease(age_seconds: float, holder: str = "lockstep-operator-7d", now: float = NOW, **annotations: str) -> Object:
    renewed = timestamp(now - age_seconds).replace("Z", ".000000Z")
    return {"metadata": {"name": "lockstep-operator", "annotations": annotations}, "spec": {"holderIdentity": holder, "renewTime": renewed}}


def test_a_leader_that_renews_its_lease_is_heard() -> None:
    assert unheard_of(lease(2), NOW) is None
    assert unheard_of(lease(STALE_SECONDS - 1, ""), NOW) is None, "another replica takes over"
    assert unheard_of(lease(-5), NOW) is None, "its clock is ahead"
    assert unheard_of({"metadata": {}, "spec": None}, NOW) is None, "nobody knows"


@pytest.mark.parametrize(
    ("found", "seconds", "words"),
    [
        (lease(190), 190, "the operator (lockstep-operator-7d) has not been heard"),
        (lease(190, ""), 190, "no operator has led"),
        (
            lease(2, **{ANNOTATION_TROUBLE: f'{timestamp(NOW - 60)} cannot patch resource "trainingjobs/status"'}),
            60,
            'lacks a right (cannot patch resource "trainingjobs/status")',
        ),
    ],
)
def test_since_when_it_has_not_been_heard_and_why(found: Object, seconds: int, words: str) -> None:
    unheard = unheard_of(found, NOW)
    assert unheard.since == timestamp(NOW - seconds)
    assert words in unheard.text(NOW) and unheard.since in unheard.text(NOW)


def test_a_run_without_the_operator_is_not_stale_when_that_is_silent() -> None:
    unheard = unheard_of(lease(190), NOW)
    of_operator, without = ({"kind": kind, "metadata": {"name": "x"}, "status": {}} for kind in ("TrainingJob", "ConfigMap"))
    assert marked(of_operator, unheard, NOW)["status"]["conditions"] and marked(without, unheard, NOW) == without


def test_a_right_lacks_until_the_same_request_is_answered() -> None:
    answers = Answers()
    answers.lacks("PATCH status", "cannot patch")
    first = answers.lack
    answers.lacks("PATCH status", "cannot patch")
    assert answers.lack == first
    answers.may("GET other")
    assert answers.lack == first
    answers.may("PATCH status")
    assert answers.lack is None


CONDITIONS = [
    {"type": "Progressing", "status": "True", "reason": "Running", "message": "all ranks run", "lastTransitionTime": "2026-01-01T00:00:00Z"}
]
ENDED = [
    *CONDITIONS,
    {"type": "Complete", "status": "True", "reason": "Complete", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
]


def stub(found: Object | None, conditions: list[Object] = CONDITIONS, **changes: Any) -> ApiStub:
    job = {
        "apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": "x", "namespace": "team", "uid": "u", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"nodes": 2}, "status": {"conditions": conditions, "nodes": 2, "runningNodes": 2, "observedGeneration": 1},
    }  # fmt: skip
    path = "/apis/lockstep.dev/v1alpha1/namespaces/team/trainingjobs"
    objects: dict[str, Object] = {path: {"kind": "List", "metadata": {}, "items": [job]}, f"{path}/x": job}
    if found is not None:
        objects["/apis/coordination.k8s.io/v1/namespaces/lockstep-system/leases/lockstep-operator"] = found
    return ApiStub(objects, **changes)


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def asked(api: ApiStub, *words: str) -> tuple[int, str, str]:
        with served(api, tmp_path) as path:
            monkeypatch.setenv("KUBECONFIG", str(path))
            monkeypatch.setattr(sys, "argv", ["lockstep", *words, "-n", "team"])
            try:
                code = entry.main()
            except SystemExit as ended:
                code = 0 if ended.code is None else int(ended.code)
        output = capsys.readouterr()
        return code, output.out, output.err

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return asked


VERBS = [
    ["get"],
    ["get", "x"],
    ["get", "x", "-o", "json"],
    ["get", "-o", "yaml"],
    ["describe", "x"],
    ["why", "x"],
    ["top", "x", "--once"],
    ["top", "--once"],
]


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_every_look_says_since_when_nothing_was_heard_and_ends_with_1(words: list[str], ask: Callable[..., tuple[int, str, str]]) -> None:
    since = timestamp(time.time() - 200)
    code, out, err = ask(stub(lease(200, now=time.time())), *words)
    assert code == 1
    assert since in out + err or timestamp(time.time() - 200) in out + err or timestamp(time.time() - 199) in out + err, out + err
    assert "the operator (lockstep-operator-7d) has not been heard" in out + err


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
@pytest.mark.parametrize("why", ["it leads", "it can't be seen", "there is none", "the job has ended"])
def test_what_is_up_to_date_or_can_t_be_known_is_shown_as_ever(
    why: str, words: list[str], ask: Callable[..., tuple[int, str, str]]
) -> None:
    now = time.time()
    api = {
        "it leads": stub(lease(1, now=now)),
        "it can't be seen": stub(lease(500, now=now), forbidden={"leases"}),
        "there is none": stub(None),
        "the job has ended": stub(lease(500, now=now), ENDED),
    }[why]
    code, out, err = ask(api, *words)
    assert code == 0, out + err
    assert "stale" not in (out + err).lower() and "has not been heard" not in out + err


def test_programs_find_it_in_json_and_yaml(ask: Callable[..., tuple[int, str, str]]) -> None:
    api = stub(lease(200, now=time.time()))
    (mark,) = [c for c in json.loads(ask(api, "get", "x", "-o", "json")[1])["status"]["conditions"] if c["type"] == "StatusCurrent"]
    assert (mark["status"], mark["reason"]) == ("False", "OperatorSilent") and mark["lastTransitionTime"].endswith("Z")
    assert "StatusCurrent" in [c["type"] for c in yaml.safe_load(ask(api, "get", "x", "-o", "yaml")[1])["status"]["conditions"]]
    assert "has not been heard since" in json.loads(ask(api, "why", "x", "-o", "json")[1])["stale"]
    assert json.loads(ask(api, "top", "x", "-o", "json")[1])["stale"]["since"].endswith("Z")
    assert "Running (stale)" in ask(api, "get")[1]


@pytest.mark.parametrize("reason", ["WaitingForReport", "WaitingForRanks"])
def test_where_no_report_comes_the_pods_logs_say_why(reason: str, ask: Callable[..., tuple[int, str, str]]) -> None:
    progress = {**CONDITIONS[0], "reason": "Starting", "message": "all pods run"}
    waits = {**CONDITIONS[0], "type": "RanksReady", "status": "False", "reason": reason, "message": "node 0 has not reported yet"}
    api = stub(lease(1, now=time.time()), [progress, waits])
    pods = "/api/v1/namespaces/team/pods"
    pod = {
        "metadata": {"name": "x-0", "namespace": "team", "uid": "p", "labels": {"lockstep.dev/job": "x"}},
        "spec": {"nodeName": "a", "containers": []},
        "status": {"phase": "Running"},
    }
    api.objects[pods] = {"kind": "List", "metadata": {}, "items": [pod]}
    trouble = "the operator did not take the report (HTTP 403 not your job); the job goes on, and the report is sent again"
    api.objects[f"{pods}/x-0/log"] = f"[rank 0] step 1\n[lockstep] {trouble}\n[rank 0] step 2\n"  # type: ignore[assignment]
    out = ask(api, "why", "x")[1]
    assert (f"says         x-0: {trouble}" in out) == (reason == "WaitingForReport"), out
