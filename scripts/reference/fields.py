"""The reference pages of both kinds, generated from the schemas that the CRDs hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.crd import JOB_NAME_RULE
from lockstep.api.files.clusterkeys import (
    CALIBRATION_KEYS,
    CLUSTER,
    DEFAULTS_KEYS,
    HOST_KEYS,
    HOSTS_PLATFORM,
    HOSTS_PROFILE_KEYS,
    HOSTS_SECTION_KEYS,
    KEYS,
    MEANINGLESS,
    ON_HOSTS,
    PROFILE_KEYS,
    SECTION_KEYS,
    Calibrations,
    ClusterSection,
    Key,
    count_or_names,
    integer,
    names,
    switch,
)
from lockstep.api.files.patterns import PATTERN_WORDS
from lockstep.api.hosts import Host, HostsCluster, HostsSection
from lockstep.api.job import TrainingJobSpec
from lockstep.api.schema import Schema, structural_schema
from lockstep.api.status import TrainingJobStatus
from lockstep_spec.choices import StorageMode

JOB_INTRODUCTION = f"""# TrainingJob

Generated from the models in `operator/lockstep/api`; `kubectl explain tj.spec` shows the same. Commented examples are in
`manifests/samples/`, and `lockstep validate -f job.yaml --cluster NAME` checks a file against this page and a cluster.

`apiVersion: lockstep.dev/v1alpha1`, `kind: TrainingJob`, short name `tj`, namespaced.
{JOB_NAME_RULE.message}.
`kubectl scale` changes `spec.nodes`.
"""

CLUSTER_INTRODUCTION = """# The cluster file and TrainingCluster

Generated from the models in `operator/lockstep/api`. A cluster is written down once, in `clusters/NAME.yaml`, with the keys below
(`clusters/template.yaml` has them all). `lockstep deploy NAME` makes a TrainingCluster of it (`lockstep.dev/v1alpha1`, short name
`tc`, cluster-scoped), whose fields are the second column; `cluster.name`, `.api`, `.namespace` and `.description`, `calibration` and
`pairs`, which `lockstep cluster calibrate` writes, are read by the command line only. A list of names may also be written with
commas (`"net1,net2"`), a number in quotes. An unknown key, a key that is there twice and an impossible combination are errors.
Machines that you reach over ssh, without Kubernetes, have [a file of their own](hosts.md).
"""


HOSTS_INTRODUCTION = """# The cluster file of hosts

Generated from the models in `operator/lockstep/api`. A cluster file with `platform: hosts` lists machines that you reach over ssh,
without Kubernetes. `clusters/template-hosts.yaml` has every key; `lockstep init hosts NAME` writes one, with
`--from FILE` of a hostfile, an `~/.ssh/config` or a `config.yaml`. The order of `hosts` is that of a job's
nodes. An unknown key, a key that is there twice and a key that means nothing on hosts are errors.

