"""What an account may not read, no verb states: every verb at a real API server, as somebody with `view` in one namespace and as somebody
with nothing.

Everything that a verb could miss is there: the CRDs, the TrainingCluster, the service account, a job that has run and failed, its objects.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import config, dynamic

from lockstep.kube.cluster import MERGE
from support.clusters.cluster_jobs import Jobs, kubeconfig_of, kubeconfig_of_account
from support.clusters.control_plane import Plane, connected, default_objects
from unit.cli.test_every_verb import REMOTE, arguments, run, write_cluster_file, write_job_file

NAMESPACE = "lockstep"
FAILED = "RanksFailed"
SECONDS = 60
FALSE = re.compile(
    r"TrainingCluster \S+ is not on|ml-dev-sa is not in|no TrainingJob x\b|job x .*never started|not installed|none in namespace|doesn't"
    r" know TrainingJobs"
    r"|none at all|no operator works|create serviceaccount|lockstep deploy local(?! --mode auto --no-dev)"
)
"""What would be untrue here, and its remedies, in the words of any verb."""
JOB: dict[str, Any] = {
    "apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x", "namespace": NAMESPACE},
    "spec": {"cluster": "local", "nodes": 1, "script": {"path": "/workspace/a.py"}},
}  # fmt: skip
CONTAINER = {"name": "trainer", "image": "trainer:1", "volumeMounts": [{"name": "workspace", "mountPath": "/workspace"}]}
VOLUME = {"name": "workspace", "persistentVolumeClaim": {"claimName": "ml-dev-workspace"}}


async def fill(admin: Path) -> None:
    async with await connected(admin) as cluster:
        job = await cluster.create(JOB)
        owner = {"apiVersion": JOB["apiVersion"], "kind": "TrainingJob", "name": "x", "uid": job["metadata"]["uid"], "controller": True}
        labels = {"lockstep.dev/job": "x"}
        metadata = {"name": "x", "namespace": NAMESPACE, "labels": labels, "ownerReferences": [owner]}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [CONTAINER], "volumes": [VOLUME]}}
        spec = {"replicas": 0, "serviceName": "x-headless", "selector": {"matchLabels": labels}, "template": template}
        await cluster.create({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec})
        moment = "2026-01-01T00:00:00Z"
        conditions = [
            {"type": kind, "status": status, "reason": FAILED, "message": "rank 0 exited with 1", "lastTransitionTime": moment,
                "observedGeneration": 1}
            for kind, status in (("Accepted", "True"), ("Progressing", "False"), ("Failed", "True"))
        ]  # fmt: skip
        status = {"conditions": conditions, "nodes": 1, "attempts": 2, "restarts": 1, "ranks": {"desired": 1, "ready": 0}}
        path = f"/apis/lockstep.dev/v1alpha1/namespaces/{NAMESPACE}/trainingjobs/x/status"
        await cluster.request("PATCH", path, {"status": status}, {}, MERGE)


@pytest.fixture(scope="module")
def accounts(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Account → its kubeconfig."""
    folder = tmp_path_factory.mktemp("accounts")
    plane.install(default_objects())
    asyncio.run(fill(plane.kubeconfig))
    with config.new_client_from_config(str(plane.kubeconfig)) as connection:
        jobs = Jobs(dynamic.DynamicClient(connection), NAMESPACE)
        jobs.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "nobody"}})
        yield {
            "view": kubeconfig_of("view", jobs, plane.kubeconfig, folder),
            "nobody": kubeconfig_of_account("nobody", jobs, plane.kubeconfig, folder / "nobody"),
        }
        for kind, name, version in (
            ("TrainingJob", "x", JOB["apiVersion"]), ("StatefulSet", "x", "apps/v1"), ("ServiceAccount", "nobody", "v1"),
            ("ServiceAccount", "person", "v1"), ("RoleBinding", "person", "rbac.authorization.k8s.io/v1"),
        ):  # fmt: skip
            jobs.delete(kind, name, version)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not ended after {SECONDS} s")

    write_job_file(tmp_path)
    write_cluster_file(tmp_path, "gpus")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("account", ["view", "nobody"])
@pytest.mark.parametrize("name", REMOTE)
def test_nothing_untrue_is_said_to_who_may_not_look(
    name: str, account: str, accounts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(accounts[account]))
    words = [NAMESPACE if word == "team" else word for word in arguments(name, tmp_path)]
    code = run(monkeypatch, words)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    untrue = [line for line in text.splitlines() if FALSE.search(line)]
    assert untrue == [], (code, text)
    assert code in (0, 1, 2, 3), text
    assert "Traceback" not in text


def test_doctor_fails_only_for_what_is_seen_to_be_wrong(
    accounts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(accounts["nobody"]))
    assert run(monkeypatch, ["doctor", "local"]) == 1, "for the rights that a user needs"
    out = capsys.readouterr().out
    assert "unknown  cluster          whether TrainingCluster local is as its file says: your account may not read it" in out
    assert re.search(
        "^unknown  service account  whether ServiceAccount ml-dev-sa .* exists: your account may not read it$", out, re.MULTILINE
    )
    assert [line.split()[1] for line in out.splitlines() if line.startswith("failed")] == ["rights"]
