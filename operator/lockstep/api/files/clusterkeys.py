"""Every key of a cluster file and the field it becomes: the one table between snake_case and camelCase."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class Kind(Enum):
    """How a value may be written."""

    TEXT = auto()  # numbers too: 32 and "32" are the same quantity
    INTEGER = auto()  # "3" too
    SWITCH = auto()  # true or false, "true" too
    NAMES = auto()  # a list, or names divided by commas
    LABELS = auto()  # a mapping of text to text
    CHOICE = auto()  # one of `choices`


@dataclass(frozen=True)
class Key:
    """One key. `[]` stands after a list of mappings; `model` is inside of the TrainingCluster's spec, or, for cluster.*, the section itself."""

    file: str
    model: str
    kind: Kind = Kind.TEXT
    choices: Mapping[str, str] = field(default_factory=dict)


API_PATTERN = r"^(https?://)?[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(:[0-9]{1,5})?/?$"

STORAGE_MODES = {"rwx": "Shared", "volumeClaimTemplates": "PerPod"}
PLATFORMS = {"openshift": "OpenShift", "kubernetes": "Kubernetes"}
MEMLOCK = {"capability": "Capability", "unlimited": "Unlimited"}
OPERATORS = {word: word for word in ("Exists", "Equal")}
EFFECTS = {word: word for word in ("NoSchedule", "PreferNoSchedule", "NoExecute")}
DEBUG = {level: level for level in ("WARN", "INFO", "TRACE", "VERSION")}

# What the command line reads; not part of the cluster.
SECTION_KEYS = (
    Key("cluster.name", "name"),
    Key("cluster.api", "api"),
    Key("cluster.namespace", "namespace"),
    Key("cluster.description", "description"),
)

PROFILE_KEYS = (
    Key("cluster.platform", "platform", Kind.CHOICE, PLATFORMS),
    Key("nodes.gpu_nodes", "nodes.gpuNodes", Kind.NAMES),
    Key("nodes.selector", "nodes.selector", Kind.LABELS),
    Key("nodes.rack_label", "nodes.rackLabel"),
    Key("storage.mode", "storage.mode", Kind.CHOICE, STORAGE_MODES),
    Key("storage.class_rwx", "storage.classRwx"),
    Key("storage.class_rwo", "storage.classRwo"),
    Key("storage.workspace_size", "storage.workspaceSize"),
    Key("storage.datasets_size", "storage.datasetsSize"),
    Key("storage.workspace_claim", "storage.workspaceClaim"),
    Key("storage.datasets_claim", "storage.datasetsClaim"),
    Key("network.rdma.enabled", "network.rdma.enabled", Kind.SWITCH),
    Key("network.rdma.devices", "network.rdma.devices", Kind.NAMES),
    Key("network.rdma.interfaces", "network.rdma.interfaces", Kind.NAMES),
    Key("network.rdma.rate", "network.rdma.rate", Kind.INTEGER),
    Key("network.rdma.gid_index", "network.rdma.gidIndex", Kind.INTEGER),
    Key("network.rdma.gdr_level", "network.rdma.gdrLevel"),
    Key("network.rdma.cross_nic", "network.rdma.crossNic", Kind.INTEGER),
    Key("network.rdma.ib_timeout", "network.rdma.ibTimeout", Kind.INTEGER),
    Key("network.rdma.min_nchannels", "network.rdma.minNchannels", Kind.INTEGER),
    Key("network.rdma.rails[].network", "network.rdma.rails[].network"),
    Key("network.rdma.rails[].resource", "network.rdma.rails[].resource"),
    Key("network.rdma.memlock", "network.rdma.memlock", Kind.CHOICE, MEMLOCK),
    Key("network.rdma.dmabuf", "network.rdma.dmabuf", Kind.SWITCH),
    Key("network.tcp.interface_exclude", "network.tcp.interfaceExclude"),
    Key("network.tcp.p2p_level", "network.tcp.p2pLevel"),
    Key("network.mtu", "network.mtu", Kind.INTEGER),
    Key("network.minimum_busbw", "network.minimumBusbw"),
    Key("security.service_account", "security.serviceAccount"),
    Key("security.requires_privileged_scc", "security.requiresPrivilegedScc", Kind.SWITCH),
    Key("security.ipc_lock", "security.ipcLock", Kind.SWITCH),
    Key("gpus.per_node", "gpus.perNode", Kind.INTEGER),
    Key("gpus.type", "gpus.type"),
    Key("gpus.default_nodes", "gpus.defaultNodes", Kind.INTEGER),
    Key("resources.requests.cpu", "resources.requests.cpu"),
    Key("resources.requests.memory", "resources.requests.memory"),
    Key("resources.limits.cpu", "resources.limits.cpu"),
    Key("resources.limits.memory", "resources.limits.memory"),
    Key("nccl.debug", "nccl.debug", Kind.CHOICE, DEBUG),
    Key("nccl.env[].name", "nccl.env[].name"),
    Key("nccl.env[].value", "nccl.env[].value"),
    Key("image", "image"),
    Key("shm_size", "shmSize"),
    Key("pod.volumes[].name", "pod.volumes[].name"),
    Key("pod.volumes[].claim", "pod.volumes[].claim"),
    Key("pod.volumes[].mount_path", "pod.volumes[].mountPath"),
    Key("pod.volumes[].class", "pod.volumes[].storageClass"),
    Key("pod.volumes[].size", "pod.volumes[].size"),
    Key("pod.env[].name", "pod.env[].name"),
    Key("pod.env[].value", "pod.env[].value"),
    Key("pod.tolerations[].key", "pod.tolerations[].key"),
    Key("pod.tolerations[].operator", "pod.tolerations[].operator", Kind.CHOICE, OPERATORS),
    Key("pod.tolerations[].value", "pod.tolerations[].value"),
    Key("pod.tolerations[].effect", "pod.tolerations[].effect", Kind.CHOICE, EFFECTS),
    Key("pod.tolerations[].toleration_seconds", "pod.tolerations[].tolerationSeconds", Kind.INTEGER),
    Key("pod.image_pull_secrets", "pod.imagePullSecrets", Kind.NAMES),
    Key("pod.runtime_class", "pod.runtimeClassName"),
    Key("notes", "notes"),
)

