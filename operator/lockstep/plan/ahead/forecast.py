"""Forecast of what a job will need and do once it runs: memory, traffic, steps, checkpoints, time (pure). It says what isn't known, and
guesses nothing.

The arithmetic is lockstep_spec's, which the trainer uses, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lockstep.api.objects import Object
from lockstep.api.quantity import amount, number
from lockstep.api.training import Training
from lockstep.plan.ahead.slownetwork import NetworkSpeed, large_share, remedy, stated_speed, too_slow
from lockstep.plan.ahead.standin import is_stand_in
from lockstep.plan.ahead.traffic import commit_bytes, gigabits_per_second, saves, step_traffic, total_bytes
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.plan.discovery.nodes import GPU_MEMORY
from lockstep.plan.render.fabric import GPU_RESOURCE
from lockstep.plan.render.resolved import Resolved
from lockstep.plan.render.run import trainer_config
from lockstep_spec import length
from lockstep_spec.choices import Balance, Batches, Method
from lockstep_spec.families import UnknownModel, moved_targets, shape_from_config
from lockstep_spec.fit import asked_partition, choose_partition, choose_recomputed, most_samples, nearest_settings, plan_memory
from lockstep_spec.gpus import known_gpu
from lockstep_spec.memory import Place, trained_elements
from lockstep_spec.settings import Settings, size_settings
from lockstep_spec.shape import ModelShape
from lockstep_spec.shares import idle_words
from lockstep_spec.words import decimal_size, duration, step_duration

_TYPE = re.compile(r"(\d+)\s*GB\b", re.IGNORECASE)
NOT_OFFLINE = "leave out --offline"
"""Remedy for facts that a plan by files alone can't have."""
SPEEDS = (10, 100, 400)
"""Gb/s of a node that times are given for where the network's speed isn't known."""


@dataclass(frozen=True)
class Pace:
    """Speed of a run, and who states it."""

    tokens_per_second: float
    """All ranks together."""
    source: str
    tokens_per_step: float | None = None
    """Measured; None: no more than globalBatchSize × maxLength."""


class Card(NamedTuple):
    """Memory that one rank has on some machine."""

    name: str
    """Name in messages: lab2's NVIDIA GeForce RTX 3070 Ti."""
    bytes: int
    micro_batch: int | None = None
    """Samples at once that are stated for it; None: the job's."""
    shared: bool = False
    """True if it is the memory of the machine, too."""


@dataclass(frozen=True)
class RunFacts:
    """Facts that only files beside the job, or a person, can state."""

    shape: ModelShape | None = None
    shape_source: str = "--model-config FILE names its config.json"
    """Source of the shape; where there is none, what to do."""
    shape_fix: str = "--model-config FILE"
    """Option that names it."""
    model_type: object = None
    """model_type of the model's config.json, of any family."""
    samples: int | None = None
    samples_source: str = "--samples N says how many, --samples FILE counts them"
    capacity_bytes: int | None = None
    """Memory of a GPU, or what a CPU rank may use."""
    capacity_source: str = ""
    capacity_fix: str = "gpus.type in the cluster file, or spec.resources.memory for ranks on CPUs"
    """Remedy where the memory isn't known."""
    device: str = ""
    """Name of the slowest GPU; '': the cluster's gpus.type."""
    cards: tuple[Card, ...] = ()
    """Memory by machine, where machines differ; then the plan is made for each."""
    samples_at_once: tuple[int, ...] = ()
    """Those that its machine states for each rank, 0: the job's; (): of each rank the job's."""
    room_bytes: int | None = None
    """Free bytes for checkpoints on all volumes together; None: the cluster's file states the volumes' size."""
    pace: Pace | None = None
    speed: NetworkSpeed | None = None
    """Measured speed of the network; None: nobody has measured it."""
    refuses_slow_network: bool = False
    """True where a start refuses a network that is too slow for the run."""


def with_config(facts: RunFacts, config: Mapping[str, Any], source: str) -> RunFacts:
    """Return the facts with what a model's config.json says, which is at `source`."""
    facts = replace(facts, model_type=config.get("model_type"))
    try:
        return replace(facts, shape=shape_from_config(config), shape_source=source)
    except UnknownModel as error:
        why = f"{source} can't be used: {error}. The trainer prints its memory plan before it loads the model"
        return replace(facts, shape_source=why, shape_fix="lockstep run, whose start plans it and refuses what can't fit")