`defaults` takes these keys of `hosts[]`, and they count for every host that doesn't have them: {defaults}.
"""


def training_job_page() -> str:
    """docs/reference/trainingjob.md."""
    parts = [
        JOB_INTRODUCTION,
        *_sections("spec", structural_schema(TrainingJobSpec)),
        *_sections("status", structural_schema(TrainingJobStatus)),
    ]
    return "\n".join(parts)


def cluster_file_page() -> str:
    """docs/reference/trainingcluster.md."""
    spec, section = structural_schema(TrainingClusterSpec), structural_schema(ClusterSection)
    rows = [_key_row(key, _at(section, key.model), "") for key in SECTION_KEYS]
    rows += [_key_row(key, _at(spec, key.model), f"spec.{key.model}") for key in PROFILE_KEYS]
    measured = structural_schema(Calibrations)
    rows += [_key_row(key, _at(measured, key.model), "") for key in CALIBRATION_KEYS]
    order = {key: number for number, key in enumerate(KEYS)}
    rows.sort(key=lambda row: (row[0].split(".")[0] != "`cluster", order[row[0].strip("`")]))
    head = ("key", "field of TrainingCluster", "type", "default", "valid", "description")
    rules = "\n".join(f"- {CLUSTER.in_file_words(message)}" for message in _all_rules(spec))
    mode = _at(spec, "network.mode")
    extra = f"One field has no key: `spec.network.mode` ({_valid(mode)}; default {_code(mode['default'])}). {mode['description']}"
    return "\n".join([CLUSTER_INTRODUCTION, _table(head, rows), "## Rules\n", rules, "", extra, ""])


def hosts_file_page() -> str:
    """docs/reference/hosts.md."""
    sections = (
        (HOSTS_SECTION_KEYS, HostsSection), (HOST_KEYS, HostsCluster),
        (HOSTS_PROFILE_KEYS, TrainingClusterSpec), (CALIBRATION_KEYS, Calibrations),
    )  # fmt: skip
    schemas = [(keys, structural_schema(model)) for keys, model in sections]
    platform = {"type": "string", "needed": True, "description": "Makes the file one of hosts."}
    fields = {key.file: platform if key is HOSTS_PLATFORM else _at(schema, key.model) for keys, schema in schemas for key in keys}
    fields["storage.mode"] |= {"default": StorageMode.PER_POD.value}
    for key, description in _ON_HOSTS.items():
        fields[key] |= {"description": description}
    rows = [
        (row[0], *row[2:]) for row in (_key_row(key, fields[key.file], "") for key in ON_HOSTS.keys.values() if key not in DEFAULTS_KEYS)
    ]
    refused = "\n".join(f"- `{key}`: {reason}" for key, reason in MEANINGLESS.items())
    rules = "\n".join(f"- {ON_HOSTS.in_file_words(rule.message)}" for model in (HostsCluster, Host) for rule in model.RULES)
    defaults = ", ".join(f"`{key.model}`" for key in DEFAULTS_KEYS)
    table = _table(("key", "type", "default", "valid", "description"), rows)
    return "\n".join(
        [
            HOSTS_INTRODUCTION.format(defaults=defaults),
            table,
            "## Rules\n",
            rules,
            "",
            "## Keys of other cluster files that mean nothing here\n",
            refused,
            "",
        ]
    )


_ON_HOSTS = {
    "storage.mode": "volumeClaimTemplates: each host has folders of its own. rwx: all hosts see one file system; a start checks that.",
    "network.rdma.enabled": "true: hosts have RDMA NICs, and fabric.mode Auto takes them.",
    "network.rdma.interfaces": "NCCL_SOCKET_IFNAME while RDMA is used.",
    "network.mtu": "MTU that the interfaces must have; given to ranks as LOCKSTEP_RAIL_MTU.",
    "nccl.debug": (
        "Amount of NCCL's log that is shown in the job's. Ranks log INFO to a file that Lockstep reads; its warnings are always shown."
    ),
    "notes": "Free text for people.",
    "calibration[].transport": "Transport that was measured: RDMA or TCP.",
}
"""Descriptions of keys whose own speak of pods."""


def _sections(path: str, schema: Schema) -> Iterator[str]:
    """A heading, a table and the rules for an object, then the same for every object inside it."""
    rows: list[tuple[str, ...]] = []
    inner: list[tuple[str, Schema]] = []
    for name, field in schema["properties"].items():
        nested = field.get("items", field)
        place = f"{path}.{name}" + ("[]" if "items" in field else "")
        default = _code(field["default"]) if "default" in field and "properties" not in field else ""
        required = "**required**" if name in schema.get("required", ()) else default
        rows.append((f"`{name}`", _type(field), required, _valid(field), field.get("description", "")))
        if "properties" in nested:
            inner.append((place, nested))
    rules = "".join(f"- {rule['message']}\n" for rule in schema.get("x-kubernetes-validations", ()))
    yield f"## {path}\n\n{schema.get('description', '')}\n"
    yield _table(("field", "type", "default", "valid", "description"), rows)
    if rules:
        yield f"Rules:\n\n{rules}"
    for place, nested in inner:
        yield from _sections(place, nested)


def _at(schema: Schema, path: str) -> Schema:
    """The schema of the field at a path of the model; a required one carries "needed"."""
    for part in path.split("."):
        holder: Schema = schema.get("items", schema)
        name = part.removesuffix("[]")
        schema = holder["properties"][name] | ({"needed": True} if name in holder.get("required", ()) else {})
    return schema


def _key_row(key: Key, field: Schema, model: str) -> tuple[str, ...]:
    default = {value: name for name, value in key.choices.items()}.get(field.get("default", ""), field.get("default"))
    needed = "**required**" if field.get("needed") else _code(default) if default is not None else ""
    valid = ", ".join(f"`{choice}`" for choice in key.choices) if key.choices else _valid(field)
    return (
        f"`{key.file}`",
        f"`{model}`" if model else "",
        _KINDS.get(key.read) or _type(field),
        needed,
        valid,
        CLUSTER.in_file_words(field["description"]),
    )


_KINDS: dict[Any, str] = {
    names: "list of text",
    switch: "true or false",
    integer: "whole number",
    count_or_names: "whole number, or list of text",
}


def _type(field: Schema) -> str:
    if "not" in field:
        return "number"
    if field["type"] == "array":
        return f"list of {'objects' if 'properties' in field['items'] else 'text'}"
    if field["type"] == "object":
        return "object" if "properties" in field else "mapping"
    return {"string": "text", "integer": "whole number", "boolean": "true or false"}[field["type"]]


def _valid(field: Schema) -> str:
    """Valid values in words."""
    inner: Schema = field.get("items") or field.get("additionalProperties") or {}
    phrases = [", ".join(f"`{value}`" for value in field.get("enum", ()))]
    phrases += [PATTERN_WORDS[one["pattern"]] for one in (field, inner) if "pattern" in one]
    if "not" in field:  # a number, whose words say it all
        return "; ".join(filter(None, phrases))
    if "minimum" in field:
        phrases.append(f"{field['minimum']} to {field['maximum']}" if "maximum" in field else f"{field['minimum']} or more")
    phrases += [f"at most {field[key]} {what}" for key, what in _LIMITS.items() if key in field]
    return "; ".join(filter(None, phrases))


_LIMITS = {"maxLength": "characters", "maxItems": "entries", "maxProperties": "entries"}


def _all_rules(schema: Schema, path: str = "") -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield f"`{path}`: {rule['message']}" if path else rule["message"]
    for name, field in schema.get("properties", {}).items():
        place = f"{path}.{name}" if path else name
        yield from _all_rules(field, place)
        yield from _all_rules(field.get("items", {}), f"{place}[]")


def _code(value: object) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = (head, tuple("---" for _ in head), *rows)
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
