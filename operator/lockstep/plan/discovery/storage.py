"""One volume for all pods, or one for each: by what the classes can do."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.storageclasses import Judged, Shareable, judge_classes
from lockstep.plan.discovery.draft import Entry, left_out, stated, unknown


def storage_entries(facts: ClusterFacts) -> Iterator[Entry]:
    """The section `storage`."""
    classes = judge_classes(facts)
    if not classes:
        seen = facts.list("StorageClass")
        why = seen.why_not or "the cluster has no storage class"
        yield unknown("storage.mode", "rwx", f"{why}. rwx (the default) needs a class whose claims are ReadWriteMany")
        yield unknown("storage.class_rwx", "nfs-csi", f"{why}; left out, claims get the default class")
        yield unknown("storage.class_rwo", "ceph-rbd", f"{why}; left out, claims get the default class")
        return
    shared = [judged for judged in classes if judged.shareable is Shareable.YES]
    yield from _shared(shared, classes)
    yield _own(shared, classes)
    yield left_out("storage.workspace_size", "100Gi", "/workspace: code, models, runs; the default")
    yield left_out("storage.datasets_size", "500Gi", "/datasets; the default")


def _shared(shared: list[Judged], classes: list[Judged]) -> Iterator[Entry]:
    others = "; ".join(f"{judged.name}: {judged.why}" for judged in classes if judged.shareable is not Shareable.YES)
    if shared:
        yield stated("storage.mode", "rwx", f"class {shared[0].name} can be shared by all pods")
        more = f"; others that can: {', '.join(judged.name for judged in shared[1:])}" if shared[1:] else ""
        yield stated("storage.class_rwx", shared[0].name, f"{shared[0].why}{more}")
        return
    yield stated("storage.mode", "volumeClaimTemplates", f"no class was found that can be shared by all pods ({others})")
    doubtful = next((judged.name for judged in classes if judged.shareable is not Shareable.NO and not judged.is_default), "nfs-csi")
    yield unknown("storage.class_rwx", doubtful, "which class has ReadWriteMany volumes; where one does, mode: rwx is easier to work with")


def _own(shared: list[Judged], classes: list[Judged]) -> Entry:
    single = [judged for judged in classes if judged not in shared] or classes
    best = next((judged for judged in single if judged.is_default), single[0])
    return stated("storage.class_rwo", best.name, f"{best.why}{'; the default class' if best.is_default else ''}")