# What `lockstep cluster calibrate` writes and the command line reads; not part of the cluster.
CALIBRATION_KEYS = (
    Key("calibration[].transport", "calibration[].transport"),
    Key("calibration[].nodes", "calibration[].nodes", Kind.INTEGER),
    Key("calibration[].ranks", "calibration[].ranks", Kind.INTEGER),
    Key("calibration[].day", "calibration[].day"),
    Key("calibration[].sweep[].bytes", "calibration[].sweep[].bytes", Kind.INTEGER),
    Key("calibration[].sweep[].busbw", "calibration[].sweep[].busbw"),
)

KEYS = {key.file: key for key in SECTION_KEYS + PROFILE_KEYS + CALIBRATION_KEYS}
_FILE_PATHS = {key.model: key.file for key in PROFILE_KEYS}
_WORDS = {
    camel: snake
    for key in PROFILE_KEYS
    for camel, snake in [*zip(key.model.split("."), key.file.split("."), strict=False), *((c, f) for f, c in key.choices.items())]
    if camel != snake and key.file != "cluster.platform"
}


def below(path: str) -> dict[str, str]:
    """The keys that may stand inside of section `path` ("" is the file): name → path; lists of mappings end in []."""
    found: dict[str, str] = {}
    for key in KEYS:
        if key.startswith(f"{path}." if path else ""):
            segment = key.removeprefix(f"{path}." if path else "").split(".")[0]
            found[segment.removesuffix("[]")] = f"{path}.{segment}" if path else segment
    return found


def file_path(location: tuple[str | int, ...]) -> str:
    """Where a field of the cluster's spec stands in the file: ("pod", "volumes", 0, "storageClass") → pod.volumes[0].class."""
    location = tuple(part for part in location if part != "[key]")  # pydantic's mark for "the key itself"
    model = ".".join("[]" if isinstance(part, int) else part for part in location).replace(".[]", "[]")
    known = _FILE_PATHS.get(model.removesuffix("[]"))
    written = known + "[]" * model.endswith("[]") if known else ".".join(_WORDS.get(part, part) for part in model.split("."))
    for number in (part for part in location if isinstance(part, int)):
        written = written.replace("[]", f"[{number}]", 1)
    return written


def in_file_words(message: str) -> str:
    """A message about the cluster in the words of the file: gpuNodes → gpu_nodes, PerPod → volumeClaimTemplates."""
    return re.sub(r"[A-Za-z][A-Za-z0-9]*", lambda word: _WORDS.get(word[0], word[0]), message)
