"""Rights of a job's pods: as few as the transport allows."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Rights:
    """User, group and capabilities of a container's processes. None: the image's or the SCC's."""

    user: int | None
    group: int | None
    non_root: bool = True
    capabilities: tuple[str, ...] = ()


def restricted(profile: TrainingClusterSpec) -> Rights:
    """Return the rights that Pod Security `restricted` asks for."""
    user = USER_ID if profile.platform is Platform.KUBERNETES else None
    return Rights(user, user)


def trainer_rights(profile: TrainingClusterSpec, transport: Transport) -> Rights:
    """Return `restricted`, or UID 0 with no capability but IPC_LOCK where a NIC needs locked memory.

    Such a root may write no file of another user's but by its group, so its own group is that of all other pods: volumes that pass no
    group on, such as NFS, then have the files of both alike. On OpenShift it is the image's, 0, for both.
    """
    rights = restricted(profile)
    return replace(rights, user=0, non_root=False, capabilities=("IPC_LOCK",)) if locks_memory_as_root(profile, transport) else rights


def agent_rights(profile: TrainingClusterSpec, transport: Transport) -> Rights:
    """Return `restricted`, with a user beside a trainer of UID 0: the SCC that admits that (RunAsAny) assigns none, and the image's may be
    root.
    """
    rights = restricted(profile)
    return replace(rights, user=USER_ID) if locks_memory_as_root(profile, transport) else rights


def volume_group(profile: TrainingClusterSpec) -> int | None:
    """Return the group that reads and writes a pod's volumes, whatever user the pod has.

    None on OpenShift, where the SCC states it, the namespace's, for pods of either transport alike.
    """
    return restricted(profile).group


def agent_security_context(profile: TrainingClusterSpec) -> Object:
    """Return the securityContext of a pod's container that runs Lockstep's own programs, as pod.yaml.j2 has it: for pods that are no
    job's.
    """
    return restricted_context(restricted(profile).user) | {"readOnlyRootFilesystem": True}
