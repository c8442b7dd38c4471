"""Volumes for claims: `python -m lockstep.devcluster.provisioner ROOT NAME INDEX`, a daemon of the control plane.

Every node sees the machine's disk, so a folder is a volume of any access mode. A claim of class local-rwx or local-rwo gets the
folder <namespace>/<claim>, world-writable since pods run under any user id; the folder is removed when the claim is. A claim of
class local-python gets the Python environment, read-only.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.devcluster.layout import Layout

CLASSES = ("local-rwx", "local-rwo", "local-python")
PROVISIONER = "lockstep.dev/devcluster"
LABEL = "lockstep.dev/devcluster"
POLL_SECONDS = 0.3
MINIMUM_SIZE = "1Ki"


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
    path = layout.python_volume if name == "local-python" else layout.volumes / metadata["namespace"] / metadata["name"]
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


def provision(core: Any, claim: dict[str, Any], layout: Layout) -> None:
    if (
        claim["spec"].get("storageClassName") not in CLASSES
        or claim["spec"].get("volumeName")
        or claim["metadata"].get("deletionTimestamp")
    ):
        return
    volume = volume_for(claim, layout)
    path = Path(volume["spec"]["hostPath"]["path"])
    if path != layout.python_volume:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
    _create(core, volume)
    print(f"provisioner: {path} for claim {claim['metadata']['namespace']}/{claim['metadata']['name']}", flush=True)


def release(core: Any, volume: dict[str, Any], layout: Layout) -> None:
    """Remove the data and the volume of a claim that is gone."""
    if volume.get("status", {}).get("phase") != "Released":
        return
    path = Path(volume["spec"]["hostPath"]["path"])
    if path.is_relative_to(layout.volumes):
        shutil.rmtree(path, ignore_errors=True)
    core.delete_persistent_volume(volume["metadata"]["name"])
    print(f"provisioner: removed {path}", flush=True)


def _create(core: Any, volume: dict[str, Any]) -> None:
    from kubernetes.client.exceptions import ApiException

    try:
        core.create_persistent_volume(volume)
    except ApiException as error:
        if error.status != 409:  # it was made in the last round
            raise


def main(root: str, name: str, index: str) -> None:
    from kubernetes import client, config

    layout = Layout(name=name, index=int(index), root=Path(root))
    api = config.new_client_from_config(str(layout.kubeconfig))
    core = client.CoreV1Api(api)
    while True:
        try:
            claims = api.sanitize_for_serialization(core.list_persistent_volume_claim_for_all_namespaces(resource_version="0"))
            volumes = api.sanitize_for_serialization(core.list_persistent_volume(label_selector=LABEL, resource_version="0"))
            for claim in claims["items"]:
                provision(core, claim, layout)
            for volume in volumes["items"]:
                release(core, volume, layout)
        except Exception as error:
            print(f"provisioner: {type(error).__name__}: {error}; trying again", file=sys.stderr, flush=True)
            time.sleep(1)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
