"""Storage classes, and whether one can give a volume that many nodes mount: by what is bound already, else by its provisioner (pure).

A class's name and its mere existence say nothing: clusters list CephFS classes whose claims never bind.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lockstep.api.objects import Object
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep_spec.words import listed

DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
RWX = "ReadWriteMany"


class Shareable(StrEnum):
    """Answer to whether claims of a class can be ReadWriteMany."""

    YES = "yes"
    NO = "no"
    DOUBTFUL = "doubtful"  # the provisioner could, but claims wait for ever
    UNKNOWN = "unknown"


# By the end of the provisioner's name, since operators put their namespace in front.
PROVISIONERS = {
    "cephfs.csi.ceph.com": Shareable.YES,
    "nfs.csi.k8s.io": Shareable.YES,
    "nfs.csi.ceph.com": Shareable.YES,
    "nfs-subdir-external-provisioner": Shareable.YES,
    "file.csi.azure.com": Shareable.YES,
    "filestore.csi.storage.gke.io": Shareable.YES,
    "efs.csi.aws.com": Shareable.YES,
    "fsx.csi.aws.com": Shareable.YES,
    "beegfs.csi.netapp.com": Shareable.YES,
    "spectrumscale.csi.ibm.com": Shareable.YES,
    "csi.weka.io": Shareable.YES,
    "csi.vastdata.com": Shareable.YES,
    "driver.longhorn.io": Shareable.YES,
    "lustre.csi.storage.gke.io": Shareable.YES,
    "rbd.csi.ceph.com": Shareable.NO,
    "ebs.csi.aws.com": Shareable.NO,
    "disk.csi.azure.com": Shareable.NO,
    "pd.csi.storage.gke.io": Shareable.NO,
    "cinder.csi.openstack.org": Shareable.NO,
    "topolvm.io": Shareable.NO,
    "topolvm.cybozu.com": Shareable.NO,
    "rancher.io/local-path": Shareable.NO,
    "hostpath.csi.k8s.io": Shareable.NO,
    "lockstep.dev/devcluster": Shareable.YES,  # folders of one machine, which all embedded nodes see
}
"""Provisioners that make file systems for many nodes, or for one. RBD has ReadWriteMany for raw blocks only."""


@dataclass(frozen=True)
class JudgedClass:
    """One storage class, and how we know."""

    name: str
    shareable: Shareable
    why: str
    is_default: bool = False


def is_default_class(item: Object) -> bool:
    return (item["metadata"].get("annotations") or {}).get(DEFAULT_CLASS) == "true"


def judge_classes(facts: ClusterFacts) -> list[JudgedClass]:
    """Every storage class that was seen, the best for sharing first."""
    order = list(Shareable)
    classes = [judge_class(item, facts) for item in facts.list("StorageClass").items]
    return sorted(classes, key=lambda judged: (order.index(judged.shareable), not judged.is_default, judged.name))


def judge_class(item: Object, facts: ClusterFacts) -> JudgedClass:
    name, provisioner = str(item["metadata"]["name"]), str(item.get("provisioner", ""))
    is_default = is_default_class(item)
    bound, waiting = (_shared(facts, name, phase) for phase in ("Bound", "Pending"))
    if bound:
        return JudgedClass(name, Shareable.YES, f"{RWX} volumes of it are bound ({listed(bound)})", is_default)
    by_provisioner = next((verdict for end, verdict in PROVISIONERS.items() if provisioner.endswith(end)), Shareable.UNKNOWN)
    if waiting and by_provisioner is not Shareable.NO:
        return JudgedClass(name, Shareable.DOUBTFUL, f"{RWX} claims of it wait and none is bound ({listed(waiting)})", is_default)
    reasons = {
        Shareable.YES: f"its provisioner {provisioner} makes shared file systems; no claim of it was seen bound",
        Shareable.NO: f"its provisioner {provisioner} makes volumes for one node at a time",
        Shareable.UNKNOWN: f"its provisioner {provisioner} is not one that Lockstep knows, and no {RWX} volume of it was seen",
    }
    return JudgedClass(name, by_provisioner, reasons.get(by_provisioner, ""), is_default)


def _shared(facts: ClusterFacts, name: str, phase: str) -> list[str]:
    """Volumes and claims of the class in this phase that are ReadWriteMany."""
    volumes = [*facts.list("PersistentVolume").items, *facts.list("PersistentVolumeClaim").items]
    return [
        str(item["metadata"]["name"])
        for item in volumes
        if item["spec"].get("storageClassName") == name
        and RWX in item["spec"].get("accessModes", [])
        and item.get("status", {}).get("phase") == phase
    ]
