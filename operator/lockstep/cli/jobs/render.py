"""`lockstep validate|render`: what becomes of a job file. They only read."""

from __future__ import annotations

import json
from base64 import b64decode
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.files.yamltext import dump_all_yaml, dump_yaml
from lockstep.api.names import HOSTS
from lockstep.cli.shared.inputs import FilesOption, Inputs, SetOption, read_all, resolve_inputs
from lockstep.cli.shared.jobargs import TargetOptions, acts_on
from lockstep.cli.shared.terminal import console
from lockstep.plan.ahead.forecast import idle_ranks
from lockstep.plan.ahead.standin import NO_CLUSTER, stand_in
from lockstep.plan.render import objects
from lockstep.plan.render.resolve import refuse_missing_gpus
from lockstep.platforms.jobs.planfacts import moved_targets_here
from lockstep.platforms.jobs.resolved import warn
from lockstep.platforms.output import put, put_json, put_text, tell
from lockstep.platforms.places.backends import ahead_of
from lockstep.platforms.places.orders import lack
from lockstep_spec.words import printable_line

if TYPE_CHECKING:
    from lockstep.plan.layers import Setting


class ObjectForm(StrEnum):
    YAML = "yaml"
    JSON = "json"
    JOB = "job"


ObjectFormOption = Annotated[
    ObjectForm,
    typer.Option("-o", "--output", help="yaml or json: the objects. job: the TrainingJob itself, with --set, for kubectl apply -f -."),
]
ExplainOption = Annotated[bool, typer.Option("--explain", help="Print every value and the layer that set it, instead of objects.")]

YAML_HEADER = """\
# What the operator makes of the job. To run it, apply the job itself: values that read <made by the operator>
# (the job's uid and key, the agent's image, the certificate) are known only on the cluster.
"""


@acts_on("cluster", "namespace")
def validate(where: TargetOptions, file: FilesOption, changes: SetOption = None) -> None:
    """Check job files against a cluster file.

    It prints ok, or what is wrong, in which line, and how to fix it (exit code 2).

    Example: lockstep validate -f job.yaml --cluster barcelona

    Example: lockstep validate jobs/*.yaml
    """
    jobs = read_all(file, where, changes, instead=stand_in)
    mistakes: list[str] = []
    for inputs in jobs:
        try:
            resolved = resolve_inputs(inputs)
            refuse_missing_gpus(resolved)
            if resolved.training is not None and (moved := moved_targets_here(resolved.training)):
                raise ConfigError(moved)
            doubts = ahead_of(inputs.cluster.kind).doubts(resolved)
        except ConfigError as error:
            mistakes += [f"{inputs.source}: {line}" if len(jobs) > 1 else str(line) for line in error.args]
        else:
            for doubt in doubts:
                tell(f"note: {inputs.source}: {doubt}")
            if idle := idle_ranks(resolved):
                warn("IdleRanks", idle)
            put(f"{inputs.source}: ok" if len(jobs) > 1 else "ok")
    if mistakes:
        raise ConfigError(*mistakes)


@acts_on("cluster", "namespace")
def render(
    where: TargetOptions,
    file: FilesOption,
    output: ObjectFormOption = ObjectForm.YAML,
    explain: ExplainOption = False,
    changes: SetOption = None,
) -> None:
    """Print the objects that a job becomes on a cluster.

    With --explain it prints where each value comes from.

    Example: lockstep render -f job.yaml --cluster barcelona --explain

    Example: lockstep render -f job.yaml --set training.lora.rank=8 --set metadata.name=rank8 -o job | kubectl apply -f -
    """
    jobs = read_all(file, where, changes, instead=stand_in)
    resolved = [resolve_inputs(inputs) for inputs in jobs]
    if output is ObjectForm.JOB and not explain:
        put_text("---\n".join(map(_job, jobs)))
        return
    if explain:
        if output is ObjectForm.JSON:
            rows = [{"field": row.field, "value": row.value, "layer": row.layer.value} for one in resolved for row in one.settings]
            put_json(rows, ascii_only=False)
            return
        for inputs, one in zip(jobs, resolved, strict=True):
            put(*([f"{inputs.source}:"] if len(jobs) > 1 else []))
            _print_settings(one.settings)
        return
    on_hosts = [inputs.cluster.cluster.name for inputs in jobs if inputs.cluster.hosts is not None]
    if on_hosts:
        raise lack(HOSTS, "objects", name=on_hosts[0])
    rendered = [_readable(item) for one in resolved for item in objects.render(one)]
    if output is ObjectForm.JSON:
        put_json({"apiVersion": "v1", "kind": "List", "items": rendered}, ascii_only=False)
    else:
        put_text(YAML_HEADER + dump_all_yaml(rendered))


def _job(inputs: Inputs) -> str:
    written = inputs.job.written()
    unknown = inputs.cluster.cluster.name == NO_CLUSTER and inputs.namespace == inputs.cluster.cluster.namespace
    return dump_yaml({**written, "metadata": {**written["metadata"], **({} if unknown else {"namespace": inputs.namespace})}})


def _readable(item: dict[str, Any]) -> dict[str, Any]:
    """Return the object, a Secret's values as text: they are placeholders, which base64 would hide."""
    if item["kind"] != "Secret":
        return item
    text = {key: b64decode(value).decode() for key, value in item["data"].items()}
    return {key: value for key, value in item.items() if key != "data"} | {"stringData": text}


def _print_settings(settings: tuple[Setting, ...]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("FIELD", "VALUE", "LAYER"):
        table.add_column(column, overflow="fold")
    for row in settings:
        table.add_row(
            Text(row.field), Text(printable_line(_shown(row.value))), Text(row.layer.value)
        )  # Text: rich reads brackets in str as markup
    console().print(table)


def _shown(value: object) -> str:
    if isinstance(value, str) and value.isprintable() and value.strip() == value and value:
        return value
    return json.dumps(value, ensure_ascii=False)