@dataclass
class Forecast:
    """Findings for people, and the same as numbers."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, section: str, outcome: Outcome, message: str, fix: str = "") -> None:
        self.findings.append(Finding(section, outcome, message, fix))


def capacity(resolved: Resolved, nodes: Iterable[Object]) -> tuple[int | None, str]:
    """A GPU's memory by the nodes' labels (the smallest), else by the cluster's gpus.type; of a CPU rank its share of the pod's limit."""
    if resolved.gpus_per_node == 0:
        limit = amount(resolved.amounts("limits").get("memory"))
        if limit is None:
            return None, "neither spec.resources.memory nor the cluster's resources.limits.memory is set"
        field = "spec.resources.memory" if resolved.spec.resources.memory else "resources.limits.memory"
        return int(limit) // resolved.ranks_per_node, f"{field} / {resolved.ranks_per_node} ranks"
    labels = [
        node["metadata"].get("labels", {}) for node in nodes if node.get("status", {}).get("allocatable", {}).get(GPU_RESOURCE, "0") != "0"
    ]
    stated = [int(of_node[GPU_MEMORY]) for of_node in labels if str(of_node.get(GPU_MEMORY, "")).isdigit()]
    if stated:
        return min(stated) << 20, f"the nodes' label {GPU_MEMORY}"
    kind = resolved.profile.spec.gpus.type or ""
    named, gpu = _TYPE.search(kind), known_gpu(kind)
    sizes = (int(named[1]),) if named else gpu.gigabytes if gpu is not None else ()
    if len(sizes) == 1:
        return sizes[0] * 10**9, f"--on: {kind}" if is_stand_in(resolved) else f"the cluster's gpus.type {kind}"
    if is_stand_in(resolved):
        return None, "no cluster and no --on says how much a GPU has"
    return None, f"neither the label {GPU_MEMORY} nor the cluster's gpus.type says how much a GPU has"


def forecast(resolved: Resolved, facts: RunFacts) -> Forecast:
    estimate = Forecast()
    if resolved.training is None:
        estimate.add("memory", Outcome.NOTE, "the job runs its own script, so its memory, network and time needs are not known")
        return estimate
    settings = size_settings(trainer_config(resolved.training))
    run = _length(resolved, facts)
    if refusal := moved(resolved.training, facts.model_type):
        estimate.add("adapter", Outcome.REFUSED, refusal)
    settings, place = _memory(estimate, resolved, settings, facts)
    _network(estimate, resolved, settings, facts, place, run)
    _steps(estimate, resolved, facts, run)
    _saves(estimate, resolved, settings, facts, run)
    _time(estimate, facts, run, _step_seconds(resolved, settings, facts))
    return estimate


def moved(training: Training, model_type: object) -> str:
    """Return why the model's adapter can't have the job's targets; "" if it can, or has none."""
    why = moved_targets(model_type, training.lora.target_modules) if training.method is Method.LORA else ""
    return why and f"{why}. A run that has checkpoints goes on, with a warning"


def _chosen(resolved: Resolved, facts: RunFacts, settings: Settings) -> tuple[Settings, Place, str]:
    """Return what the trainer will choose by the memory: what is computed again, why, and ranks with a second copy of the weights."""
    gpu = resolved.gpus_per_node > 0
    shared = gpu and bool(facts.cards) and min(facts.cards, key=lambda card: card.bytes).shared
    place = Place(resolved.world_size, resolved.ranks_per_node, gpu, shared=shared)
    size = _smallest(facts)
    needs: list[tuple[int, int]] = []
    if size is None or facts.shape is None:
        place = replace(place, partition=asked_partition(settings, place) or 1)
    else:
        place = replace(place, partition=choose_partition(facts.shape, settings, place, size))
        needs = [(card.micro_batch or settings.micro_batch_size, card.bytes) for card in facts.cards] or [(settings.micro_batch_size, size)]
    settings, why = choose_recomputed(facts.shape, settings, place, needs)
    return settings, place, why


