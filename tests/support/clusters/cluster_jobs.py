"""Actions of the operator's tests on a real cluster: write jobs, and wait for the results."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from kubernetes import client, dynamic
from kubernetes.dynamic.exceptions import ConflictError, NotFoundError

T = TypeVar("T")
API = "lockstep.dev/v1alpha1"
SERVICE_ACCOUNT = "ml-dev-sa"
SCRIPTS = {
    "ok.py": "import os\nprint('hello from', os.environ['RANK'], flush=True)\n",
    "fail.py": (
        "import os, time\nprint('rank', os.environ['RANK'], 'begins', flush=True)\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('the data is not there')\ntime.sleep(600)\n"
    ),
    "steps.py": (
        "import json, os, signal, socket, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\nreports.connect(os.environ['LOCKSTEP_REPORT_SOCKET'])\n"
        "for step in range(1, 100000):\n"
        "    reports.send(json.dumps({'rank': int(os.environ['RANK']), 'event': 'step', 'step': step}).encode())\n    time.sleep(0.2)\n"
    ),
    "until_told.py": "import pathlib, time\nwhile not pathlib.Path('/tmp/end').exists():\n    time.sleep(0.1)\n",
    "wait.py": (
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('rank', os.environ['RANK'], 'of attempt', os.environ['LOCKSTEP_ATTEMPT'], flush=True)\nwhile True:\n    signal.pause()\n"
    ),
}


PATIENCE_SECONDS = 180.0
"""Nothing promises less: a garbage collector that has just seen a new kind takes half a minute, and so does a disk that several clusters
share.
"""


def until(what: str, look: Callable[[], T | None], seconds: float = PATIENCE_SECONDS) -> T:
    """The first result that is neither None nor False; AssertionError after a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen in {seconds:.0f} s; seen last: {look()}")


