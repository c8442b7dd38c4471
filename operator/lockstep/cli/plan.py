"""`lockstep plan -f job.yaml`: what would happen, before it takes GPUs. It changes nothing on the cluster."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.inputs import ClusterOption, FileOption, NamespaceOption, SetOption, read_inputs, resolve_inputs
from lockstep.cli.jobargs import ContextOption
from lockstep.platforms.output import put, put_json

if TYPE_CHECKING:
    from lockstep.cli.inputs import Inputs
    from lockstep.plan.forecast import Forecast
    from lockstep.plan.live import Comparison
    from lockstep.plan.lookahead import Around, Line, Object
    from lockstep.plan.resolve import Resolved


class Output(StrEnum):
    """How the plan is written."""

    TEXT = "text"
    JSON = "json"


def plan(
    file: FileOption,
    cluster: ClusterOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    changes: SetOption = None,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no cluster: only what the files tell.")] = False,
    model_config: Annotated[
        Path | None, typer.Option("--model-config", help="The base model's config.json, or its folder. Default: the job's, if it is here.")
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Samples of the data; with packing, sequences.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Count the samples of this copy of the data, a JSON object a line.")] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option("--tokens-per-second", min=0.001, help="How fast all ranks together train.")
    ] = None,
    train_log: Annotated[Path | None, typer.Option("--train-log", help="An earlier run's logs/train_log.jsonl: as fast as that.")] = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="text or json.")] = Output.TEXT,
) -> None:
    """Say what a job would do before it takes GPUs: objects, nodes that fit now, quota, claims, admission, memory, traffic, steps, time.

    It changes nothing: what it sends are questions and dry runs. Exit code 0: it fits now, or as far as can be seen; 1: it would be refused; 2: the
    file can't be used; 3: it would wait.

    Example: lockstep plan -f job.yaml --model-config models/Llama-3.1-8B --samples 48000
    """
    from dataclasses import replace

    from lockstep.cli.planfacts import known_facts
    from lockstep.cli.target import use_embedded_cluster
    from lockstep.plan import planned
    from lockstep.plan.forecast import capacity, forecast

    inputs = read_inputs(file, cluster, namespace, changes)
    resolved = resolve_inputs(inputs)
    known = known_facts(resolved, model_config, samples, data, tokens_per_second, train_log)
    tried = planned.samples(resolved, inputs.job)
    compared, around = None, None
    if not offline:
        use_embedded_cluster(inputs.cluster.cluster.name, context)
        compared, around = asyncio.run(_look(inputs, resolved, tried, context))
    size, source = capacity(resolved, None if around is None else around.nodes)
    told = forecast(resolved, replace(known, capacity_bytes=size, capacity_source=source))
    _show(planned.all_lines(resolved, tried[1], compared, around, told), told, output)


async def _look(inputs: Inputs, resolved: Resolved, tried: list[Object], context: str | None) -> tuple[list[Comparison] | None, Around]:
    from lockstep.api.errors import ConfigError
    from lockstep.cli.target import is_same_host
    from lockstep.plan.live import compare
    from lockstep.plan.planned import new_objects
    from lockstep.platforms.kubernetes.cluster import Cluster
    from lockstep.platforms.kubernetes.surroundings import look_around, observed

    async with await Cluster.connect(context) as connection:
        stated = inputs.cluster.cluster.api
        if stated and not is_same_host(stated, connection.server):
            raise ConfigError(
                f"your kubeconfig talks to {connection.server}, but cluster {inputs.cluster.cluster.name} is at {stated} (cluster.api in its file): "
                "choose its context with --context, or say --offline"
            )
        seen = await observed(connection, resolved.name, resolved.namespace)
        compared = None if seen is None else compare(resolved, seen)
        return compared, await look_around(connection, resolved, tried, new_objects(resolved, compared))


def _show(lines: list[Line], told: Forecast, output: Output) -> None:
    from lockstep.plan.lookahead import EXIT_CODES, sentence, verdict

    found = verdict(lines)
    if output is Output.JSON:
        put_json(
            {"verdict": found.value, "said": sentence(lines), "lines": [_as_json(line) for line in lines], "figures": told.figures},
            indent=1,
        )
    else:
        for line in lines:
            put(f"{line.outcome.value:8} {line.section:10} {line.said}")
            if line.fix:
                put(f"{'':19} → {line.fix}")
        put(sentence(lines))
    raise typer.Exit(EXIT_CODES[found])


def _as_json(line: Line) -> dict[str, Any]:
    return {"section": line.section, "outcome": line.outcome.value, "said": line.said} | ({"fix": line.fix} if line.fix else {})
