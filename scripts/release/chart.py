"""The Helm chart: the objects of the kustomization as templates, with a hole wherever FIELDS names a field.

It is packed without helm, and the same inputs give the same bytes. `values.yaml` and its schema come from VALUES; the text of `templates/`
has what no manifest has: checks, what to type next, and definitions that never lose a field.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.api.errors import Failed
from lockstep.api.files.yamltext import dump_yaml
from lockstep.api.names import APP, OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.api.objects import Object
from lockstep.plan.cluster.scope import USER_ROLES, Scope, scoped
from lockstep.plan.ship.deploy import called
from lockstep.plan.ship.openshift import repository
from release.parts import DIGEST, OLDEST_KUBERNETES, Images, crds, monitoring_objects, operator_objects, version

TEXTS = Path(__file__).parent / "templates"
PLACE = "{{ toJson . }}"
"""Stands for each of the namespaces in which the operator gets rights."""
HOLE = re.compile(r"^( *(?:[\w-]+: |- )?)'?<(\d+)>'?$", re.MULTILINE)


@dataclass(frozen=True)
class Value:
    """A key of values.yaml, dotted. `schema` says what is valid, `comment` what it does."""

    path: str
    default: Any
    schema: Object
    comment: str


@dataclass(frozen=True)
class Field:
    """A field of the operator's Deployment and the template that fills it. Items of a list are called by their name.

    `given`: the value without which the field isn't there, as in the manifest.
    """

    path: str
    template: str
    given: str = ""


POD = "spec/template/spec"
CONTAINER = f"{POD}/containers/operator"
IMAGE = '{{ include "lockstep.image" . | toJson }}'
FIELDS = (
    Field("spec/replicas", "{{ .Values.replicas }}"),
    Field(f"{CONTAINER}/image", IMAGE),
    Field(f"{CONTAINER}/env/LOCKSTEP_AGENT_IMAGE/value", IMAGE),
    Field(f"{CONTAINER}/resources", "{{ toJson .Values.resources }}"),
    Field(f"{POD}/priorityClassName", "{{ toJson .Values.priorityClassName }}", "priorityClassName"),
    Field(f"{POD}/imagePullSecrets", "{{ toJson .Values.imagePullSecrets }}", "imagePullSecrets"),
)
SWITCH = {"type": "boolean"}
TEXT = {"type": "string"}
AMOUNTS = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}


def values(images: Images) -> tuple[Value, ...]:
    """Every value, in the order of values.yaml; the defaults are the manifests' own. Raises Failed for an image without a digest."""
    name, _, digest = images.operator.partition("@")
    if not re.fullmatch(DIGEST, digest):
        raise Failed(f"chart: the operator's image {images.operator} has no digest: it is REGISTRY/lockstep-operator@sha256: and 64 digits")
    deployment = _deployment(operator_objects())
    namespaces = {"type": "array", "items": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}, "uniqueItems": True}
    resources = {"type": "object", "properties": {"requests": AMOUNTS, "limits": AMOUNTS}, "additionalProperties": False}
    secrets = {"type": "array", "items": {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}}
    return (
        Value("image.repository", repository(name), TEXT | {"minLength": 1}, "Name of the operator's image, without a tag."),
        Value("image.tag", version(), TEXT, "Its tag. Jobs that name no image use lockstep-trainer of this tag, in the same registry."),
        Value("image.digest", digest, TEXT, "Its digest, which decides what is pulled."),
        Value("imagePullSecrets", [], secrets, "Secrets of lockstep-system that it is pulled with: [{name: NAME}]."),
        Value("replicas", at(deployment, "spec/replicas"), {"type": "integer", "minimum": 1}, "One leads, the others take over."),
        Value("resources", at(deployment, f"{CONTAINER}/resources"), resources, "Memory for 5,000 jobs that report."),
        Value("priorityClassName", "", TEXT, "PriorityClass of the operator's pods."),
        Value("namespaces", [], namespaces, "Namespaces in which the operator gets rights, which must exist; none: everywhere."),
        Value("platform", "kubernetes", {"enum": ["kubernetes", "openshift"]}, "openshift: also what RDMA needs there."),
        Value("monitoring.enabled", False, SWITCH, "ServiceMonitor, alert rules and dashboard. Needs the Prometheus operator."),
        Value("operator.enabled", True, SWITCH, "false: only CRDs and roles of people, for operators of single namespaces."),
        Value("crds.enabled", True, SWITCH, "Install and upgrade the CRDs. They stay when the release is removed, whatever this says."),
    )


def at(item: Any, path: str) -> Any:
    """The field at a path of Field. Raises KeyError."""
    for key in path.split("/"):
        item = {one["name"]: one for one in item}[key] if isinstance(item, list) else item[key]
    return item


def _deployment(objects: Iterable[Object]) -> Object:
    return next(item for item in objects if called(item) == f"Deployment {OPERATOR_NAMESPACE}/{OPERATOR_NAME}")


