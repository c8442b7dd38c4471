"""`lockstep plan -f job.yaml`: what would happen, before it takes GPUs. It changes nothing on the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.inputs import FilesOption, SetOption, read_all, resolve_inputs
from lockstep.cli.shared.jobargs import Form, FormOption, TargetOptions, on_cluster
from lockstep.cli.shared.terminal import waiting
from lockstep.platforms.hosts.backend import fleet_of
from lockstep.platforms.output import put, put_json

if TYPE_CHECKING:
    from lockstep.api.objects import Object
    from lockstep.cli.shared.inputs import Inputs
    from lockstep.kube.aim import Connections
    from lockstep.plan.ahead.forecast import Forecast
    from lockstep.plan.ahead.live import Comparison
    from lockstep.plan.ahead.standin import NamedGpus
    from lockstep.plan.cluster.facts import ClusterFacts
    from lockstep.plan.cluster.finding import Finding
    from lockstep.plan.render.resolved import Resolved


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
    anyway: Annotated[
        bool, typer.Option("--anyway", help="On hosts: accept a network that is too slow for the weights that the job sends.")
    ] = False,
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
    options = PlanOptions(where, model_config, samples, tokens_per_second, hardware, offline=offline, anyway=anyway)
    place = None if hardware is None else partial(stand_in, hardware=hardware)
    read = read_all(file, where, changes, place=place, instead=stand_in)
    jobs = [(inputs, resolve_inputs(inputs)) for inputs in read]
    offline = offline or all(is_stand_in(resolved) for _, resolved in jobs)
    with waiting("reading the job's inputs" if offline else "asking the cluster what it would make of this"):
        plans = [
            _plan(inputs.aim(where.verb), resolved, options) if inputs.cluster.hosts is None else _plan_on_hosts(inputs, resolved, options)
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


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan, besides the job."""

    where: TargetOptions
    model_config: Path | None
    samples: str | None
    tokens_per_second: str | None
    hardware: NamedGpus | None
    offline: bool
    anyway: bool


def _plan(inputs: Inputs, resolved: Resolved, options: PlanOptions) -> tuple[list[Finding], Forecast]:
    from lockstep.plan.ahead import planned
    from lockstep.plan.ahead.forecast import capacity, forecast
    from lockstep.plan.ahead.slownetwork import measured_speed
    from lockstep.plan.ahead.standin import is_stand_in
    from lockstep.platforms.jobs.planfacts import known_facts

    stated = known_facts(resolved, options.model_config, options.samples, options.tokens_per_second, offline=options.offline)
    samples = planned.samples(resolved, inputs.job)
    compared, facts = None, None
    if not (options.offline or is_stand_in(resolved)):
        try:
            compared, facts = asyncio.run(_look(resolved, samples, options.where.connections))
        except ConfigError as error:
            raise ConfigError(f"{error}; or --offline, which plans by the files alone") from error
    size, source = capacity(resolved, () if facts is None else facts.list("Node").items)
    speed = measured_speed(inputs.cluster.calibration, inputs.cluster.pairs, resolved.transport.value)
    fix = "--on NODESxGPUSxCARD, such as --on 2x4xH100" if is_stand_in(resolved) and resolved.gpus_per_node else stated.capacity_fix
    estimate = forecast(resolved, replace(stated, capacity_bytes=size, capacity_source=source, capacity_fix=fix, speed=speed))
    first, *others = planned.all_findings(resolved, samples[1], compared, facts, estimate)
    return [first, *(options.hardware.refusals(resolved) if options.hardware is not None else ()), *others], estimate


def _plan_on_hosts(inputs: Inputs, resolved: Resolved, options: PlanOptions) -> tuple[list[Finding], Forecast]:
    """The plan without Kubernetes' part of it, by what the hosts say of themselves."""
    from lockstep.plan.ahead.forecast import NOT_OFFLINE, forecast
    from lockstep.plan.ahead.slownetwork import measured_speed
    from lockstep.plan.hosts.place import chosen
    from lockstep.plan.hosts.planned import NOT_ASKED, hosts_plan, room_of, with_hosts
    from lockstep.platforms.hosts.ahead import ask_ahead, with_config_of_host
    from lockstep.platforms.jobs.planfacts import known_facts

    assert inputs.cluster.hosts is not None  # noqa: S101 (the caller looks)
    where, profile, asked = options.where, inputs.cluster.profile, None
    fleet = fleet_of(inputs.cluster, where.cluster, context=where.context)
    facts = known_facts(resolved, options.model_config, options.samples, options.tokens_per_second, offline=options.offline)
    facts = replace(facts, capacity_source=NOT_ASKED, capacity_fix=NOT_OFFLINE)
    if not options.offline:
        asked = asyncio.run(ask_ahead(fleet, inputs.job, profile))
        resolved = asked.seats[0].resolved if asked.seats else resolved
        shared = resolved.storage_mode.value == "Shared"
        why = "the hosts don't say, because the job can't start there"
        facts = replace(with_hosts(facts, asked), capacity_source=why, room_bytes=room_of(asked, shared))
        facts = asyncio.run(with_config_of_host(facts, fleet, inputs.job, profile))
    speed = measured_speed(inputs.cluster.calibration, inputs.cluster.pairs, resolved.transport.value)
    estimate = forecast(resolved, replace(facts, speed=speed, refuses_slow_network=not options.anyway))
    names = [host.name for host in chosen(inputs.cluster.hosts, inputs.job.spec.nodes)]
    return hosts_plan(resolved, names, asked, estimate), estimate


async def _look(resolved: Resolved, samples: list[Object], connections: Connections) -> tuple[list[Comparison] | None, ClusterFacts]:
    from lockstep.kube.cluster import Cluster
    from lockstep.plan.ahead.live import compare
    from lockstep.platforms.clusters.facts import objects_seen, plan_facts

    async with await Cluster.connect(connections) as connection:
        objects = await objects_seen(connection, resolved.name, resolved.namespace)
        return None if objects is None else compare(resolved, objects), await plan_facts(connection, resolved, samples)


def _show(findings: list[Finding], *, offline: bool) -> None:
    from lockstep.plan.ahead.planned import sentence
    from lockstep.plan.cluster.finding import Outcome

    for one in findings:
        put(f"{one.outcome.value:8} {one.subject:10} {one.message}")
        if one.fix and one.outcome is not Outcome.UNKNOWN:  # (the last line says what to type)
            put(f"{'':19} → {one.fix}")
    put(sentence(findings, offline=offline))


def _as_json(findings: list[Finding], estimate: Forecast, *, offline: bool) -> dict[str, Any]:
    from lockstep.plan.ahead.planned import sentence, verdict

    lines = [
        {"section": one.subject, "outcome": one.outcome.value, "message": one.message} | ({"fix": one.fix} if one.fix else {})
        for one in findings
    ]
    result, message = verdict(findings, offline=offline), sentence(findings, offline=offline)
    return {"verdict": result.value, "message": message, "lines": lines, "figures": estimate.figures}
