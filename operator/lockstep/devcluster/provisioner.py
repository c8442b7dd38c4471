"""Volumes for claims: `python -m lockstep.devcluster.provisioner ROOT NAME INDEX`, a daemon of the control plane.

Every node sees the machine's disk, so a folder is a volume of any access mode. A claim of class local-rwx or local-rwo gets the
folder <namespace>/<claim>, world-writable since pods run under any user id; the folder is removed when the claim is. A claim of
class local-python gets the Python environment, read-only.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lockstep.devcluster.host.layout import Layout

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


def provision(core: Any, claim: dict[str, Any], layout: Layout) -> None:
    volume = volume_for(claim, layout)
    path = Path(volume["spec"]["hostPath"]["path"])
    if path.is_relative_to(layout.volumes):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
    core.create_persistent_volume(volume)
    print(f"provisioner: {path} for claim {claim['metadata']['namespace']}/{claim['metadata']['name']}", flush=True)


def release_volume(core: Any, volume: dict[str, Any], layout: Layout) -> None:
    """Remove the data first and then the volume, so that a failure between them is tried again."""
    path = Path(volume["spec"]["hostPath"]["path"])
    if path.is_relative_to(layout.volumes) and path.exists():
        shutil.rmtree(path)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    core.delete_persistent_volume(volume["metadata"]["name"])
    print(f"provisioner: removed {volume['metadata']['name']}", flush=True)


def work_once(api: Any, core: Any, layout: Layout) -> None:
    """One round. Volumes are read after claims, so that every volume that an earlier round made is seen."""
    claims = api.sanitize_for_serialization(core.list_persistent_volume_claim_for_all_namespaces(resource_version="0"))["items"]
    volumes = api.sanitize_for_serialization(core.list_persistent_volume(label_selector=LABEL))["items"]
    for volume in to_release(volumes):
        release_volume(core, volume, layout)
    for claim in to_provision(claims, volumes):
        provision(core, claim, layout)


def _tell(error: Exception) -> None:
    print(f"provisioner: {type(error).__name__}: {error}; trying again", file=sys.stderr, flush=True)


def _follow(listing: Callable[..., Any], changed: threading.Event) -> None:
    """Set `changed` at every event of these objects, and when their watch ends or fails: what came meanwhile is unknown."""
    failure: type[Exception] | None = None
    while True:
        try:
            for _ in listing(watch=True, _preload_content=False).stream():
                failure = None
                changed.set()
        except Exception as error:
            if type(error) is not failure:
                _tell(error)
            failure = type(error)
        changed.set()
        time.sleep(1)


def main(root: str, name: str, index: str) -> None:
    from kubernetes import client, config

    layout = Layout(name=name, index=int(index), root=Path(root))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # as programs end: the client removes the files with its key only then
    api = config.new_client_from_config(str(layout.kubeconfig))
    core, changed = client.CoreV1Api(api), threading.Event()
    for listing in (core.list_persistent_volume_claim_for_all_namespaces, core.list_persistent_volume):
        threading.Thread(target=_follow, args=(listing, changed), daemon=True).start()
    while True:
        changed.clear()
        try:
            work_once(api, core, layout)
        except Exception as error:
            _tell(error)
            time.sleep(1)
            continue
        changed.wait(LOOK_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
