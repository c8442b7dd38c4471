"""`lockstep plan -f job.yaml`: what would happen, before it takes GPUs. It changes nothing on the cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Typed
from lockstep.cli.shared.inputs import FilesOption, SetOption, read_all, resolve_inputs
from lockstep.cli.shared.jobargs import Form, FormOption, TargetOptions, on_cluster
from lockstep.cli.shared.terminal import put_findings, waiting
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.platforms.output import put, put_json
from lockstep.platforms.places.backends import ahead_of
from lockstep.platforms.places.orders import Order, PlanWishes

if TYPE_CHECKING:
    from lockstep.plan.ahead.forecast import Forecast


@on_cluster
def plan(
    where: TargetOptions,
    file: FilesOption,
    changes: SetOption = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="NODESxGPUSxCARD", help="Plan for these GPUs, without a cluster: 2x4xH100, 1x8xA100-40GB."),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use files only, without asking a cluster or a hub.")] = False,
    model_config: Annotated[
        Path | None,
        typer.Option(
            "--model-config", help="The base model's config.json, its folder, or a built-in model's name. Default: the job's model."
        ),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(
            "--samples", metavar="N|FILE", help="Number of samples (with packing, of sequences), or a copy of the data to count them in."
        ),
    ] = None,
    tokens_per_second: Annotated[
        str | None,
        typer.Option(
            "--tokens-per-second",
            metavar="N|LOG",
            help="Speed of all ranks together, or an earlier run's logs/train_log.jsonl that has it.",
        ),
    ] = None,
    output: FormOption = Form.TEXT,
) -> None:
    """Say whether a job would fit, before it takes GPUs.

    It looks at objects, nodes that fit now, quota, claims, admission, memory, traffic, steps and time.

    It changes nothing: it sends only questions and dry runs. Exit code 0: it fits now, or, with --offline, by what the files say;
    1: it would be refused; 2: the file can't be used; 3: it would wait, or the cluster doesn't say that it wouldn't; 4: it may fail
    once it runs, for memory or for room for checkpoints, or these aren't known. The last line says what to type then.

    On hosts it says what a start would find there, and which host's GPU has too little memory.

    With --on it needs no cluster, and ends as with --offline.

    Example: lockstep plan -f job.yaml --on 2x4xH100 --samples 48000

    Example: lockstep plan -f job.yaml --cluster lab
    """
    from lockstep.plan.ahead.planned import EXIT_CODES, PlanVerdict, verdict
    from lockstep.plan.ahead.standin import is_stand_in, parse_hardware, stand_in

    if on is not None and (where.cluster or where.context):
        raise ConfigError(f"--on and {'--cluster' if where.cluster else '--context'} both say where the job would run: give one of them")
    hardware = parse_hardware(on) if on is not None else None
    wishes = PlanWishes(model_config, samples, tokens_per_second, hardware, offline)
    place = None if hardware is None else partial(stand_in, hardware=hardware)
    read = read_all(file, where, changes, place=place, instead=stand_in)
    jobs = [(inputs, resolve_inputs(inputs)) for inputs in read]
    offline = offline or all(is_stand_in(resolved) for _, resolved in jobs)
    with waiting("reading the job's inputs" if offline else "asking the cluster what it would make of this"):
        plans = [
            ahead_of(inputs.cluster.kind).plan(inputs.at(where), Order(inputs.job, inputs.cluster, Typed("")), resolved, wishes)
            for inputs, resolved in jobs
        ]
    if output is Form.JSON:
        values = [_as_json(*one, offline=offline) for one in plans]
        put_json(values[0] if len(values) == 1 else values, indent=1)
    else:
        for (inputs, _), (findings, _) in zip(jobs, plans, strict=True):
            if len(jobs) > 1:
                put(f"{inputs.source}:")
            _show(findings, offline=offline)
    raise typer.Exit(EXIT_CODES[max((verdict(findings, offline=offline) for findings, _ in plans), key=list(PlanVerdict).index)])


def _show(findings: list[Finding], *, offline: bool) -> None:
    from lockstep.plan.ahead.planned import sentence

    put_findings(
        [replace(one, fix="") if one.outcome is Outcome.UNKNOWN else one for one in findings], 10
    )  # (the last line says what to type)
    put(sentence(findings, offline=offline))


def _as_json(findings: list[Finding], estimate: Forecast, *, offline: bool) -> dict[str, Any]:
    from lockstep.plan.ahead.planned import sentence, verdict

    lines = [
        {"section": one.subject, "outcome": one.outcome.value, "message": one.message} | ({"fix": one.fix} if one.fix else {})
        for one in findings
    ]
    result, message = verdict(findings, offline=offline), sentence(findings, offline=offline)
    return {"verdict": result.value, "message": message, "lines": lines, "figures": estimate.figures}
