"""Rights of a job's pods: as few as the transport allows."""

from __future__ import annotations

from lockstep.api.cluster import Platform, TrainingClusterSpec
from lockstep.api.objects import Object, restricted_context
from lockstep.plan.render.fabric import Transport

USER_ID = 1000  # on plain Kubernetes; OpenShift gives every namespace a range of its own and the SCC chooses


def locks_memory_as_root(profile: TrainingClusterSpec, transport: Transport) -> bool:
    """True if pods need UID 0 with CAP_IPC_LOCK: a NIC reads memory that the process must be able to lock.

    A non-root process loses the capability when it is executed, so adding it there does nothing. A cluster with RDMA has either
    ipcLock or memlock Unlimited, never both: then the runtime has lifted the limit, and pods stay non-root.
    """
    return transport is Transport.RDMA and profile.security.ipc_lock


def volume_group(profile: TrainingClusterSpec) -> int | None:
    """Return the group that reads and writes a pod's volumes, whatever user the pod has.

    None on OpenShift, where the SCC states it, the namespace's, for pods of either transport alike.
    """
    return USER_ID if profile.platform is Platform.KUBERNETES else None


def trainer_context(profile: TrainingClusterSpec, transport: Transport) -> Object:
    """Return the securityContext of a trainer: `restricted`, or UID 0 with no capability but IPC_LOCK where a NIC needs locked memory.

    Such a root may write no file of another user's but by its group, so its own group is that of all other pods: volumes that pass no
    group on, such as NFS, then have the files of both alike. On OpenShift it is the image's, 0, for both.
    """
    context = restricted_context(volume_group(profile))
    if not locks_memory_as_root(profile, transport):
        return context
    return context | {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}, "runAsNonRoot": False, "runAsUser": 0}


def agent_context(profile: TrainingClusterSpec, transport: Transport = Transport.TCP) -> Object:
    """Return the securityContext of Lockstep's own programs, which write to mounted volumes alone: `restricted`, with a user beside a
    trainer of UID 0, since the SCC that admits that (RunAsAny) assigns none, and the image's may be root.
    """
    user = {"runAsUser": USER_ID} if locks_memory_as_root(profile, transport) else {}
    return restricted_context(volume_group(profile)) | {"readOnlyRootFilesystem": True} | user
