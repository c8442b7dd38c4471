"""Pieces that both a job and a cluster are written with."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from lockstep.api.model import (
    DNS_NAME_PATTERN,
    LABEL_KEY_PATTERN,
    TEXT_PATTERN,
    DnsName,
    EnvName,
    LabelKey,
    LabelValue,
    Model,
    Rule,
    exactly_one,
    utf8_bytes,
)

NCCL_PATTERN = r"^NCCL_[A-Z0-9_]+$"
KEY_PATTERN = r"^[.]?[-_a-zA-Z0-9][-._a-zA-Z0-9]*$"
FIELD_PATTERN = (
    rf"^(metadata[.](name|namespace|uid)|metadata[.](labels|annotations)\['{LABEL_KEY_PATTERN[1:-1]}'\]"
    r"|spec[.](nodeName|serviceAccountName)|status[.](hostIPs?|podIPs?))$"
)
MAY_NAME_PATHS = "text that may name paths on the volumes"


class FabricMode(StrEnum):
    """Network between ranks of different nodes: `Auto` takes RDMA where the cluster has it."""

    AUTO = "Auto"
    RDMA = "RDMA"
    TCP = "TCP"


class PlainVariable(Model):
    """An environment variable whose value stands in the file (so: never a secret)."""

    name: EnvName
    """The variable's name."""
    value: Annotated[str, Field(pattern=TEXT_PATTERN, max_length=8192), MAY_NAME_PATHS] = ""
    """Its value."""


class NcclVariable(Model):
    """An override of NCCL's own environment, for experts."""

    name: Annotated[str, Field(pattern=NCCL_PATTERN, max_length=128)]
    """An NCCL variable, for example NCCL_ALGO."""
    value: Annotated[str, Field(pattern=TEXT_PATTERN, max_length=1024), MAY_NAME_PATHS]
    """Its value."""


def values_fit(most: int, hint: str) -> Rule:
    """The values of the variables in `env` have at most so many bytes in all."""
    return Rule(
        f"!has(self.env) || self.env.map(v, has(v.value) ? size(bytes(v.value)) : 0).sum() <= {most}",
        f"the values of env may have at most {most} bytes in all: {hint}",
        lambda model: utf8_bytes(variable.value for variable in model.env) <= most,
        field="env",
    )


class LocalReference(Model):
    """The name of an object in the job's namespace."""

    name: DnsName
    """The object's name."""


class SecretKey(LocalReference):
    """One key of a Secret in the job's namespace."""

    key: Annotated[str, Field(pattern=KEY_PATTERN, max_length=253)]
    """The key in it."""


class KeyReference(SecretKey):
    """One key of a Secret or ConfigMap in the job's namespace."""

    optional: bool | None = None
    """true: a pod starts without the variable when the object or key is missing."""


class FieldReference(Model):
    """A field of the pod, by the downward API."""

    field_path: Annotated[str, Field(pattern=FIELD_PATTERN, max_length=256)]
    """Path of the field, for example status.podIP."""


class VariableSource(Model):
    """Source of a variable's value. It is resolved by the kubelet in the pod, never by Lockstep."""

    secret_key_ref: KeyReference | None = None
    """One key of a Secret."""
    config_map_key_ref: KeyReference | None = None
    """One key of a ConfigMap."""
    field_ref: FieldReference | None = None

    RULES = (exactly_one("secretKeyRef", "configMapKeyRef", "fieldRef"),)


def is_loaders(name: str) -> bool:
    """Return True if the dynamic loader reads this variable, before a program of Lockstep's can ignore it."""
    return name.startswith("LD_") or name == "GLIBC_TUNABLES"


class Variable(Model):
    """An environment variable of every rank: a value, or where the kubelet finds it."""

    name: EnvName
    """The variable's name."""
    value: Annotated[Annotated[str, Field(pattern=TEXT_PATTERN, max_length=8192)] | None, MAY_NAME_PATHS] = None
    """Its value. Use valueFrom for secrets."""
    value_from: VariableSource | None = None

    RULES = (
        Rule(
            f"!self.name.startsWith('NCCL_') || self.name.matches('{NCCL_PATTERN}')",
            "a name that begins with NCCL_ must be an NCCL variable such as NCCL_ALGO: upper-case letters, digits and '_'",
            lambda v: not v.name.startswith("NCCL_") or re.fullmatch(NCCL_PATTERN, v.name) is not None,
            field="name",
        ),
        Rule(
            cel="!(has(self.value) && has(self.valueFrom))",
            message="may not have both value and valueFrom",
            holds=lambda v: v.value is None or v.value_from is None,
        ),
        Rule(
            cel="!self.name.startsWith('LOCKSTEP_')",
            message="name must not start with LOCKSTEP_: those variables are Lockstep's own",
            holds=lambda v: not v.name.startswith("LOCKSTEP_"),
            field="name",
        ),
        Rule(
            cel="!((self.name.startsWith('LD_') || self.name == 'GLIBC_TUNABLES') && has(self.valueFrom))",
            message=(
                "a variable that the dynamic loader reads (LD_*, GLIBC_TUNABLES) takes a value, not valueFrom: only ranks get it, never the"
                " agent"
            ),
            holds=lambda v: not (is_loaders(v.name) and v.value_from is not None),
        ),
    )


class VariableSet(Model):
    """All keys of a Secret or ConfigMap as variables."""

    secret_ref: LocalReference | None = None
    """A Secret."""
    config_map_ref: LocalReference | None = None
    """A ConfigMap."""

    RULES = (exactly_one("secretRef", "configMapRef"),)


Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]
Annotations = Annotated[dict[LabelKey, Annotated[str, Field(max_length=4096)]], Field(max_length=32)]
NodeName = Annotated[str, Field(pattern=DNS_NAME_PATTERN, max_length=63)]  # it is the value of the label kubernetes.io/hostname
NodeNames = Annotated[list[NodeName], Field(max_length=1024)]
ImagePullSecrets = Annotated[list[LocalReference], Field(max_length=8)]