@dataclass
class Jobs:
    """The objects of one namespace, as administrator."""

    api: dynamic.DynamicClient
    namespace: str

    def kind(self, kind: str, api_version: str = "v1") -> Any:
        return self.api.resources.get(api_version=api_version, kind=kind)

    def get(self, kind: str, name: str, api_version: str = "v1") -> dict[str, Any] | None:
        try:
            return dict(self.kind(kind, api_version).get(name=name, namespace=self.namespace).to_dict())
        except NotFoundError:
            return None

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        kind = self.kind(body["kind"], body["apiVersion"])
        return dict(kind.create(body=body, namespace=self.namespace).to_dict())

    def patch(self, kind: str, name: str, body: dict[str, Any], api_version: str = "v1") -> None:
        self.kind(kind, api_version).patch(name=name, namespace=self.namespace, body=body, content_type="application/merge-patch+json")

    def delete(self, kind: str, name: str, api_version: str = "v1") -> None:
        try:
            self.kind(kind, api_version).delete(name=name, namespace=self.namespace)
        except NotFoundError:
            return

    def start(self, name: str, script: str = "wait.py", **spec: Any) -> dict[str, Any]:
        """A job of `script` on two nodes of the `local` cluster; `spec` has more fields, or other ones."""
        volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": "scripts"}}
        given = {"nodes": 2, "script": {"path": f"/scripts/{script}"}, "podTemplate": {"volumes": [volume]}, "restart": {"maxRestarts": 0}}
        return self.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": name}, "spec": {**given, **spec}})

    def job(self, name: str) -> dict[str, Any]:
        return self.get("TrainingJob", name, API) or {}

    def change(self, name: str, **spec: Any) -> None:
        self.patch("TrainingJob", name, {"spec": spec}, API)

    def end(self, name: str) -> None:
        self.delete("TrainingJob", name, API)

    def condition(self, name: str, condition: str) -> dict[str, Any]:
        found = (self.job(name).get("status") or {}).get("conditions", [])
        return next((c for c in found if c["type"] == condition), {})

    def until_condition(self, name: str, condition: str, status: str, reason: str, seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """The condition as it is then."""

        def look() -> dict[str, Any] | None:
            found = self.condition(name, condition)
            return found if (found.get("status"), found.get("reason")) == (status, reason) else None

        try:
            return until(f"{condition}={status} {reason} of {name}", look, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; conditions: {(self.job(name).get('status') or {}).get('conditions')}") from None

    def until_running(self, name: str) -> None:
        self.until_condition(name, "Progressing", "True", "Running")

    def pods(self, name: str) -> list[dict[str, Any]]:
        found = self.kind("Pod").get(namespace=self.namespace, label_selector=f"lockstep.dev/job={name}").to_dict()["items"]
        return list(found)

    def workspace(self) -> Path:
        """Folder of this machine in which pods of the embedded cluster have the namespace's workspace."""
        claim = until(
            "the workspace's volume",
            lambda: (self.get("PersistentVolumeClaim", "ml-dev-workspace") or {}).get("spec", {}).get("volumeName"),
        )
        return Path(client.CoreV1Api(self.api.client).read_persistent_volume(claim).spec.host_path.path)

    def secret(self, name: str, key: str) -> bytes:
        found = self.get("Secret", name)
        assert found is not None, f"there is no Secret {name}"
        return base64.b64decode(found["data"][key])

    def key_secret(self, name: str) -> str:
        """Name of the Secret that the pods of this job mount for their key."""
        stateful_set = self.get("StatefulSet", name, "apps/v1")
        assert stateful_set is not None, f"{name} has no StatefulSet"
        volumes = stateful_set["spec"]["template"]["spec"]["volumes"]
        return next(
            v["secret"]["secretName"] for v in volumes if (v.get("secret") or {}).get("secretName", "").startswith(f"{name}-agents")
        )

    def key_of(self, name: str) -> bytes:
        """The key of its agents, 64 hexadecimal digits."""
        return self.secret(self.key_secret(name), "key")


@contextmanager
def cluster_like_local(jobs: Jobs, suffix: str, change: Callable[[dict[str, Any]], object]) -> Iterator[str]:
    """The name of a TrainingCluster as the embedded cluster's, but for one thing."""
    kind, name = jobs.kind("TrainingCluster", API), f"{jobs.namespace}-{suffix}"
    spec = kind.get(name="local").to_dict()["spec"]
    change(spec)
    kind.create(body={"apiVersion": API, "kind": "TrainingCluster", "metadata": {"name": name}, "spec": spec})
    try:
        yield name
    finally:
        kind.delete(name=name)


def prepare(api: dynamic.DynamicClient, namespace: str) -> Jobs:
    """The namespace with what jobs need in it."""
    jobs = Jobs(api, namespace)
    for body in (
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": SERVICE_ACCOUNT}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "scripts"}, "data": SCRIPTS},
    ):
        try:
            jobs.create(body)
        except ConflictError:
            continue
    return jobs


def kubeconfig_of(role: str, jobs: Jobs, cluster: Path, folder: Path) -> Path:
    """Kubeconfig of a person who holds this built-in role in the namespace and nothing else. `cluster`: an administrator's kubeconfig."""
    jobs.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "person"}})
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": "person", "namespace": jobs.namespace}
    held = {"apiGroup": rbac, "kind": "ClusterRole", "name": role}
    jobs.create({"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": {"name": "person"}, "roleRef": held, "subjects": [subject]})
    return kubeconfig_of_account("person", jobs, cluster, folder / "kubeconfig")


def kubeconfig_of_account(account: str, jobs: Jobs, cluster: Path, path: Path) -> Path:
    """Kubeconfig of this service account of the namespace. `cluster`: an administrator's kubeconfig."""
    made = client.CoreV1Api(jobs.api.client).create_namespaced_service_account_token(account, jobs.namespace, {"spec": {}})
    stated = yaml.safe_load(cluster.read_text())
    stated["users"] = [{"name": user["name"], "user": {"token": made.status.token}} for user in stated["users"]]
    path.write_text(yaml.safe_dump(stated))
    return path


def token_in(kubeconfig: Path) -> str:
    """Token that `kubeconfig_of_account` has put there."""
    return str(yaml.safe_load(kubeconfig.read_text())["users"][0]["user"]["token"])
