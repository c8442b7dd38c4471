"""What lets the nodes of a run without an operator go at its end: its objects, its rights, and the program in its pod."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from golden.plan_cases import job, of_kind, profile
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.platforms.inpod import keeper as keeper_program
from lockstep.platforms.jobs.keeper import VERDICTS, exit_code, keeper
from support.api_stub import ApiStub, served
from unit.virtual_time import VirtualClock

Object = dict[str, Any]
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x-run-1", "uid": "u"}
POD = "/api/v1/namespaces/ns/pods/x-0"
SCALE = "/apis/apps/v1/namespaces/ns/statefulsets/x/scale"


def stateful_set() -> Object:
    (found,) = of_kind(render(resolve(job(), profile(), PlatformDefaults(namespace="ns"))), "StatefulSet")
    found["metadata"]["uid"] = "uid-of-set"
    return found


def test_it_may_look_at_one_pod_and_scale_one_stateful_set_and_all_of_it_goes_with_the_run() -> None:
    items = {item["kind"]: item for item in keeper(stateful_set(), OWNER)}
    assert list(items) == ["ServiceAccount", "Role", "RoleBinding", "Job"]
    assert items["Role"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "resourceNames": ["x-0"], "verbs": ["get"]},
        {"apiGroups": ["apps"], "resources": ["statefulsets/scale"], "resourceNames": ["x"], "verbs": ["get", "patch"]},
    ]
    assert all(item["metadata"]["ownerReferences"] == [OWNER] for item in items.values())


def test_its_pod_is_restricted_asks_for_no_gpu_comes_back_and_is_none_of_the_jobs() -> None:
    spec = keeper(stateful_set(), OWNER)[-1]["spec"]
    template = spec["template"]
    assert spec["backoffLimit"] == 1000, "it may be drained or evicted that often"
    (container,) = template["spec"]["containers"]
    assert container["securityContext"]["runAsNonRoot"] and container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "gpu" not in json.dumps(container["resources"]) and "lockstep.dev/job" not in template["metadata"]["labels"]
    assert all(volume["persistentVolumeClaim"]["readOnly"] for volume in template["spec"]["volumes"])


@pytest.mark.parametrize(
    ("status", "deleted", "expected"),
    [
        ({}, False, None),
        ({"state": {"running": {}}}, False, None),
        ({"state": {"terminated": {"exitCode": 0}}}, False, 0),
        ({"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 1}}}, False, 1),
        ({"state": {"running": {}}, "lastState": {"terminated": {"exitCode": 137}}}, False, None),
        ({"state": {"terminated": {"exitCode": 70}}}, False, None),
        ({"state": {"terminated": {"exitCode": 75}}}, False, 75),
        ({"state": {"terminated": {"exitCode": 75}}}, True, None),
        ({"state": {"terminated": {"exitCode": 78}}}, False, 78),
        ({"state": {"terminated": {"exitCode": 1}}}, True, 1),
    ],
)
def test_what_ends_a_run_is_what_its_agent_says(status: Object, deleted: bool, expected: int | None) -> None:
    pod = {"metadata": {"deletionTimestamp": "t"} if deleted else {}, "status": {"containerStatuses": [status] if status else []}}
    assert keeper_program.verdict(pod, list(VERDICTS), 75) == exit_code(pod) == expected


def test_a_pod_that_has_saved_has_the_verdict_where_no_other_follows_it() -> None:
    drained = {"metadata": {"deletionTimestamp": "t"}, "status": {"containerStatuses": [{"state": {"terminated": {"exitCode": 75}}}]}}
    assert exit_code(drained, replaced=False) == 75


def run_keeper(stub: ApiStub, folder: Path) -> list[tuple[str, str, dict[str, str]]]:
    """What the program asked for, to its end."""
    (folder / "token").write_text("t\n")
    source = Path(keeper_program.__file__).read_text().replace("/var/run/secrets/kubernetes.io/serviceaccount", str(folder))
    source = source.replace("LOOK_SECONDS = 5.0", "LOOK_SECONDS = 0.01").replace("LINGER_SECONDS = 20.0", "LINGER_SECONDS = 0.01")
    with served(stub, folder):
        asked = {"server": stub.url, "pod_path": POD, "scale_path": SCALE, "uid": "uid-of-set", "verdicts": list(VERDICTS), "saved": 75}
        subprocess.run([sys.executable, "-I", "-c", source, json.dumps(asked)], check=True, timeout=60)
    return stub.asked


class Ending(ApiStub):
    """Node 0 is not there, then runs, then has ended; the first attempt to scale meets another writer."""

    def answer(self, method: str, path: str, body: Object | bytes | None) -> tuple[int, Object | str]:
        looks = sum(found[1] == POD for found in self.asked)
        if path == POD and looks > 1:
            state = {"running": {}} if looks == 2 else {"terminated": {"exitCode": 0}}
            return 200, {"metadata": {}, "status": {"containerStatuses": [{"state": state}]}}
        if method == "PATCH":
            assert body == {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 0}}
            return (409 if sum(found[0] == "PATCH" for found in self.asked) == 1 else 200), {}
        return super().answer(method, path, body)


@pytest.mark.parametrize(("uid", "patches"), [("uid-of-set", 2), ("of-a-later-run", 0)])
def test_it_scales_its_own_run_to_zero_at_the_end_and_leaves_a_later_one_alone(uid: str, patches: int, tmp_path: Path) -> None:
    stub = Ending()
    stub.objects[SCALE] = {"metadata": {"uid": uid, "resourceVersion": "7"}, "spec": {"replicas": 2}}
    asked = run_keeper(stub, tmp_path)
    assert sum(method == "PATCH" for method, _, _ in asked) == patches
    assert {path for _, path, _ in asked} == {POD, SCALE}


def test_it_looks_every_five_seconds_and_gives_each_request_and_the_readers_of_its_log_twenty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, limits = VirtualClock(), list[float]()
    over = {"metadata": {"uid": "another"}, "status": {"containerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]}}

    class Opener:
        def open(self, message: object, timeout: float) -> io.BytesIO:
            limits.append(timeout)
            if len(limits) <= 3:
                raise OSError("the API server is away")
            return io.BytesIO(json.dumps(over).encode())

    (tmp_path / "token").write_text("t")
    monkeypatch.setattr(keeper_program, "ACCOUNT", tmp_path)
    monkeypatch.setattr(keeper_program, "time", clock)
    monkeypatch.setattr("urllib.request.build_opener", lambda *_: Opener())
    begun = clock.now
    keeper_program.main("http://cluster", "/pod", "/scale", "uid", list(VERDICTS), 75)
    assert clock.now - begun == 3 * 5 + 20
    assert set(limits) == {20.0}
