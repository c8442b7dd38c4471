"""Words of advice by the place that nodes run in: what helps in a pod means nothing on a machine without Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_gang.contract.run import Run


@dataclass(frozen=True)
class PlaceWords:
    """Advice of one place; the names say what is wrong there."""

    names: str
    peers: str
    dns: str
    blocked: str
    """Reason why a connection to another node can't be made."""
    name_service: str
    """Subject of "doesn't know lab1", "doesn't answer"."""
    hung: str
    shared: str
    """A folder that is meant to be shared isn't."""
    own: str
    """A folder that is meant to be a node's own isn't."""
    shared_memory: str
    more_shared_memory: str
    own_disk: str
    """Advice for a full disk of the node's own."""
    host_memory: str
    memory_limit: str
    gpus: str
    locked_memory: str
    more_locked_memory: str
    hcas: str
    hca_count: str
    hca_unusable: str
    rdma: str
    mtu: str
    python: str
    libraries: str
    trainer: str
    """Advice: where ranks get the trainer of this version."""
    torch: str
    """Beginning of advice: how to get torch."""
    torch_build: str
    software: str
    """Object of "look at": the software that ranks run with."""
    more_processes: str
    compiler: str
    home: str


IN_PODS = PlaceWords(
    names="look at the cluster's DNS and the job's headless Service",
    peers="pods of one job must reach each other on all ports: look at network policies and firewalls",
    dns="is the cluster's DNS there?",
    blocked="a NetworkPolicy or the network blocks it",
    name_service="the cluster's DNS",
    hung="look at its agent's log; if its machine hangs, delete the pod",
    shared="use a ReadWriteMany claim that all nodes mount, or set storage.mode to PerPod",
    own="give every pod a volume of its own, or set storage.mode to Shared",
    shared_memory="raise the pods' memory limit or the cluster's shm_size: NCCL and data loaders end by SIGBUS",
    more_shared_memory="raise the cluster's shm_size, or use fewer workers",
    own_disk="it is the Node's own disk: make room there, or set HOME, TMPDIR and the like to a folder of the volume in spec.env",
    host_memory="raise the host memory (spec.resources.memory, or without it resources.limits.memory of the cluster), or load less at once",
    memory_limit="its container reached its limit of",
    gpus="look at nvidia-smi and the device plugin there, or lower gpusPerNode",
    locked_memory=(
        "set security.ipc_lock in the cluster file and grant it, or lift the runtime's memlock limit: a NIC can't register memory"
    ),
    more_locked_memory="RDMA needs locked memory: set security.ipc_lock, or memlock: unlimited, in the cluster file",
    hcas="correct network.rdma.devices in the cluster file, or find out why the device plugin gave the pod others",
    hca_count="look at network.rdma.rails and the device plugin on that node",
    hca_unusable="the pod needs the rail's resource (network.rdma.rails): without it NCCL leaves the NIC out",
    rdma="state network.rdma.enabled: true, with its rails, in the cluster file",
    mtu="set it in the network attachment: one that is too small costs most of the speed",
    python="use one image on all nodes",
    libraries="use one image on all nodes, and install nothing in pods",
    trainer=(
        "name the image that lockstep build trainer makes in spec.image or in the cluster file's image, or neither: then it is"
        " lockstep-trainer from the operator's registry"
    ),
    torch="install torch in the image",
    torch_build="use an image whose torch is built for that GPU, or nodes with other GPUs",
    software="the job's image",
    more_processes="start fewer workers and threads, or raise the pod's limit (podPidsLimit in the configuration of the node's kubelet)",
    compiler="the image has no compiler",
    home="the pod's user has no home to write to: set HOME (or HF_HOME and the like) to a folder of the volume in spec.env",
)
ON_HOSTS = PlaceWords(
    names="state that host's address as a number in the cluster file, or look at DNS and /etc/hosts there",
    peers=(
        "hosts of one job must reach each other on all ports: look at the firewall of the host that can't be reached (ufw, firewalld or"
        " nft)"
    ),
    dns="does DNS answer on that host?",
    blocked="a firewall or the network blocks it",
    name_service="DNS",
    hung="look at its agent's log; if the host hangs, restart it",
    shared="mount one file system at the same path on all hosts, or set storage.mode to PerPod",
    own="give every host a folder of its own, or set storage.mode to Shared",
    shared_memory="make /dev/shm larger on that host (mount -o remount,size=…): NCCL and data loaders end by SIGBUS",
    more_shared_memory="make /dev/shm larger on that host, or use fewer workers",
    own_disk="make room there, or set HOME, TMPDIR and the like to a folder on another disk in spec.env",
    host_memory="load less at once, use a host with more memory, or raise spec.resources.memory where it is stated",
    memory_limit="its group of processes (cgroup) reached its limit of",
    gpus="look at nvidia-smi there, or lower gpusPerNode",
    locked_memory="raise memlock of your user on that host (/etc/security/limits.conf): a NIC can't register memory",
    more_locked_memory="RDMA needs locked memory: raise memlock of your user on that host (/etc/security/limits.conf)",
    hcas="correct network.rdma.devices in the cluster file, or look at ibv_devices on that host",
    hca_count="look at ibv_devices on that host",
    hca_unusable="load the module ib_uverbs on that host: without it NCCL leaves the NIC out",
    rdma="state network.rdma.enabled: true in the cluster file",
    mtu="set it on that interface: one that is too small costs most of the speed",
    python="use one environment on all hosts",
    libraries="use one environment on all hosts, and install nothing else in it",
    trainer="lockstep hosts setup installs it; or correct python in the file of hosts",
    torch="install torch in the environment",
    torch_build="use an environment whose torch is built for that GPU, or hosts with other GPUs",
    software="the job's environment there",
    more_processes="start fewer workers and threads, or raise your user's limit there (ulimit -u, or TasksMax of its unit)",
    compiler="the host has no compiler",
    home="your user has no home there to write to: set HOME (or HF_HOME and the like) to a folder that exists in spec.env",
)


def words_of(run: Run) -> PlaceWords:
    return IN_PODS if run.host is None else ON_HOSTS
