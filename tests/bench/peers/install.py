"""JobSet and Kubeflow Trainer as they ship: built from their Go modules, installed from their modules' manifests, run as processes of this
machine.

What differs from a deployment: their managers run outside of the cluster, each with the token of its own service account; the Service of a
webhook leads to this machine; JobSet elects no leader (there is one of it). Webhooks, the certificates that they make, RBAC and limits on
requests are theirs.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from lockstep.devcluster import binary
from lockstep.devcluster.host.processes import TIED
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.kinds import path_of

Object = dict[str, Any]
BUILD_OPTIONS = ["-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", "-s -w"]
PATIENCE_SECONDS = 120.0
CERTIFICATES = "k8s-webhook-server/serving-certs"
"""Below /tmp: both managers read them there, and neither can be told otherwise."""
IN_NAMESPACE = 'mount --bind "$0" /tmp && exec "$@"'
TORCH_RUNTIME = "torch_distributed.yaml"
SENT_FIRST = (
    "Namespace", "CustomResourceDefinition", "ServiceAccount", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", "ConfigMap",
        "Secret", "Service",
)  # fmt: skip
COLLECTIONS = {
    "MutatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
}


@dataclass(frozen=True)
class Peer:
    """One controller: where it comes from and what it is called once it is installed."""

    name: str
    module: str
    version: str
    digest: str
    """The module's, as go.sum would have it. Its own go.sum has those of what it needs."""
    package: str
    manifests: str
    account: tuple[str, str]
    """Namespace and name of its service account."""
    certificate: str
    """The Secret that it writes, in the same namespace."""


JOBSET_MANAGER = Peer(
    "jobset", "sigs.k8s.io/jobset", "v0.8.0", "h1:80cJcPld+IMdKFOqzEW4et3Y6lGAPcP8YmBZ+aiKGYA=", ".", "config/default",
    ("jobset-system", "jobset-controller-manager"), "jobset-webhook-server-cert",
)  # fmt: skip
TRAINER_MANAGER = Peer(
    "trainer", "github.com/kubeflow/trainer/v2", "v2.0.0", "h1:mnQSR9iPKItxyUR8mq66XsmxqKNVHwr9YYOB7BTU9dU=",
        "./cmd/trainer-controller-manager",
    "manifests/overlays/manager", ("kubeflow-system", "kubeflow-trainer-controller-manager"), "kubeflow-trainer-webhook-cert",
)  # fmt: skip
PEERS = (JOBSET_MANAGER, TRAINER_MANAGER)


def build(root: Path, say: Callable[[str], None]) -> Path:
    """The folder with the managers' binaries and a file of manifests for each; minutes when cold, nothing when cached.

    Raises:
        BuildError: the Go command failed, or a module isn't the one that this bench was written for.
    """
    target = root / "peers" / _key()
    target.mkdir(parents=True, exist_ok=True)
    with (target / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for peer in PEERS:
            if (target / f"{peer.name}.yaml").exists():
                continue
            say(f"building {peer.module} {peer.version} from its Go module (minutes the first time, cached afterwards)")
            source = _downloaded(peer)
            binary.go_build(target / peer.name, peer.package, BUILD_OPTIONS, source, {"CGO_ENABLED": "0"})
            if peer is TRAINER_MANAGER:
                shutil.copyfile(source / "manifests/base/runtimes" / TORCH_RUNTIME, target / TORCH_RUNTIME)
            manifests = _manifests(source / peer.manifests, binary.build(root, say) / binary.MULTI_CALL)
            (target / f"{peer.name}.yaml").write_text(manifests)
    return target


def _key() -> str:
    inputs = [*BUILD_OPTIONS, *(f"{peer.module} {peer.version} {peer.digest} {peer.package} {peer.manifests}" for peer in PEERS)]
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]


def _downloaded(peer: Peer) -> Path:
    """The module's folder in Go's cache."""
    done = subprocess.run(
        ["go", "mod", "download", "-json", f"{peer.module}@{peer.version}"], capture_output=True, text=True, check=False, cwd="/"
    )
    module = json.loads(done.stdout or "{}")
    if done.returncode != 0 or module.get("Sum") != peer.digest:
        reason = module.get("Error") or done.stderr.strip() or f"its digest is {module.get('Sum')}, must be {peer.digest}"
        raise binary.BuildError(f"{peer.module}@{peer.version}: {reason}")
    return Path(module["Dir"])


