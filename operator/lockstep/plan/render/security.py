"""Under what rights a job's pods run: as few as the transport allows."""

from __future__ import annotations

from typing import Any

from lockstep.api.cluster import Platform, TrainingClusterSpec
from lockstep.plan.render.fabric import Transport

USER_ID = 1000  # on plain Kubernetes; OpenShift gives every namespace a range of its own and the SCC chooses


def locks_memory_as_root(profile: TrainingClusterSpec, transport: Transport) -> bool:
    """Whether pods need UID 0 with CAP_IPC_LOCK: a NIC reads memory that the process must be able to lock.

    A non-root process loses the capability when it is executed, so adding it there does nothing. A cluster with RDMA has either
    ipcLock or memlock Unlimited, never both: then the runtime has lifted the limit, and pods stay non-root.
    """
    return transport is Transport.RDMA and profile.security.ipc_lock


def pod_security_context(profile: TrainingClusterSpec) -> dict[str, Any]:
    """Of the whole pod: the default seccomp cluster, and the group that reads and writes its volumes, whatever user the pod has.

    On OpenShift the SCC states the group, the namespace's, for pods of either transport alike.
    """
    # OnRootMismatch: else every pod start walks the whole volume, however many checkpoints lie there.
    context: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}, "fsGroupChangePolicy": "OnRootMismatch"}
    return context | ({"fsGroup": USER_ID} if profile.platform is Platform.KUBERNETES else {})


def container_security_context(profile: TrainingClusterSpec) -> dict[str, Any]:
    """What Pod Security `restricted` asks for."""
    context: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True}
    if profile.platform is Platform.KUBERNETES:
        context |= {"runAsUser": USER_ID, "runAsGroup": USER_ID}
    return context


def agent_security_context(profile: TrainingClusterSpec) -> dict[str, Any]:
    """Likewise, for Lockstep's own programs: they write to mounted volumes alone. The trainer's container runs anybody's, which write where they like."""
    return container_security_context(profile) | {"readOnlyRootFilesystem": True}


def trainer_security_context(profile: TrainingClusterSpec, transport: Transport) -> dict[str, Any]:
    """`restricted`, or UID 0 with no capability but IPC_LOCK where a NIC needs locked memory.

    Such a root may write no file of another user's but by its group, so its own group is that of all other pods: volumes that pass no
    group on, such as NFS, then have the files of both alike. On OpenShift it is the image's, 0, for both.
    """
    if not locks_memory_as_root(profile, transport):
        return container_security_context(profile)
    group = {"runAsGroup": USER_ID} if profile.platform is Platform.KUBERNETES else {}
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
        "runAsNonRoot": False,
        "runAsUser": 0,
        **group,
    }