def _smallest(facts: RunFacts) -> int | None:
    """Return the bytes of the device with the least memory."""
    return min((card.bytes for card in facts.cards), default=facts.capacity_bytes)


def _memory(estimate: Forecast, resolved: Resolved, settings: Settings, facts: RunFacts) -> tuple[Settings, Place]:
    settings, place, why = _chosen(resolved, facts, settings)
    each = "GPU" if place.gpu else "rank"
    if facts.shape is None:
        message = f"what a {each} holds: the model's parameters are not known; {facts.shape_source}"
        estimate.add("memory", Outcome.UNKNOWN, message, facts.shape_fix)
        return settings, place
    stated, shape, size = settings, facts.shape, _smallest(facts)
    measured = _training(resolved).optimization.balance is Balance.MEASURED
    if measured and size is not None:
        settings = replace(settings, micro_batch_size=min(settings.micro_batch_size, most_samples(shape, settings, place, size)))
    plan = plan_memory(shape, settings, place, size or 0)
    estimate.figures |= {
        "parameters": shape.numel, "trainedParameters": trained_elements(shape, settings), "modelSource": facts.shape_source,
        "memoryBytes": plan.total_bytes, "memoryCapacityBytes": size, "memoryItems": {item.name: item.size_bytes for item in plan.items},
    }  # fmt: skip
    refusal = None if size is None else plan.refusal()
    if facts.cards:
        _memory_of_cards(estimate, resolved, facts, stated, place)
    elif size is None:
        estimate.add(
            "memory",
            Outcome.UNKNOWN,
            f"a {each} needs about {decimal_size(plan.total_bytes)}; whether it has that: {facts.capacity_source}",
            facts.capacity_fix,
        )
    elif refusal is not None:
        estimate.add("memory", Outcome.REFUSED, refusal)
    else:
        message = f"a {each} needs about {decimal_size(plan.total_bytes)} of {decimal_size(size)} ({facts.capacity_source})"
        if plan.tight:
            estimate.add("memory", Outcome.RISK, f"{message}: it may run out", f"what fits: {'; or '.join(nearest_settings(plan))}")
        else:
            estimate.add("memory", Outcome.OK, message)
    trained = f"{estimate.figures['trainedParameters']:,} trained elements of {shape.numel:,} ({facts.shape_source})"
    estimate.add("memory", Outcome.NOTE, f"that is with {_manner(shape, settings, place, why)}, and {trained}")
    if measured:
        several = f"{settings.micro_batch_size} sample{'s' if settings.micro_batch_size > 1 else ''} at once"
        estimate.add(
            "memory",
            Outcome.NOTE,
            f"it counts {several}: with balance Measured the start chooses what each {each} computes, by its speed and memory",
        )
    largest = sorted(plan.items, key=lambda item: -item.size_bytes)
    estimate.add(
        "memory",
        Outcome.NOTE,
        "; ".join(f"{decimal_size(item.size_bytes)} {item.name}{'' if item.certain else ' (estimated)'}" for item in largest),
    )
    return settings, place


def _memory_of_cards(estimate: Forecast, resolved: Resolved, facts: RunFacts, stated: Settings, place: Place) -> None:
    """Say of every machine whether its ranks fit, and name those that don't."""
    shape = facts.shape
    assert shape is not None  # noqa: S101 (the caller knows it)
    fitting = []
    for card in facts.cards:
        place = replace(place, shared=place.gpu and card.shared)
        settings = stated if card.micro_batch is None else replace(stated, micro_batch_size=card.micro_batch)
        if card.micro_batch is None and _training(resolved).optimization.balance is Balance.MEASURED:
            most = most_samples(shape, settings, place, card.bytes)
            settings = replace(settings, micro_batch_size=min(settings.micro_batch_size, most))
        plan = plan_memory(shape, settings, place, card.bytes)
        message = f"{card.name} ({decimal_size(card.bytes)}) needs about {decimal_size(plan.total_bytes)}"
        help_ = f"what fits: {'; or '.join(nearest_settings(plan))}; or leave this host out (--without)"
        if not plan.fits:
            estimate.add("memory", Outcome.REFUSED, message, help_)
        elif plan.tight:
            estimate.add("memory", Outcome.RISK, f"{message}: it may run out", help_)
        else:
            fitting.append(message)
    if fitting:
        estimate.add("memory", Outcome.OK, "; ".join(fitting))