def _manifests(overlay: Path, kube: Path) -> str:
    """Objects that `kubectl apply -k` would send. Trainer's overlay fetches JobSet too, which is there: "comment this line if JobSet is
    installed".
    """
    with tempfile.TemporaryDirectory() as folder:
        top = overlay.parents[1] if overlay.parent.name == "overlays" else overlay.parent
        shutil.copytree(top, Path(folder, "copy"), copy_function=shutil.copyfile)
        copy = Path(folder, "copy", overlay.relative_to(top))
        for path in (*Path(folder).rglob(""), copy / "kustomization.yaml"):
            path.chmod(0o700)
        lines = (copy / "kustomization.yaml").read_text().splitlines(keepends=True)
        (copy / "kustomization.yaml").write_text("".join(line for line in lines if "third-party" not in line))
        command = [str(kube), "kubectl", "kustomize", str(copy)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Installed:
    """A peer on one cluster."""

    peer: Peer
    built: Path
    webhook_port: int
    health_port: int

    async def send(self, cluster: Cluster) -> None:
        """Create everything but its Deployment."""
        items = [
            item
            for item in yaml.safe_load_all((self.built / f"{self.peer.name}.yaml").read_text())
            if item and item["kind"] != "Deployment"
        ]
        for item in sorted(items, key=lambda item: SENT_FIRST.index(item["kind"]) if item["kind"] in SENT_FIRST else len(SENT_FIRST)):
            if item["kind"] == "Service":
                # The API server asks an ExternalName itself; a ClusterIP would need endpoints and, on this machine, a route.
                item["spec"] = {"type": "ExternalName", "externalName": "localhost"}
            if item["kind"] == "CustomResourceDefinition":
                item["spec"].pop("conversion", None)  # one version: there is nothing to convert
            for webhook in item.get("webhooks", ()):
                webhook["clientConfig"]["service"]["port"] = self.webhook_port
            await _created(cluster, item)
        for item in items:
            if item["kind"] == "CustomResourceDefinition":
                await _until_served(cluster, item["spec"])

    def arguments(self) -> list[str]:
        """Arguments of its Deployment, without the election of a leader. Its settings are in its /tmp."""
        if self.peer is JOBSET_MANAGER:
            return ["--config=/tmp/config.yaml", "--zap-log-level=2"]
        return [f"--webhook-server-port={self.webhook_port}", f"--health-probe-bind-address=:{self.health_port}"]

    def settings(self) -> Object:
        """JobSet's file of settings; Trainer reads none."""
        return {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1", "kind": "Configuration", "leaderElection": {"leaderElect": False},
            "webhook": {"port": self.webhook_port}, "health": {"healthProbeBindAddress": f":{self.health_port}"},
                "metrics": {"bindAddress": "0"},
        }  # fmt: skip

    async def run(self, cluster: Cluster, admin: Path, folder: Path) -> Manager:
        """Install it and start its manager; its webhooks answer. `admin` is the administrator's kubeconfig."""
        await self.send(cluster)
        kubeconfig = await identity(cluster, admin, self.peer.account, folder / f"kubeconfig-{self.peer.name}")
        manager = Manager(self, folder / self.peer.name, kubeconfig)
        try:
            await manager.until_ready(cluster)
        except BaseException:
            manager.end()
            raise
        return manager


async def _created(cluster: Cluster, item: Object) -> None:
    try:
        if item["kind"] in COLLECTIONS:
            await cluster.request("POST", COLLECTIONS[item["kind"]], item)
        else:
            await cluster.create(item)
    except ApiError as error:
        if item["kind"] != "Namespace" or error.status != 409:
            raise


async def _until_served(cluster: Cluster, kind: Object) -> None:
    """A manager that starts before its kinds are there ends at once."""
    path, plural = f"/apis/{kind['group']}/{kind['versions'][0]['name']}", kind["names"]["plural"]
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(ApiError):
            if any(resource["name"] == plural for resource in (await cluster.request("GET", path))["resources"]):
                return
        await asyncio.sleep(0.1)
    raise SystemExit(f"{path} has no {plural}")


async def created_at_last(cluster: Cluster, path: str, item: Object) -> None:
    """Create what a webhook looks at that answers only a moment after its server is ready."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            await cluster.request("POST", path, item)
            return
        except ApiError:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(0.5)


async def identity(cluster: Cluster, admin: Path, account: tuple[str, str], target: Path) -> Path:
    """A kubeconfig with a token of the service account: its own rights, and its own name in the audit log."""
    spec = {"expirationSeconds": 4 * 3600}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    token = await cluster.request("POST", path_of("ServiceAccount", *account, "token"), body)
    _write_kubeconfig(admin, token["status"]["token"], target)
    return target


def _write_kubeconfig(admin: Path, token: str, target: Path) -> None:
    config = yaml.safe_load(admin.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    target.write_text(yaml.safe_dump(config))


class Manager:
    """A peer's process. Its /tmp is a folder of its own: there are its settings and, as a kubelet would put them there, its
    certificates.
    """

    def __init__(self, installed: Installed, folder: Path, kubeconfig: Path) -> None:
        """`folder` doesn't exist yet; the log comes beside it."""
        self._installed = installed
        self._certificates = folder / CERTIFICATES
        self._certificates.mkdir(parents=True)
        shutil.copyfile(kubeconfig, folder / "kubeconfig")
        (folder / "config.yaml").write_text(yaml.safe_dump(installed.settings()))
        self._log = folder.with_suffix(".log")
        command = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            IN_NAMESPACE,
            str(folder),
            str(installed.built / installed.peer.name),
            *installed.arguments(),
        ]
        environment = {**os.environ, "KUBECONFIG": "/tmp/kubeconfig"}  # noqa: S108 (its own)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*TIED, *command], env=environment, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def until_ready(self, cluster: Cluster) -> None:
        """Its webhooks answer. Raises SystemExit with the log's last words."""
        end = time.monotonic() + PATIENCE_SECONDS
        peer, port = self._installed.peer, self._installed.health_port
        placed: Object = {}
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < end and self._process.poll() is None:
                secret = await cluster.get("Secret", peer.account[0], peer.certificate) or {}
                if (secret.get("data") or {}).get("tls.crt") and secret["data"] != placed:
                    placed = secret["data"]
                    for name, content in placed.items():
                        (self._certificates / name).write_bytes(base64.b64decode(content))
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{port}/readyz") as reply:
                        if reply.status == 200 and placed:
                            return
                await asyncio.sleep(0.2)
        raise SystemExit(f"{peer.name} isn't ready; its last words: {self._log.read_text(errors='replace')[-2000:]}")

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
