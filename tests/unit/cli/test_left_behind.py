"""What a verb makes in a cluster goes with it, however it ends: Ctrl-C, SIGTERM, a terminal that is closed, SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from golden.plan_cases import job, of_kind, profile
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from support.api_stub import ApiStub, served

Object = dict[str, Any]
PATIENCE_SECONDS = 60.0
KINDS = {
    "Pod": "pods", "StatefulSet": "statefulsets", "Service": "services", "Secret": "secrets", "ConfigMap": "configmaps", "Job": "jobs",
    "NetworkPolicy": "networkpolicies", "PersistentVolumeClaim": "persistentvolumeclaims",
}  # fmt: skip


@dataclass
class Store(ApiStub):
    """Keeps what it is sent, and collects what belonged to something that is gone, as Kubernetes does. No pod ever runs."""

    kept: dict[tuple[str, str], Object] = field(default_factory=dict)
    """(plural, name) → object."""

    def answer(self, method: str, path: str, body: Object | bytes | None) -> tuple[int, Object | str]:
        plural, name = self.plural(path), path.rsplit("/", 1)[-1]
        if plural not in KINDS.values() or path in self.objects:
            return super().answer(method, path, body)
        if method == "POST" and isinstance(body, dict):
            body["metadata"].setdefault("uid", f"uid-{plural}-{body['metadata']['name']}")
            self.kept[plural, body["metadata"]["name"]] = {"status": {}, **body}
            return 201, self.kept[plural, body["metadata"]["name"]]
        if method == "GET" and name == plural:
            return 200, {"metadata": {}, "items": [item for (kind, _), item in self.kept.items() if kind == plural]}
        if (plural, name) not in self.kept:
            return super().answer("GET", path, None)
        if method == "DELETE":
            self._collect(self.kept.pop((plural, name))["metadata"]["uid"])
            return 200, {}
        return 200, self.kept[plural, name]

    def _collect(self, uid: str) -> None:
        for key, item in list(self.kept.items()):
            if [owner["uid"] for owner in item["metadata"].get("ownerReferences") or []] == [uid] and key in self.kept:
                self._collect(self.kept.pop(key)["metadata"]["uid"])

    def left(self) -> list[str]:
        """What is there but for the job's own and claims."""
        return sorted(
            f"{kind}/{name}" for kind, name in self.kept if kind != "persistentvolumeclaims" and (kind, name) != ("statefulsets", "x")
        )

    def expire(self) -> None:
        """The time is over of every Job that nobody moves on."""
        for kind, name in [key for key in self.kept if key[0] == "jobs"]:
            spec = self.kept[kind, name]["spec"]
            assert spec["parallelism"] == 0 and spec["activeDeadlineSeconds"] <= 120 and spec["ttlSecondsAfterFinished"] == 0
            self._collect(self.kept.pop((kind, name))["metadata"]["uid"])


def ended_job() -> Store:
    """A job whose pods are gone: whoever wants its files makes a pod of its own."""
    store = Store()
    resolved = resolve(job(storage={"mode": "Shared"}), profile(), PlatformDefaults(namespace="team"))
    for item in render(resolved):
        if item["kind"] in ("StatefulSet", "PersistentVolumeClaim"):
            item["metadata"]["uid"] = item["metadata"]["name"]
            store.kept[KINDS[item["kind"]], item["metadata"]["name"]] = item
    (found,) = of_kind(render(resolved), "StatefulSet")
    found["spec"]["replicas"] = 0
    status = {"conditions": [{"type": "Complete", "status": "True", "reason": "Done", "message": "done"}], "nodes": 2}
    manifest = {
        "metadata": {"name": "x", "namespace": "team", "uid": "x"},
        "spec": {"nodes": 2, "script": {"path": "a.py"}},
        "status": status,
    }
    store.objects["/apis/lockstep.dev/v1alpha1/namespaces/team/trainingjobs/x"] = manifest
    return store


def with_nodes() -> Store:
    """A namespace with the jobs' account, in a cluster of two nodes with plenty of room."""
    store = Store()
    store.objects["/api/v1/namespaces/team/serviceaccounts/ml-dev-sa"] = {"metadata": {"name": "ml-dev-sa"}}
    room = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    nodes = [
        {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}, "spec": {}, "status": {"allocatable": room}}
        for name in "ab"
    ]
    store.objects["/api/v1/nodes"] = {"metadata": {}, "items": nodes}
    return store


VERBS: dict[str, tuple[Callable[[], Store], list[str]]] = {
    "preflight": (with_nodes, ["preflight", "-f", "job.yaml", "--cluster", "local", "-n", "team"]),
    "calibrate": (with_nodes, ["cluster", "calibrate", "local", "--nodes", "2", "-n", "team"]),
    "discover": (with_nodes, ["cluster", "discover", "found", "--probe", "i", "-n", "team", "-o", "found.yaml"]),
    "logs": (ended_job, ["logs", "x", "-n", "team", "--cluster", "local"]),
    "cp": (ended_job, ["cp", "job.yaml", "x:/workspace/", "-n", "team", "--cluster", "local"]),
    "generate": (ended_job, ["generate", "x", "Once", "-n", "team", "--cluster", "local"]),
    "adapter get": (ended_job, ["adapter", "get", "x", "-n", "team", "--cluster", "local"]),
    "adapter merge": (ended_job, ["adapter", "merge", "x", "-o", "model", "-n", "team", "--cluster", "local"]),
    "model get": (ended_job, ["model", "get", "org/name", "--job", "x", "-n", "team", "--cluster", "local"]),
    "model get before a job": (with_nodes, ["model", "get", "org/name", "-f", "job.yaml", "--cluster", "local", "-n", "team"]),
}  # fmt: skip


@contextmanager
def started(words: list[str], kubeconfig: Path, folder: Path, *, in_background: bool = False) -> Iterator[subprocess.Popen[str]]:
    """`in_background`: as a script's shell starts it, with SIGINT ignored."""
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "lockstep.cli.main", *words]
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"] if in_background else []
    with subprocess.Popen(
        [*shell, *command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(holds: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing was made"
        time.sleep(0.02)


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_left_whatever_ends_the_verb(verb: str, tmp_path: Path) -> None:
    spec = {"cluster": "local", "nodes": 2, "script": {"path": "/workspace/a.py"}, "storage": {"mode": "Shared"}}
    manifest = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": spec}
    (tmp_path / "job.yaml").write_text(json.dumps(manifest))
    make, words = VERBS[verb]
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL] if verb == "preflight" else [signal.SIGTERM, signal.SIGKILL]
    with ExitStack() as stack:
        running = []
        for number in signals:
            folder = tmp_path / number.name
            folder.mkdir()
            store = make()
            kubeconfig = stack.enter_context(served(store, folder))
            process = stack.enter_context(
                started(words, kubeconfig, tmp_path, in_background=verb in ("preflight", "logs") and number == signal.SIGTERM)
            )
            running.append((number, store, process))
        for number, store, process in running:
            until(lambda store=store: any(key[0] in ("statefulsets", "pods") and key[1] != "x" for key in store.kept), process)
            process.send_signal(number)
            if number == signal.SIGTERM:
                process.send_signal(number)  # as `timeout` does: once to the process, once to its group
            output, _ = process.communicate(timeout=PATIENCE_SECONDS)
            if number == signal.SIGKILL:
                store.expire()
            else:
                assert process.returncode == {signal.SIGINT: 130}.get(number, 128 + number), output
            assert store.left() == [], output
            assert "Traceback" not in output
