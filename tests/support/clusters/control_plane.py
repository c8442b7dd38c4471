"""A control plane without nodes: etcd, API server and the controllers that a job needs, on a loopback address of its own, for as long as a
block lasts.

Where pods are played nobody needs kubelets, and nobody's operator is in the way. The programs are those of the embedded cluster.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.api.cluster import TrainingCluster
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.names import KEY_SECRET, OPERATOR_NAME, TLS_SECRET
from lockstep.devcluster import binary, controlplane
from lockstep.devcluster.host.layout import Layout
from lockstep.devcluster.host.processes import TIED
from lockstep.environments import cache_root
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.platforms.clusters.install import operator_objects
from lockstep.platforms.operator.secrets import AUTHORITY
from lockstep_machine.network import free_ports
from support.checkout import ROOT
from support.clusters.own_cluster import GO

PATIENCE_SECONDS = 180.0
CONTROLLERS = (
    "statefulset-controller", "garbage-collector-controller", "namespace-controller", "clusterrole-aggregation-controller",
    "job-controller", "ttl-after-finished-controller",
)  # fmt: skip
"""None that looks after nodes: one that is played stays as it is."""
LEFT_OUT = ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy")
"""Kinds of deploy-cluster's objects that aren't sent: the operator's own pods are a process of the test."""
AUDIT_LOG = "audit.log"
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
}
Objects = Callable[[], list[dict[str, Any]]]
STAYS = ("CustomResourceDefinition", "Namespace", "PersistentVolumeClaim")
"""Kinds whose objects another installation takes over as they are."""
MADE_BY_OPERATORS = (("Secret", KEY_SECRET), ("Secret", TLS_SECRET), ("ConfigMap", AUTHORITY), ("Lease", OPERATOR_NAME))


def local_profile() -> TrainingCluster:
    return parse_cluster_file((ROOT / "clusters" / "local.yaml").read_text(), "local.yaml").profile


def default_objects() -> list[dict[str, Any]]:
    """Objects as `lockstep deploy local` sends them."""
    return operator_objects(local_profile(), "operator:1", namespace="lockstep", manifests=ROOT / "manifests")


class Loopback(Layout):
    """Layout like an embedded cluster's, with everything in one folder and on one address."""

    def __init__(self, folder: Path, address: str, ports: tuple[int, int]) -> None:
        super().__init__("control-plane", 0, folder)
        self.state, self.kubeconfig, self.pki, self.logs = folder, folder / "admin.kubeconfig", folder / "pki", folder / "logs"
        self.gateway, self.server = address, f"https://{address}:6443"
        self._ports = ports

    def etcd_port(self, peer: bool = False) -> int:
        return self._ports[peer]


_PLANES = itertools.count(1)


def loopback(folder: Path) -> Loopback:
    """Every control plane has an address of its own, of its process's: all of 127/8 is this machine."""
    high, low = divmod(os.getpid() % 65000 + 256, 256)
    return Loopback(folder, f"127.{high % 200 + 20}.{low}.{next(_PLANES) % 250 + 1}", tuple(free_ports(2)))


@contextmanager
def control_plane(folder: Path, objects: Objects = default_objects) -> Iterator[Path]:
    """The administrator's kubeconfig. Lockstep is installed as `objects` has it, but for the operator's pods.

    Beside it lies `audit.log`: every request of a service account, one JSON object a line.
    """
    layout = loopback(folder)
    controlplane.write_credentials(layout)
    layout.logs.mkdir()
    programs = controlplane.commands(layout, binary.build(cache_root(), print) / binary.MULTI_CALL)
    (folder / "audit.yaml").write_text(json.dumps(AUDIT_POLICY))
    programs["kube-apiserver"] += [
        "--advertise-address=192.0.2.1",  # nobody comes by that address, but a loopback one is refused
        f"--audit-policy-file={folder / 'audit.yaml'}", f"--audit-log-path={folder / AUDIT_LOG}", "--audit-log-mode=blocking",
        "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",  # the second as on OpenShift
    ]  # fmt: skip
    programs["kube-controller-manager"] += [f"--controllers={','.join(CONTROLLERS)}"]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for name in ("etcd", "kube-apiserver"):
            running.append(_started(layout, name, programs[name]))
        _wait("the API server answers", lambda: _is_ready(layout), running)
        running.append(_started(layout, "kube-controller-manager", programs["kube-controller-manager"]))
        asyncio.run(_install(layout.kubeconfig, objects()))
        yield layout.kubeconfig
    finally:
        for process in reversed(running):  # nothing of it is kept
            process.kill()
            process.wait()


def _started(layout: Layout, name: str, command: list[str]) -> subprocess.Popen[bytes]:
    with layout.log(name).open("wb") as log:
        return subprocess.Popen([*TIED, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | GO)


def _wait(what: str, holds: Callable[[], bool], running: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert all(process.poll() is None for process in running), f"a daemon ended before {what}"
        assert time.monotonic() < end, f"{what}: not within {PATIENCE_SECONDS:.0f} s"
        time.sleep(0.1)


def _is_ready(layout: Layout) -> bool:
    context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
    connection = http.client.HTTPSConnection(layout.gateway, 6443, timeout=2, context=context)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@dataclass
class Plane:
    """A control plane that tests use one after the other, each with the installation that it needs."""

    kubeconfig: Path
    installed: list[dict[str, Any]] = field(default_factory=list)
    """Objects of the newest installation, which the next one takes away where it has others."""

    @property
    def audit_log(self) -> Path:
        return self.kubeconfig.parent / AUDIT_LOG

    def install(self, objects: list[dict[str, Any]]) -> None:
        """Take away what is there and not among `objects`, wait for namespaces that are on their way out, and send `objects`."""
        asyncio.run(self._exchange(objects))

    async def _exchange(self, objects: list[dict[str, Any]]) -> None:
        async with await connected(self.kubeconfig) as cluster:
            for item in self.installed:
                if item not in objects and item["kind"] not in STAYS:
                    await cluster.delete(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
            end = time.monotonic() + PATIENCE_SECONDS
            while any("deletionTimestamp" in item["metadata"] for item in (await cluster.list("Namespace"))["items"]):
                assert time.monotonic() < end, "a namespace is still there"
                await asyncio.sleep(0.2)
            self.installed = objects
            await _apply(cluster, objects)

    def forget_operator(self, namespace: str) -> None:
        """Delete what an operator made for itself in its namespace: the next one begins as the first did."""

        async def delete() -> None:
            async with await connected(self.kubeconfig) as cluster:
                for kind, name in MADE_BY_OPERATORS:
                    await cluster.delete(kind, namespace, name)

        asyncio.run(delete())


async def _install(kubeconfig: Path, objects: list[dict[str, Any]]) -> None:
    async with await connected(kubeconfig) as cluster:
        await _apply(cluster, objects)


async def _apply(cluster: Cluster, objects: list[dict[str, Any]]) -> None:
    for item in objects:
        if item["kind"] not in LEFT_OUT:
            await _applied(cluster, item)


async def connected(kubeconfig: Path) -> Cluster:
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(kubeconfig)
    try:
        return await Cluster.connect()
    finally:
        os.environ.pop("KUBECONFIG") if before is None else os.environ.update(KUBECONFIG=before)


async def _applied(cluster: Cluster, item: dict[str, Any]) -> None:
    """A CRD's kind is served a moment after it was made."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            await cluster.apply(item)
            return
        except ApiError as error:
            if error.status != 404 or time.monotonic() > end:
                raise
            await asyncio.sleep(0.1)
