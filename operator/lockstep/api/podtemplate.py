"""What a TrainingJob adds to every one of its pods."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from lockstep.api.model import AbsolutePath, DnsLabel, DnsName, LabelKey, LabelValue, Model, Quantity, Rule, list_map
from lockstep.api.shared import Annotations, Labels, LocalReference


class TolerationOperator(StrEnum):
    """Whether the taint's value must be equal, or its key be there."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """What a taint does to pods that don't tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Model):
    """A taint that the pods tolerate, written as in a pod."""

    key: LabelKey | None = None
    """The taint's key; left out: every key."""
    operator: TolerationOperator | None = None
    """Equal, or Exists. Default: Equal."""
    value: LabelValue | None = None
    """The taint's value, when the operator is Equal."""
    effect: TaintEffect | None = None
    """The effect tolerated; left out: every effect."""
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None
    """How long a NoExecute taint is tolerated; left out: for ever."""


class ClaimVolume(Model):
    """A claim of the job's namespace. All pods mount it, so it must be ReadWriteMany or ReadOnlyMany."""

    claim_name: DnsName
    """The claim's name."""
    read_only: bool | None = None
    """true: mounted read-only."""


class SecretVolume(Model):
    """A Secret of the job's namespace, one file a key."""

    secret_name: DnsName
    """The Secret's name."""


class EmptyVolume(Model):
    """A folder that lives as long as its pod."""

    size_limit: Quantity | None = None
    """A pod that writes more is evicted."""


class ConfigMapVolume(LocalReference):
    """A ConfigMap of the job's namespace, one file a key."""


_OWN_PATHS = ("/workspace", "/datasets", "/lockstep", "/dev/shm", "/tmp")  # noqa: S108
_OWN_FOLDERS = ("/etc/lockstep", "/var/run/secrets")


def _one_source(volume: ExtraVolume) -> bool:
    return sum(x is not None for x in (volume.config_map, volume.secret, volume.persistent_volume_claim, volume.empty_dir)) == 1


def _path_is_free(volume: ExtraVolume) -> bool:
    return volume.mount_path not in _OWN_PATHS and not volume.mount_path.startswith(_OWN_FOLDERS)


class ExtraVolume(Model):
    """One more volume of every pod. Kinds that reach into the node (hostPath and the like) are not offered."""

    name: DnsLabel
    """The volume's name in the pod."""
    mount_path: AbsolutePath
    """Where it is mounted."""
    config_map: ConfigMapVolume | None = None
    secret: SecretVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    empty_dir: EmptyVolume | None = None

    RULES = (
        Rule(
            cel="[has(self.configMap), has(self.secret), has(self.persistentVolumeClaim), has(self.emptyDir)].filter(x, x).size() == 1",
            message="must have exactly one of configMap, secret, persistentVolumeClaim and emptyDir",
            holds=_one_source,
        ),
        Rule(
            cel=f"!(self.mountPath in {list(_OWN_PATHS)}) && !{list(_OWN_FOLDERS)}.exists(f, self.mountPath.startsWith(f))",
            message="mountPath must not be one of Lockstep's own: /workspace, /datasets, /lockstep, /dev/shm, /tmp,"
            " and what begins with /etc/lockstep or /var/run/secrets",
            holds=_path_is_free,
            field="mountPath",
        ),
    )


class PodTemplate(Model):
    """What is added to every pod of the job."""

    labels: Labels = {}
    """Labels of the pods."""
    annotations: Annotations = {}
    """Annotations of the pods."""
    node_selector: Labels = {}
    """Labels that a node must have, besides those that the profile asks for."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    """Taints that the pods tolerate."""
    priority_class_name: DnsName | None = None
    """The pods' PriorityClass."""
    volumes: Annotated[list[ExtraVolume], Field(max_length=16, json_schema_extra=list_map())] = []
    """More volumes of every pod."""

    RULES = (
        Rule(
            cel="!has(self.labels) || self.labels.all(k, !k.startsWith('lockstep.dev/') && !k.startsWith('app.kubernetes.io/'))",
            message="labels must not use the prefixes lockstep.dev/ and app.kubernetes.io/: Lockstep sets those",
            holds=lambda p: not any(k.startswith(("lockstep.dev/", "app.kubernetes.io/")) for k in p.labels),
            field="labels",
        ),
    )