def _manner(shape: ModelShape, settings: Settings, place: Place, why: str) -> str:
    """Return the settings that decide most of the memory, in the words of the job file."""
    again = f"recompute {settings.recompute.value} ({settings.recomputed.words(shape.layers)}{why and f', {why}'})"
    copy = f", a second copy of the weights on each node's {place.partition} ranks" if place.partition > 1 else ""
    return f"{settings.zero_stage.value} in {settings.precision.value}, {again}{copy}"


def _network(estimate: Forecast, resolved: Resolved, settings: Settings, facts: RunFacts, place: Place, run: length.Plan | None) -> None:
    if resolved.nodes == 1:
        estimate.add("network", Outcome.OK, "one node: nothing is sent between nodes")
        return
    if facts.shape is None:
        estimate.add("network", Outcome.UNKNOWN, "what a step sends between nodes: the model's parameters are not known")
        return
    flows = step_traffic(facts.shape, settings, place, _accumulation(resolved))
    total = total_bytes(flows)
    estimate.figures |= {"stepNodeBytes": total, "stepTraffic": {flow.name: flow.node_bytes for flow in flows}}
    most = "at most " if settings.zero_stage.number == 3 or _fewer_batches(resolved) else ""
    parts = "; ".join(f"{decimal_size(flow.node_bytes)} {flow.name}" for flow in flows)
    estimate.add("network", Outcome.NOTE, f"a step sends {most}{decimal_size(total)} from each node, and as much to it: {parts}")
    speed = facts.speed or stated_speed(resolved.profile.spec.network, resolved.transport)
    times = f"{step_duration(speed.seconds(total))} a step at {speed.gigabits:.3g} Gb/s, {speed.source}"
    if facts.speed is not None:
        estimate.figures |= {"networkStepSeconds": round(speed.seconds(total), 3), "measuredGigabitsPerSecond": round(speed.gigabits, 4)}
    elif resolved.profile.spec.network.minimum_busbw is None:
        times = ", ".join(f"{step_duration(total * 8 / (gigabits * 1e9))} at {gigabits} Gb/s" for gigabits in SPEEDS) + " a node"
    estimate.add("network", Outcome.NOTE, f"that takes {times}")
    reason = too_slow(flows, settings, _accumulation(resolved), speed)
    if reason:
        refused = facts.refuses_slow_network and facts.speed is not None
        in_all = f"; {run.total_steps} steps take {duration(round(speed.seconds(total) * run.total_steps))}" if run is not None else ""
        outcome = Outcome.REFUSED if refused else Outcome.WARNING
        estimate.add("network", outcome, f"{reason}{in_all}", _less_traffic(facts, settings, place))
    elif facts.speed is not None:
        samples = -(-_global_batch(resolved) // resolved.world_size)
        share = large_share(flows, facts.shape, settings, samples, facts.speed, facts.device or resolved.profile.spec.gpus.type or "")
        if share:
            estimate.add("network", Outcome.NOTE, share, _less_traffic(facts, settings, place))
    seconds = _step_seconds(resolved, settings, facts)
    if seconds is None:
        message = "the bandwidth that a step needs: how long one takes is not known; --tokens-per-second says it"
        estimate.add("network", Outcome.UNKNOWN, message)
        return
    needed = gigabits_per_second(total, seconds)
    estimate.figures["neededGigabitsPerSecond"] = round(needed, 3)
    message = f"a step of {step_duration(seconds)} needs {_speed(needed)} Gb/s a node and direction, if it is sent evenly over the step"
    estimate.add("network", Outcome.NOTE, message)


def _less_traffic(facts: RunFacts, settings: Settings, place: Place) -> str:
    """Return what sends less. Where a device's memory isn't known, every setting counts as one that fits."""
    size, shape = _smallest(facts), facts.shape
    return remedy(settings, place, lambda less, there: shape is None or size is None or not plan_memory(shape, less, there, size).tight)


def slow_network(resolved: Resolved, facts: RunFacts) -> tuple[str, str]:
    """Return why the measured network is too slow for the run, and what sends less; ('', '') if it isn't, or the model isn't known."""
    if facts.shape is None or resolved.training is None:
        return "", ""
    settings, place, _ = _chosen(resolved, facts, size_settings(trainer_config(resolved.training)))
    place = replace(place, partition=asked_partition(settings, place) or 1)
    flows = step_traffic(facts.shape, settings, place, _accumulation(resolved))
    reason = too_slow(flows, settings, _accumulation(resolved), facts.speed)
    return reason, _less_traffic(facts, settings, place) if reason else ""


def _training(resolved: Resolved) -> Training:
    assert resolved.training is not None  # noqa: S101 (`forecast` ends where there is none)
    return resolved.training


def _global_batch(resolved: Resolved) -> int:
    optimization = _training(resolved).optimization
    return int(optimization.global_batch_size or optimization.micro_batch_size * resolved.world_size)


def _accumulation(resolved: Resolved) -> int:
    micro: int = _training(resolved).optimization.micro_batch_size
    return -(-_global_batch(resolved) // (micro * resolved.world_size))


def _fewer_batches(resolved: Resolved) -> bool:
    """Return True if samples that are shorter than maxLength make fewer micro-batches than are counted."""
    return _training(resolved).optimization.batches is Batches.TOKENS and _accumulation(resolved) > 1


def idle_ranks(resolved: Resolved, stated: Sequence[int] = ()) -> str:
    """Return a sentence if a step has no sample for some of the ranks; '' if it has one for each. `stated`: RunFacts.samples_at_once."""
    if resolved.training is None:
        return ""
    optimization = resolved.training.optimization
    ranks = len(stated) or resolved.world_size
    batch = int(optimization.global_batch_size or optimization.micro_batch_size * ranks)
    if optimization.batches is Batches.TOKENS:
        return idle_words((1,) * ranks, batch)
    return idle_words([samples or optimization.micro_batch_size for samples in stated or (0,) * ranks], batch)


def _length(resolved: Resolved, facts: RunFacts) -> length.Plan | None:
    """None: the number of samples isn't known, nor a most by maxSteps. Those held out for evaluation are no part of it."""
    training = _training(resolved)
    optimization = training.optimization
    if facts.samples is None and optimization.max_steps is None:
        return None
    most = (optimization.max_steps or 0) * _global_batch(resolved)
    return length.plan(
        count=most if facts.samples is None else max(1, facts.samples - _held_out(training, facts.samples)),
        epochs=optimization.epochs,
        max_steps=optimization.max_steps,
        global_batch_size=_global_batch(resolved),
        world_size=resolved.world_size,
        micro=optimization.micro_batch_size,
    )


def _held_out(training: Training, samples: int) -> int:
    """About: which samples those are follows from their content."""
    evaluation = training.evaluation
    return 0 if evaluation is None or evaluation.data is not None else round(samples * float(evaluation.holdout))


def _steps(estimate: Forecast, resolved: Resolved, facts: RunFacts, run: length.Plan | None) -> None:
    training = _training(resolved)
    optimization, batch = training.optimization, _global_batch(resolved)
    most = "at most " if _fewer_batches(resolved) else ""
    of_batch = (
        f"a step takes {batch} {'sequences' if training.data.packing else 'samples'}, {most}{_accumulation(resolved)} micro-batches a rank"
    )
    estimate.figures |= {"globalBatchSize": batch, "accumulation": _accumulation(resolved)}
    if idle := idle_ranks(resolved, facts.samples_at_once):
        estimate.add("ranks", Outcome.WARNING, idle)
    if run is None:
        fix = "--samples N" if training.data.packing else "--samples N or --samples FILE"
        estimate.add("steps", Outcome.UNKNOWN, f"how many: {facts.samples_source}; {of_batch}", fix)
        return
    if facts.samples is None:
        estimate.figures["steps"] = run.total_steps
        estimate.add("steps", Outcome.NOTE, f"at most {run.total_steps} steps (maxSteps); {of_batch}")
        return
    held_out = _held_out(training, facts.samples or 0)
    about, without = ("about ", f" less {held_out} held out") if held_out else ("", "")
    epoch = ((facts.samples or 0) - held_out) / batch
    warmup = length.warmup_steps(float(optimization.warmup_steps), run.total_steps)
    warming = f", {warmup} of them to warm up" if warmup else ""
    estimate.figures |= {"samples": facts.samples, "stepsPerEpoch": round(epoch, 2), "steps": run.total_steps, "warmupSteps": warmup}
    estimate.add(
        "steps", Outcome.NOTE,
        f"{about}{run.total_steps} steps{warming}, {epoch:.4g} an epoch, of {facts.samples} samples{without} ({facts.samples_source});"
        f" {of_batch}",
    )  # fmt: skip


def _saves(estimate: Forecast, resolved: Resolved, settings: Settings, facts: RunFacts, run: length.Plan | None) -> None:
    training = _training(resolved)
    checkpoint = training.checkpoint
    if facts.shape is None:
        estimate.add("saves", Outcome.UNKNOWN, "how large a checkpoint is: the model's parameters are not known")
        return
    full = checkpoint.content == "Full"
    copies = checkpoint.replicas if resolved.storage_mode.value == "PerPod" else 1
    size = commit_bytes(facts.shape, settings, full=full, copies=copies)
    estimate.figures["checkpointBytes"] = size
    what = f"{decimal_size(size)} each ({checkpoint.content}, {'12' if full else settings.element_bytes} bytes a trained parameter)"
    if run is None:
        estimate.add("saves", Outcome.NOTE, f"a checkpoint every {checkpoint.every_steps} steps, {what}; how many: the steps are not known")
        return
    count, most = saves(run.total_steps, checkpoint.every_steps, checkpoint.keep, size, evaluates=training.evaluation is not None)
    estimate.figures |= {"checkpoints": count, "checkpointsMostBytes": most}
    estimate.add("saves", Outcome.NOTE, f"{count} checkpoints, {what}, at most {decimal_size(most)} on the volumes together")
    volumes = resolved.nodes if resolved.storage_mode.value == "PerPod" else 1
    room = number(resolved.profile.spec.storage.workspace_size) * volumes if facts.room_bytes is None else facts.room_bytes
    whose = "the cluster's workspace" if facts.room_bytes is None else "the free room in the hosts' workspaces"
    if most > room and not is_stand_in(resolved):
        estimate.add(
            "saves",
            Outcome.RISK,
            f"the checkpoints need {decimal_size(most)}, which is more than {whose} of {decimal_size(float(room))}",
            "lower checkpoint.keep, or give /workspace more",
        )


def _step_seconds(resolved: Resolved, settings: Settings, facts: RunFacts) -> float | None:
    """Seconds of a step by a measured number of tokens a step, else at most."""
    if facts.pace is None:
        return None
    tokens = facts.pace.tokens_per_step or _global_batch(resolved) * settings.max_length
    return tokens / facts.pace.tokens_per_second


def _time(estimate: Forecast, facts: RunFacts, run: length.Plan | None, seconds: float | None) -> None:
    if seconds is None or facts.pace is None:
        estimate.add(
            "time",
            Outcome.UNKNOWN,
            "how long: --tokens-per-second N (all ranks together), or with an earlier run's train_log.jsonl, says how fast it goes",
        )
        return
    measured = facts.pace.tokens_per_step is not None
    bound = "about" if measured else "at most"
    why = "its steps' tokens and speed" if measured else "every sample as long as maxLength"
    if run is None:
        estimate.add(
            "time", Outcome.UNKNOWN, f"{bound} {step_duration(seconds)} a step ({facts.pace.source}; {why}); how many steps is not known"
        )
        return
    total = seconds * run.total_steps
    estimate.figures |= {"stepSeconds": round(seconds, 3), "seconds": round(total, 1)}
    estimate.add(
        "time", Outcome.NOTE,
        f"{bound} {duration(round(total))}: {run.total_steps} steps of {step_duration(seconds)} ({facts.pace.source}; {why}); without"
        f" start, evaluation and restarts",
    )  # fmt: skip


def _speed(gigabits: float) -> str:
    return "less than 0.001" if gigabits < 0.001 else f"{gigabits:.3g}" if gigabits < 100 else f"{gigabits:,.0f}"
