"""Cases for every key of a cluster file: keys that make a file with it, and the same without it."""

from __future__ import annotations

from typing import Any

from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.files.clusterkeys import KEYS, Key, integer, switch

# A value that is no default, for every key of the cluster but bounded numbers and switches; what else a file then must say.
VALUES: dict[str, Any] = {
    "cluster.platform": "kubernetes", "nodes.gpu_nodes": ["a", "b"], "nodes.selector": {"a": "b"}, "nodes.rack_label": "rack",
    "storage.mode": "volumeClaimTemplates", "storage.class_rwx": "a", "storage.class_rwo": "a", "storage.workspace_size": "1Gi",
    "storage.datasets_size": "1Gi", "storage.workspace_claim": "a", "storage.datasets_claim": "a",
    "network.rdma.devices": ["mlx5_0"], "network.rdma.interfaces": ["net1"], "network.rdma.gdr_level": "SYS",
        "network.rdma.rails[].network": "a",
    "network.rdma.rails[].resource": "a/b", "network.rdma.memlock": "unlimited",
    "network.tcp.interface_exclude": "^lo", "network.tcp.p2p_level": "NVL", "network.minimum_busbw": "90.5",
        "security.service_account": "a", "gpus.type": "H100",
    "resources.requests.cpu": "1", "resources.requests.memory": "1Gi", "resources.limits.cpu": "1", "resources.limits.memory": "1Gi",
    "nccl.debug": "INFO", "nccl.env[].name": "NCCL_ALGO", "nccl.env[].value": "Ring", "image": "a:1", "shm_size": "1Gi",
    "pod.volumes[].name": "a", "pod.volumes[].claim": "a", "pod.volumes[].mount_path": "/a", "pod.volumes[].class": "a",
    "pod.volumes[].size": "2Gi", "pod.env[].name": "A", "pod.env[].value": "1", "notes": "a",
    "pod.tolerations[].key": "a", "pod.tolerations[].operator": "Exists", "pod.tolerations[].value": "a",
        "pod.tolerations[].effect": "NoSchedule",
    "pod.tolerations[].toleration_seconds": 60, "pod.image_pull_secrets": ["a"], "pod.runtime_class": "nvidia",
}  # fmt: skip
NEEDED = {
    "network.rdma.rails[].network": {"network.rdma.enabled": True, "security.ipc_lock": True, "network.rdma.rails[].resource": "a/b"},
    "network.rdma.rails[].resource": {"network.rdma.enabled": True, "security.ipc_lock": True, "network.rdma.rails[].network": "a"},
    "network.rdma.enabled": {"security.ipc_lock": True},
    "nccl.env[].name": {"nccl.env[].value": "Ring"},
    "nccl.env[].value": {"nccl.env[].name": "NCCL_ALGO"},
    "pod.env[].value": {"pod.env[].name": "A"},
    "pod.tolerations[].key": {"pod.tolerations[].operator": "Exists"},
    "pod.tolerations[].operator": {"pod.tolerations[].key": "a"},
    "pod.tolerations[].value": {"pod.tolerations[].key": "a"},
    "pod.tolerations[].effect": {"pod.tolerations[].key": "a"},
    "pod.tolerations[].toleration_seconds": {"pod.tolerations[].key": "a", "pod.tolerations[].effect": "NoExecute"},
} | {
    key: {
        other: "/z" if other.endswith("path") else "z"
        for other in ("pod.volumes[].name", "pod.volumes[].claim", "pod.volumes[].mount_path")
    }
    for key in KEYS
    if key.startswith("pod.volumes[]")
}


def written(values: dict[str, Any]) -> dict[str, Any]:
    """The document of a cluster file with these keys."""
    document: dict[str, Any] = {"cluster": {"name": "x", "namespace": "n"}}
    for path, value in values.items():
        *sections, name = path.split(".")
        place = document
        for section in sections:
            place = place.setdefault(section.removesuffix("[]"), [{}] if section.endswith("[]") else {})
            place = place[0] if isinstance(place, list) else place
        place[name] = value
    return document


def field_of_key(key: Key) -> FieldInfo:
    """Field of the cluster's spec that a key becomes; no key of a list's items."""
    model: Any = TrainingClusterSpec
    *sections, last = key.model.split(".")
    for section in sections:
        model = _by_alias(model)[section].annotation
    return _by_alias(model)[last]


def _by_alias(model: Any) -> dict[str, FieldInfo]:
    return {info.alias or name: info for name, info in model.model_fields.items()}


def bounds(info: FieldInfo) -> tuple[int, int] | None:
    """Least and greatest value of a number that has both."""
    least = [bound.ge for bound in info.metadata if isinstance(bound, Ge)]
    greatest = [bound.le for bound in info.metadata if isinstance(bound, Le)]
    return (least[0], greatest[0]) if least and greatest else None


def value_for(key: str) -> Any:
    """A value that is no default: that of VALUES, else a bound of the number or the other position of the switch."""
    if key in VALUES:
        return VALUES[key]
    info = None if "[]" in key else field_of_key(KEYS[key])
    if info and KEYS[key].read is switch:
        return not info.default
    if info and KEYS[key].read is integer and (ends := bounds(info)):
        return next(end for end in reversed(ends) if end != info.default)
    raise LookupError(f"add a value for {key} to VALUES in tests/support/cluster_file_cases.py")


# Without these an item of a list is no item, so the list goes with them.
REQUIRED = {
    "nccl.env[].name", "nccl.env[].value", "pod.env[].name",
    "pod.volumes[].name", "pod.volumes[].claim", "pod.volumes[].mount_path",
}  # fmt: skip


def given(key: str) -> dict[str, Any]:
    """Keys and values of a valid file with `key`."""
    return NEEDED.get(key, {}) | {key: value_for(key)}


def left_out(key: str) -> dict[str, Any]:
    """The same without `key`."""
    return {path: value for path, value in NEEDED.get(key, {}).items() if path != key and not ("[]" in path and key in REQUIRED)}
