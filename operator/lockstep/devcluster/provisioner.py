"""Volumes for claims: `python -m lockstep.devcluster.provisioner ROOT NAME INDEX`, a daemon of the control plane.

Every node sees the machine's disk, so a folder is a volume of any access mode. A claim of class local-rwx or local-rwo gets the
folder <namespace>/<claim>, world-writable since pods run under any user id; the folder is removed when the claim is. A claim of
class local-python gets the Python environment, read-only.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.devcluster.host.layout import Layout
from lockstep.kube.aim import Kubeconfig
from lockstep.kube.cluster import Client, Cluster

CLASSES = ("local-rwx", "local-rwo", "local-python")
PROVISIONER = "lockstep.dev/devcluster"
LABEL = "lockstep.dev/devcluster"
LOOK_SECONDS = 10.0
"""Longest time without a look, whatever the watches say."""


def storage_class(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"} if name == "local-rwo" else {}},
        "provisioner": PROVISIONER,
        "reclaimPolicy": "Retain",
        "volumeBindingMode": "Immediate",
    }


def volume_for(claim: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """The PersistentVolume that is reserved for this claim."""
    metadata, spec = claim["metadata"], claim["spec"]
    name = spec["storageClassName"]
    path = layout.python_mount if name == "local-python" else layout.volumes / metadata["namespace"] / metadata["name"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"pvc-{metadata['uid']}", "labels": {LABEL: "true"}},
        "spec": {
            "storageClassName": name,
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(path), "type": "Directory"},
            "claimRef": {
                "kind": "PersistentVolumeClaim",
                "apiVersion": "v1",
                "uid": metadata["uid"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
            },
        },
    }


def to_release(volumes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Volumes whose claim is gone."""
    return [volume for volume in volumes if volume.get("status", {}).get("phase") == "Released"]


def to_provision(claims: Iterable[dict[str, Any]], volumes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Claims of our classes that have no volume yet.

    A claim made again under the same name waits until the volume of the earlier one is gone: both have the same folder, and its
    removal would take the new claim's data.
    """
    taken = {(ref["namespace"], ref["name"]) for ref in (volume["spec"]["claimRef"] for volume in volumes)}
    return [
        claim
        for claim in claims
        if claim["spec"].get("storageClassName") in CLASSES
        and not claim["spec"].get("volumeName")
        and not claim["metadata"].get("deletionTimestamp")
        and (claim["metadata"]["namespace"], claim["metadata"]["name"]) not in taken
    ]


def make_folder(volume: dict[str, Any], layout: Layout) -> Path:
    """Make the folder of a volume, but for that of the Python environment, and return its path."""
    path = Path(volume["spec"]["hostPath"]["path"])
    if path.is_relative_to(layout.volumes):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
    return path


def remove_folder(volume: dict[str, Any], layout: Layout) -> None:
    path = Path(volume["spec"]["hostPath"]["path"])
    if path.is_relative_to(layout.volumes) and path.exists():
        shutil.rmtree(path)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()


async def work_once(cluster: Cluster, layout: Layout) -> None:
    """One round. Volumes are read after claims, so that every volume that an earlier round made is seen. Data go before their volume, so
    that a failure between them is tried again.
    """
    claims = (await cluster.list("PersistentVolumeClaim", None, {"resourceVersion": "0"}))["items"]
    volumes = (await cluster.list("PersistentVolume", None, {"labelSelector": LABEL}))["items"]
    for volume in to_release(volumes):
        remove_folder(volume, layout)
        await cluster.delete("PersistentVolume", None, volume["metadata"]["name"])
        print(f"provisioner: removed {volume['metadata']['name']}", flush=True)
    for volume in (volume_for(claim, layout) for claim in to_provision(claims, volumes)):
        path, claim = make_folder(volume, layout), volume["spec"]["claimRef"]
        await cluster.create(volume)
        print(f"provisioner: {path} for claim {claim['namespace']}/{claim['name']}", flush=True)


def _tell(error: Exception) -> None:
    print(f"provisioner: {type(error).__name__}: {error}; trying again", file=sys.stderr, flush=True)


async def _follow(cluster: Cluster, kind: str, changed: asyncio.Event) -> None:
    """Set `changed` at every event of these objects, and when their watch ends or fails: what came meanwhile is unknown."""
    failure: type[Exception] | None = None
    while True:
        try:
            async for _ in cluster.watch(kind, None, {}):
                failure = None
                changed.set()
        except Exception as error:
            if type(error) is not failure:
                _tell(error)
            failure = type(error)
        changed.set()
        await asyncio.sleep(1)


def administrator(layout: Layout) -> Client:
    """Return a client of the cluster's API server as its administrator."""
    return Client(kubeconfig=Kubeconfig(str(layout.kubeconfig)))


async def serve(layout: Layout) -> None:
    changed = asyncio.Event()
    async with administrator(layout).connected() as cluster, asyncio.TaskGroup() as watches:
        for kind in ("PersistentVolumeClaim", "PersistentVolume"):
            watches.create_task(_follow(cluster, kind, changed))
        while True:
            changed.clear()
            try:
                await work_once(cluster, layout)
            except Exception as error:
                _tell(error)
                await asyncio.sleep(1)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await changed.wait()


if __name__ == "__main__":
    root, name, index = sys.argv[1:]
    asyncio.run(serve(Layout(name=name, index=int(index), root=Path(root))))
