"""The volumes of a pod, where they are mounted, and the claims behind them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from posixpath import normpath
from typing import Any

from lockstep.api import names
from lockstep.api.cluster import ClusterVolume, TrainingClusterSpec
from lockstep.api.podtemplate import ExtraVolume
from lockstep.api.quantity import number
from lockstep.plan.layers import Notice
from lockstep.plan.render.resolved import Resolved
from lockstep_spec.choices import StorageMode

_OWN = {
    names.WORKSPACE_VOLUME: names.WORKSPACE,
    names.DATASETS_VOLUME: names.DATASETS,
    names.AGENT_VOLUME: names.AGENT_FOLDER,
    names.RUN_VOLUME: names.RUN_FOLDER,
    names.KEY_VOLUME: names.KEY_FOLDER,
    names.TOKEN_VOLUME: names.TOKEN_FOLDER,
    names.SHM_VOLUME: "/dev/shm",  # noqa: S108
    names.TMP_VOLUME: "/tmp",  # noqa: S108
}
_READ_ONLY = (names.RUN_VOLUME, names.KEY_VOLUME, names.TOKEN_VOLUME)


def volume_refusals(extra: list[ExtraVolume], shared: list[ClusterVolume]) -> list[Notice]:
    """Two volumes of one name or one path, or a path that Kubernetes refuses."""
    volumes: list[ExtraVolume | ClusterVolume] = [*shared, *extra]
    used = Counter([*_OWN, *(volume.name for volume in volumes)])
    paths = Counter([*_OWN.values(), *(_real_folder(volume.mount_path) for volume in volumes)])
    places: list[tuple[str, ExtraVolume | ClusterVolume]] = [
        *((f"the cluster's pod.volumes[{volume.name}]", volume) for volume in shared),
        *((f"podTemplate.volumes[{volume.name}]", volume) for volume in extra),
    ]
    return [Notice("VolumeConflict", f"{where} {problem}") for where, volume in places for problem in _volume_problems(volume, used, paths)]


def claim_refusals(profile: TrainingClusterSpec, profile_name: str) -> list[Notice]:
    """Claims of no size, which the API server refuses."""
    sizes = {f"pod.volumes[{v.name}].size": v.size for v in profile.pod.volumes if v.storage_class is not None}
    sizes |= {"storage.workspaceSize": profile.storage.workspace_size, "storage.datasetsSize": profile.storage.datasets_size}
    return [
        Notice("ClaimSizeInvalid", f"{field} of the cluster {profile_name} is {size}: a claim must request more than 0")
        for field, size in sizes.items()
        if number(size) == 0
    ]


def _real_folder(path: str) -> str:
    return normpath("/" + path.lstrip("/"))  # normpath alone keeps a double slash in front


def _volume_problems(volume: ExtraVolume | ClusterVolume, used: Counter[str], paths: Counter[str]) -> list[str]:
    problems = []
    if used[volume.name] > 1:
        problems.append(f"has a name that is taken: give it one that neither the cluster nor Lockstep uses ({', '.join(_OWN)})")
    if paths[_real_folder(volume.mount_path)] > 1:
        problems.append(f"is mounted at {volume.mount_path}, where another volume is: choose another mountPath")
    if ":" in volume.mount_path:
        problems.append(f"is mounted at {volume.mount_path}, which contains ':': Kubernetes allows no such path")
    return problems


def claim_volumes(resolved: Resolved) -> list[dict[str, Any]]:
    """Return the pod's volumes of claims that Lockstep knows by name: the job's own where they are shared, and the cluster's, which pods
    only read.
    """
    claims: dict[str, dict[str, Any]] = {}
    if resolved.storage_mode is StorageMode.SHARED:
        claims[names.WORKSPACE_VOLUME] = {"claimName": resolved.workspace_claim}
        claims[names.DATASETS_VOLUME] = {"claimName": resolved.profile.spec.storage.datasets_claim}
    claims |= {volume.name: {"claimName": volume.claim, "readOnly": True} for volume in resolved.profile.spec.pod.volumes}
    return [{"name": name, "persistentVolumeClaim": claim} for name, claim in claims.items()]


def extra_volumes(resolved: Resolved) -> list[dict[str, Any]]:
    """Return the volumes that the job adds, as a pod has them."""
    volumes = [volume.to_dict() for volume in resolved.job.spec.pod_template.volumes]
    for volume in volumes:
        claim = volume.get("persistentVolumeClaim", {})
        if claim.get("readOnly") is False:
            del claim["readOnly"]  # as the API server stores it: else the pods would look changed for ever
    return [{key: value for key, value in volume.items() if key != "mountPath"} for volume in volumes]


def run_volume(run_name: str) -> dict[str, Any]:
    """The frozen run, of which pods see run.json only."""
    return {"name": names.RUN_VOLUME, "configMap": {"name": run_name, "items": [{"key": names.RUN_KEY, "path": names.RUN_KEY}]}}


def mounts(resolved: Resolved, *, reports: bool) -> list[dict[str, Any]]:
    """Mounts of every volume in the trainer's container."""
    own: list[dict[str, Any]] = []
    for name, path in _OWN.items():
        if name == names.TOKEN_VOLUME and not reports:
            continue
        own.append({"name": name, "mountPath": path} | ({"readOnly": True} if name in _READ_ONLY else {}))
    return own + cluster_mounts(resolved) + [_extra_mount(volume) for volume in resolved.job.spec.pod_template.volumes]


def cluster_mounts(resolved: Resolved) -> list[dict[str, Any]]:
    """Return the mounts that every container of every pod has on this cluster."""
    return [{"name": v.name, "mountPath": v.mount_path, "readOnly": True} for v in resolved.profile.spec.pod.volumes]


def _extra_mount(volume: ExtraVolume) -> dict[str, Any]:
    mount: dict[str, Any] = {"name": volume.name, "mountPath": volume.mount_path}
    if volume.persistent_volume_claim is not None and volume.persistent_volume_claim.read_only:
        mount["readOnly"] = True
    return mount


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim to make when there is none of that name. It has no owner and outlives every job."""

    name: str
    access_mode: str
    size: str
    storage_class: str | None


def cluster_claim(volume: ClusterVolume) -> Claim:
    """Return the claim of a volume that the cluster gives to every pod."""
    return Claim(volume.claim, "ReadOnlyMany", volume.size, volume.storage_class)


def shared_claims(resolved: Resolved) -> list[Claim]:
    """The namespace's claims that this job mounts and that may be made: an existing claim named by the job is not."""
    storage = resolved.profile.spec.storage
    claims = [cluster_claim(volume) for volume in resolved.profile.spec.pod.volumes if volume.storage_class is not None]
    if resolved.storage_mode is StorageMode.SHARED:
        claims.append(Claim(storage.datasets_claim, "ReadWriteMany", storage.datasets_size, storage.class_rwx))
        if resolved.job.spec.storage.workspace_claim_name is None:
            claims.append(Claim(storage.workspace_claim, "ReadWriteMany", storage.workspace_size, storage.class_rwx))
    return sorted({claim.name: claim for claim in claims}.values(), key=lambda claim: claim.name)


def pod_claims(resolved: Resolved) -> list[Claim]:
    """The claims of every single pod, named after the volumes they become (volumeClaimTemplates)."""
    if resolved.storage_mode is StorageMode.SHARED:
        return []
    storage = resolved.profile.spec.storage
    return [
        Claim(names.WORKSPACE_VOLUME, "ReadWriteOnce", storage.workspace_size, storage.class_rwo),
        Claim(names.DATASETS_VOLUME, "ReadWriteOnce", storage.datasets_size, storage.class_rwo),
    ]