class Template:
    """Text of a template: objects as YAML, in which the fields that values decide are holes until the text is made."""

    def __init__(self) -> None:
        self._holes: list[Field] = []

    def hole(self, field: Field) -> str:
        self._holes.append(field)
        return f"<{len(self._holes) - 1}>"

    def document(self, item: Object) -> str:
        """What YAML has of `{{` itself is text to helm, too: alert rules are templates of Prometheus."""
        return "---\n" + HOLE.sub(self._filled, dump_yaml(item).replace("{{", '{{ "{{" }}'))

    def _filled(self, match: re.Match[str]) -> str:
        field = self._holes[int(match[2])]
        line = f"{match[1]}{field.template}"
        return f"{{{{- if .Values.{field.given} }}}}\n{line}\n{{{{- end }}}}" if field.given else line


def operator_template() -> str:
    """Everything but what people's roles and the namespace are: helm makes that, by --create-namespace."""
    template = Template()
    whole = [item for item in operator_objects() if item["kind"] != "Namespace" and item["metadata"]["name"] not in USER_ROLES]
    named = scoped(copy.deepcopy(whole), Scope((PLACE,)))
    wholes, names = ({called(item) for item in objects} for objects in (whole, named))
    texts = []
    for item in whole:
        text = template.document(_with_holes(item, _deployment(named), template) if item["kind"] == "Deployment" else item)
        texts.append(text if called(item) in names else _when("not .Values.namespaces", text))
    for item in named:
        if called(item) not in wholes:
            item["metadata"]["namespace"] = template.hole(Field("", PLACE))
            texts.append(_when(".Values.namespaces", template.document(item), "range"))
    return _when(".Values.operator.enabled", "".join(texts))


def _with_holes(deployment: Object, named: Object, template: Template) -> Object:
    for field in FIELDS:
        above, _, key = field.path.rpartition("/")
        at(deployment, above)[key] = template.hole(field)
    variables, others = at(deployment, f"{CONTAINER}/env"), at(named, f"{CONTAINER}/env")
    known = {variable["name"] for variable in variables}
    for variable in others:
        if variable["name"] not in known:
            text = json.dumps(variable).replace(json.dumps(PLACE), '{{ join "," .Values.namespaces | toJson }}')
            variables.append(template.hole(Field("", text, "namespaces")))
    return deployment


def _when(condition: str, text: str, word: str = "if") -> str:
    return f"{{{{- {word} {condition} }}}}\n{text}{{{{- end }}}}\n"


def _plain(objects: Iterable[Object]) -> str:
    return "".join(map(Template().document, objects))


def templates() -> dict[str, str]:
    """Templates by name: those of the manifests, and TEXTS."""
    base = operator_objects()
    names = {called(item) for item in base}
    openshift = [item for item in operator_objects("openshift") if called(item) not in names]
    return {
        "roles.yaml": _plain(item for item in base if item["metadata"]["name"] in USER_ROLES),
        "operator.yaml": operator_template(),
        "openshift.yaml": _when('eq .Values.platform "openshift"', _plain(openshift)),
        "monitoring.yaml": _when("and .Values.operator.enabled .Values.monitoring.enabled", _plain(monitoring_objects())),
        **{path.name: path.read_text(encoding="utf-8") for path in sorted(TEXTS.iterdir())},
    }


def schema(table: Iterable[Value]) -> Object:
    """JSON Schema of values.yaml: a key that isn't in the table is an error."""
    root: Object = {"type": "object", "properties": {}, "additionalProperties": False}
    for value in table:
        here = root
        *above, key = value.path.split(".")
        for part in above:
            here = here["properties"].setdefault(part, {"type": "object", "properties": {}, "additionalProperties": False})
        here["properties"][key] = value.schema
    return root


def values_text(table: Iterable[Value]) -> str:
    """values.yaml, with the comment above each key."""
    lines: list[str] = []
    head = ""
    for value in table:
        above, _, key = value.path.rpartition(".")
        if above and above != head:
            lines.append(f"{above}:\n")
        head, indent = above, "  " if above else ""
        lines += [f"{indent}# {value.comment}\n", *(f"{indent}{line}\n" for line in dump_yaml({key: value.default}).splitlines())]
    return "".join(lines)


def files(images: Images) -> Iterator[tuple[str, str]]:
    """Names in the archive and texts of all files. Raises Failed."""
    table = values(images)
    about = {
        "apiVersion": "v2", "name": APP, "version": version(), "appVersion": version(), "type": "application",
        "description": "Multi-node DeepSpeed fine-tuning: the operator and its CRDs", "kubeVersion": f">={OLDEST_KUBERNETES}-0",
    }  # fmt: skip
    yield "Chart.yaml", dump_yaml(about)
    yield "values.yaml", values_text(table)
    yield "values.schema.json", json.dumps(schema(table), indent=2) + "\n"
    for item in crds():
        yield f"definitions/{item['metadata']['name']}.json", json.dumps(item)
    for name, text in templates().items():
        yield f"templates/{name}", text


def write(dist: Path, images: Images) -> list[Path]:
    """Pack the chart into `dist`. Raises Failed for an image without a digest."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, text in sorted(files(images)):
            entry = tarfile.TarInfo(f"{APP}/{name}")
            entry.size, entry.mode = len(data := text.encode()), 0o644
            archive.addfile(entry, io.BytesIO(data))
    path = dist / f"{APP}-{version()}.tgz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    return [path]
