"""Clusters as one person sees them, for tests of discovery and lint: an RDMA one, and the same with rights in one namespace only."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from lockstep.plan.cluster.facts import NETWORK, ClusterFacts, Listing, Sight

Object = dict[str, Any]
RAILS = (5, 6, 7, 8)
NAMESPACES = ("nccl-test", "theirs", "default", "openshift-sriov-network-operator")
GROUPS = frozenset({"security.openshift.io", "k8s.cni.cncf.io", "sriovnetwork.openshift.io", "storage.k8s.io"})


def node(name: str, gpus: int = 4, product: str = "NVIDIA-H100-80GB-HBM3", rails: int = 1, ready: bool = True, **spec: Any) -> Object:
    resources = {"nvidia.com/gpu": str(gpus), "cpu": "126", "memory": "1000Gi"} | {f"openshift.io/eno{n}np0rdma": str(rails) for n in RAILS}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name} | ({"nvidia.com/gpu.product": product} if gpus else {})},
        "spec": spec,
        "status": {"conditions": [{"type": "Ready", "status": str(ready)}], "allocatable": resources},
    }


def network(name: str, namespace: str = "nccl-test", resource: str | None = None, **config: Any) -> Object:
    annotations = {"k8s.v1.cni.cncf.io/resourceName": resource} if resource else {}
    return {
        "metadata": {"name": name, "namespace": namespace, "annotations": annotations},
        "spec": {"config": json.dumps({"type": "sriov"} | config)},
    }


def rail(number: int, subnet: str | None = None, **config: Any) -> Object:
    ipam = {"type": "whereabouts", "range": subnet or f"10.0.{98 + number}.0/24"}
    return network(f"eno{number}np0-network", resource=f"openshift.io/eno{number}np0rdma", **({"mtu": 9000, "ipam": ipam} | config))


def policy(number: int, **spec: Any) -> Object:
    return {
        "metadata": {"name": f"eno{number}"},
        "spec": {"resourceName": f"eno{number}np0rdma", "isRdma": True, "numVfs": 1, "mtu": 9000} | spec,
    }


def storage_class(name: str, provisioner: str, default: bool = False) -> Object:
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {"metadata": {"name": name, "annotations": annotations}, "provisioner": provisioner}


def claim(name: str, storage: str, phase: str = "Bound", mode: str = "ReadWriteMany") -> Object:
    return {"metadata": {"name": name}, "spec": {"storageClassName": storage, "accessModes": [mode]}, "status": {"phase": phase}}


def quota(**hard: str) -> Object:
    return {
        "metadata": {"name": "team"},
        "spec": {"hard": {key.replace("__", "/").replace("_", "."): value for key, value in hard.items()}},
    }


SCCS = (
    {"metadata": {"name": "restricted-v2"}, "allowedCapabilities": ["NET_BIND_SERVICE"], "runAsUser": {"type": "MustRunAsRange"}},
    {
        "metadata": {"name": "nccl-scc"},
        "allowedCapabilities": ["IPC_LOCK"],
        "runAsUser": {"type": "RunAsAny"},
        "fsGroup": {"type": "MustRunAs"},
    },
)


def namespace_seen(name: str, present: bool | None = True, **labels: str) -> dict[tuple[str, str], Listing]:
    """The namespace with these labels; `present` None: it may not be read."""
    item = {"metadata": {"name": name, "labels": labels}}
    listing = Listing("Namespace", sight=Sight.FORBIDDEN) if present is None else Listing("Namespace", (item,) if present else ())
    return {("Namespace", name): listing}


def rdma_cluster(**lists: tuple[Object, ...]) -> ClusterFacts:
    """Two nodes of four GPUs and four rails on OpenShift; `lists` replace what it has, by kind. Networks of other namespaces are seen,
    too.
    """
    kinds = {
        "Node": (node("a"), node("b"), node("control", gpus=0, rails=0)),
        "NetworkAttachmentDefinition": tuple(map(rail, RAILS)),
        "SriovNetworkNodePolicy": tuple(map(policy, RAILS)),
        "StorageClass": (
            storage_class("ceph-rbd", "openshift-storage.rbd.csi.ceph.com", default=True),
            storage_class("nfs", "nfs.csi.k8s.io"),
        ),
        "SecurityContextConstraints": SCCS,
        "PersistentVolume": (),
        "PersistentVolumeClaim": (),
        "ResourceQuota": (),
        "LimitRange": (),
    } | lists
    networks = {namespace: tuple(item for item in kinds[NETWORK] if item["metadata"]["namespace"] == namespace) for namespace in NAMESPACES}
    return ClusterFacts(
        namespace="nccl-test",
        server="https://api.example.com:6443",
        version="v1.30.1",
        namespace_from="as you said",
        groups=GROUPS,
        lists={kind: Listing(kind, items) for kind, items in kinds.items()} | {NETWORK: Listing(NETWORK, networks.pop("nccl-test"))},
        objects=namespace_seen("nccl-test"),
        networks_elsewhere={namespace: Listing(NETWORK, items) for namespace, items in networks.items()},
    )


def with_namespace_rights(facts: ClusterFacts) -> ClusterFacts:
    """Facts that somebody with the role admin in the namespace sees."""
    hidden = ("Node", "StorageClass", "PersistentVolume", "SecurityContextConstraints", "SriovNetworkNodePolicy")
    lists = {kind: Listing(kind, sight=Sight.FORBIDDEN) if kind in hidden else listing for kind, listing in facts.lists.items()}
    return dataclasses.replace(facts, lists=lists, objects=namespace_seen(facts.namespace, None))
