"""Additions of a TrainingJob to every one of its pods."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from lockstep.api.model import (
    AbsolutePath,
    DnsLabel,
    DnsName,
    LabelKey,
    LabelValue,
    Model,
    Rule,
    exactly_one,
    list_map,
    utf8_bytes,
)
from lockstep.api.shared import Annotations, Labels, LocalReference


class TolerationOperator(StrEnum):
    """Comparison with the taint: its value must be equal, or its key be there."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """Effect of a taint on pods that don't tolerate it."""

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
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seconds that a NoExecute taint is tolerated; left out: forever."""

    RULES = (  # what the API server would refuse in a pod
        Rule(
            cel="has(self.key) || (has(self.operator) && self.operator == 'Exists')",
            message="key must be set unless operator is Exists",
            holds=lambda t: t.key is not None or t.operator is TolerationOperator.EXISTS,
            field="key",
        ),
        Rule(
            cel="!has(self.value) || self.value == '' || !has(self.operator) || self.operator != 'Exists'",
            message="value may not be set when operator is Exists",
            holds=lambda t: not (t.value and t.operator is TolerationOperator.EXISTS),
            field="value",
        ),
        Rule(
            cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            message="tolerationSeconds may only be set when effect is NoExecute",
            holds=lambda t: t.toleration_seconds is None or t.effect is TaintEffect.NO_EXECUTE,
            field="tolerationSeconds",
        ),
    )


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


class ConfigMapVolume(LocalReference):
    """A ConfigMap of the job's namespace, one file a key."""


_OWN_PATHS = ("/workspace", "/datasets", "/lockstep", "/dev/shm", "/tmp")  # noqa: S108
_OWN_FOLDERS = ("/etc/lockstep", "/var/run/secrets")


class ExtraVolume(Model):
    """One more volume of every pod. Kinds that reach into the node (hostPath and the like) are not offered."""

    name: DnsLabel
    """The volume's name in the pod."""
    mount_path: AbsolutePath
    """Path at which it is mounted."""
    config_map: ConfigMapVolume | None = None
    secret: SecretVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    empty_dir: EmptyVolume | None = None

    RULES = (
        exactly_one("configMap", "secret", "persistentVolumeClaim", "emptyDir"),
        Rule(
            cel=f"!(self.mountPath in {list(_OWN_PATHS)}) && !{list(_OWN_FOLDERS)}.exists(f, self.mountPath.startsWith(f))",
            message=(
                "mountPath must not be one of Lockstep's own: /workspace, /datasets, /lockstep, /dev/shm, /tmp,"
                " and what begins with /etc/lockstep or /var/run/secrets"
            ),
            holds=lambda v: v.mount_path not in _OWN_PATHS and not v.mount_path.startswith(_OWN_FOLDERS),
            field="mountPath",
        ),
    )


ANNOTATIONS_BYTES_MAX = 250_000
"""The API server takes 262144 of an object, Lockstep's own among them."""
GRACE_SECONDS = 180
"""Seconds that a pod may take to stop when the job doesn't say."""


class PodTemplate(Model):
    """Additions to every pod of the job."""

    labels: Labels = {}
    """Labels of the pods."""
    annotations: Annotations = {}
    """Annotations of the pods, keys and values at most 250000 bytes in all."""
    node_selector: Labels = {}
    """Labels that a node must have, besides those that the cluster asks for."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    """Taints that the pods tolerate."""
    priority_class_name: DnsName | None = None
    """The pods' PriorityClass."""
    scheduler_name: DnsName | None = None
    """The scheduler that places the pods. Default: the cluster's."""
    termination_grace_period_seconds: Annotated[int, Field(ge=60, le=7200)] | None = None
    """Seconds that a pod that is asked to stop may take before it is killed. Its ranks have 30 seconds less to save; the rest is for the
    last report. Default: 180.
    """
    volumes: Annotated[list[ExtraVolume], Field(max_length=16, json_schema_extra=list_map())] = []
    """More volumes of every pod."""

    @property
    def grace_seconds(self) -> int:
        return self.termination_grace_period_seconds or GRACE_SECONDS

    RULES = (
        Rule(
            cel="!has(self.labels) || self.labels.all(k, !k.startsWith('lockstep.dev/') && !k.startsWith('app.kubernetes.io/'))",
            message="labels must not use the prefixes lockstep.dev/ and app.kubernetes.io/: Lockstep sets those",
            holds=lambda p: not any(k.startswith(("lockstep.dev/", "app.kubernetes.io/")) for k in p.labels),
            field="labels",
        ),
        Rule(
            "!has(self.annotations) || self.annotations.map(k, size(bytes(k)) + size(bytes(self.annotations[k]))).sum() <="
            f" {ANNOTATIONS_BYTES_MAX}",
            f"annotations may have at most {ANNOTATIONS_BYTES_MAX} bytes in all: put them into a ConfigMap or a Secret that volumes names",
            lambda p: utf8_bytes((*p.annotations, *p.annotations.values())) <= ANNOTATIONS_BYTES_MAX,
            field="annotations",
        ),
    )
