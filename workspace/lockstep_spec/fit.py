"""Does a run fit, and if not, which settings would (pure)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lockstep_spec.choices import Content, HierarchicalPartition, Method, Offload, Quantization, Recompute, ZeroStage
from lockstep_spec.memory import Item, Place, estimate
from lockstep_spec.settings import Level, Recomputed, Settings
from lockstep_spec.shape import ModelShape
from lockstep_spec.words import decimal_size, number_of

GB = 1e9
EVERYTHING = Recomputed(Level.ALL)
UNCERTAIN_SHARE = 0.5
"""Share of what is not certain that counts before a run is refused: a plan must never refuse what would have run."""
SHORTEST = 256
MOST_SAMPLES = 4096
"""Largest micro-batch, as the API has it."""
COPY_SHARE = 0.85
"""Share of a device's memory below which the plan must stay for what no run needs: a second copy of the weights or kept activations by
Auto, a micro-batch above the stated one.
"""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that a rank will need, of `capacity_bytes`."""

    shape: ModelShape
    settings: Settings
    place: Place
    capacity_bytes: int
    items: tuple[Item, ...]

    @property
    def total_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items)

    @property
    def least_bytes(self) -> float:
        """Bytes that are needed even if the estimate of everything uncertain is twice too high."""
        return sum(item.size_bytes * (1 if item.certain else UNCERTAIN_SHARE) for item in self.items)

    @property
    def fits(self) -> bool:
        return self.least_bytes <= self.capacity_bytes

    @property
    def tight(self) -> bool:
        return self.total_bytes > self.capacity_bytes

    def lines(self) -> list[str]:
        """Lines for people, the largest item first."""
        device = "GPU" if self.place.gpu else "rank"
        head = f"Memory plan per {device}: about {decimal_size(self.total_bytes)} of {decimal_size(self.capacity_bytes)}"
        rows = sorted(self.items, key=lambda item: -item.size_bytes)
        lines = [head, *(f"  {decimal_size(row.size_bytes):>10}  {row.name}{'' if row.certain else ' (estimated)'}" for row in rows)]
        if self._doubt:
            lines.append(f"  Activations are {self._doubt}")
        if self.fits and self.tight:
            lines.append("  This may run out of memory; if it does, " + "; or ".join(nearest_settings(self)))
        return lines

    @property
    def _doubt(self) -> str:
        model_type = self.shape.unmeasured
        return model_type and f"estimated for another architecture: those of model_type {model_type} have not been measured"

    def refusal(self) -> str | None:
        """Reason why this can't run, with settings that would; None when it may fit."""
        if self.fits:
            return None
        largest = max(self.items, key=lambda item: item.size_bytes)
        return (
            f"training needs about {decimal_size(self.total_bytes)} on each {'GPU' if self.place.gpu else 'rank'}, which has"
            f" {decimal_size(self.capacity_bytes)} (most of it: {largest.name},"
            f" {decimal_size(largest.size_bytes)}{self._doubt and f'; activations are {self._doubt}'}); what would fit:"
            f" {'; or '.join(nearest_settings(self))}"
        )


def plan_memory(shape: ModelShape, settings: Settings, place: Place, capacity_bytes: int) -> MemoryPlan:
    return MemoryPlan(shape, settings, place, capacity_bytes, tuple(estimate(shape, settings, place)))


def most_samples(shape: ModelShape, settings: Settings, place: Place, capacity_bytes: int) -> int:
    """Largest micro-batch that a device has room for: up to the stated size by the whole plan, and above it, which nobody asked for, below
    COPY_SHARE. At least 1.
    """

    def too_large(samples: int) -> bool:
        share = 1.0 if samples <= settings.micro_batch_size else COPY_SHARE
        return plan_memory(shape, replace(settings, micro_batch_size=samples), place, capacity_bytes).total_bytes > share * capacity_bytes

    return max(1, bisect_left(range(1, MOST_SAMPLES + 1), True, key=too_large))


def asked_partition(settings: Settings, place: Place) -> int | None:
    """Ranks that share a second copy of the weights, where that doesn't depend on memory; 1: no copy; None: it does.

    That copy saves sending the frozen weights between nodes two or three times a micro-batch. Only under Stage3, over several nodes
    with several ranks each. On CPUs Auto takes none: the network between them is no slower than the one within.
    """
    wanted = settings.hierarchical_partition
    useless = settings.zero_stage is not ZeroStage.STAGE3 or place.world_size == place.ranks_per_node or place.ranks_per_node < 2
    if useless or wanted is HierarchicalPartition.NONE:
        return 1
    if wanted is HierarchicalPartition.NODE:
        return place.ranks_per_node
    return None if place.gpu else 1


def choose_partition(shape: ModelShape, settings: Settings, place: Place, capacity_bytes: int) -> int:
    """`asked_partition`, and by Auto those of a node where a second copy leaves room (COPY_SHARE)."""
    asked = asked_partition(settings, place)
    if asked is not None:
        return asked
    with_copy = plan_memory(shape, settings, replace(place, partition=place.ranks_per_node), capacity_bytes)
    return place.ranks_per_node if with_copy.total_bytes < COPY_SHARE * capacity_bytes else 1


def choose_recomputed(
    shape: ModelShape | None, settings: Settings, place: Place, needs: Iterable[tuple[int, int]], unknown: str = ""
) -> tuple[Settings, str]:
    """Return the settings with what is computed again, and by Auto why: as few layers, and of each as little, as memory needs (COPY_SHARE).

    `needs`: of each rank the samples that it computes at once, and the bytes of its device; empty where these are not known. The choice is
    one for all ranks, which under Stage3 gather weights together. `unknown`: reason why memory can't be counted on; then Auto takes All, as
    where the plan itself isn't sure.
    """
    if settings.recompute is not Recompute.AUTO:
        return settings, ""
    needs = set(needs)
    if shape is None or not needs:
        unknown = "there is no memory plan"
    elif place.shared:
        unknown = "the GPU's memory is the machine's"
    elif shape.unmeasured:
        unknown = f"the activations of model_type {shape.unmeasured} have not been measured"
    if unknown or shape is None:
        return replace(settings, chosen=EVERYTHING), f"because {unknown}"
    parts = [*range(1, shape.layers), None]
    steps = [Recomputed(Level.NONE), *(Recomputed(level, layers) for level in Level if level for layers in parts)]

    def fits(chosen: Recomputed) -> bool:
        trial = replace(settings, chosen=chosen)
        plans = (plan_memory(shape, replace(trial, micro_batch_size=samples), place, size) for samples, size in needs)
        return all(plan.total_bytes <= COPY_SHARE * plan.capacity_bytes for plan in plans)

    chosen = steps[min(bisect_left(steps, True, key=fits), len(steps) - 1)]
    why = f"so that the plan takes at most {COPY_SHARE:.0%} of each device's memory" if fits(chosen) else "since memory is short"
    return replace(settings, chosen=chosen), why


Setting = tuple[Settings, Place]
Change = tuple[str, Callable[[Setting], Setting | None]]
"""Text to write, and the setting with it; None where that changes nothing or isn't allowed."""


def nearest_settings(plan: MemoryPlan) -> list[str]:
    """Up to three single changes after which the plan fits wholly, least costly first; else a few that do together; else what is left.
    Ranks on CPUs may also have more memory.
    """
    return [*_fewer_bytes(plan), *([] if plan.place.gpu else [_more_memory(plan)])]


def _more_memory(plan: MemoryPlan) -> str:
    ranks = plan.place.ranks_per_node
    gibibytes = -(-plan.total_bytes * ranks // 2**30)
    return (
        f"at least {gibibytes}Gi of memory for the {number_of(ranks, 'rank')} of a node (spec.resources.memory, or without it"
        " resources.limits.memory of the cluster file)"
    )


def _fewer_bytes(plan: MemoryPlan) -> list[str]:
    single: dict[str, str] = {}
    for text, change in _changes(plan):
        if _fits(plan, [change]):
            single.setdefault(text.split(":")[0], text)  # of several lengths the first: the longest
    if single:
        return list(single.values())[:3]
    chosen: dict[str, Change] = {}
    for text, change in _changes(plan):
        chosen[text.split(":")[0]] = (text, change)  # a shorter maxLength in place of a longer one
        if _fits(plan, [change for _, change in chosen.values()]):
            return [" with ".join(_needed(plan, chosen))]
    return [f"{'more or larger GPUs, ' if plan.place.gpu else ''}a smaller model, or Stage3 over more ranks"]


def _needed(plan: MemoryPlan, chosen: dict[str, Change]) -> list[str]:
    """Return those of the changes without which the others are not enough."""
    needed = dict(chosen)
    for key in chosen:
        rest = {other: change for other, change in needed.items() if other != key}
        if _fits(plan, [change for _, change in rest.values()]):
            needed = rest
    return [text for text, _ in needed.values()]


def _fits(plan: MemoryPlan, changes: list[Callable[[Setting], Setting | None]]) -> bool:
    """Wholly, and by these changes: at least one of them must change something."""
    setting = start = (plan.settings, plan.place)
    for change in changes:
        setting = change(setting) or setting
    return setting != start and not plan_memory(plan.shape, *setting, plan.capacity_bytes).tight


def relief(plan: MemoryPlan) -> list[str]:
    """Every change that lowers the need, with how much, the most first: advice after the device did run out of memory."""
    start = (plan.settings, plan.place)
    saved: dict[str, tuple[int, str]] = {}
    for text, change in _changes(plan):
        changed = change(start)
        if changed is not None:  # of several lengths the first: the longest
            need = plan_memory(plan.shape, *changed, plan.capacity_bytes).total_bytes
            saved.setdefault(text.split(":")[0], (plan.total_bytes - need, text))
    return [f"{text} (saves about {decimal_size(size)})" for size, text in sorted(saved.values(), reverse=True) if size > 0]


def after_out_of_memory(plan: MemoryPlan) -> list[str]:
    """Lines to print when a device ran out of memory."""
    advice = relief(plan) or ["more or larger GPUs, or a smaller model"]
    return [*plan.lines(), "What would lower it: " + "; ".join(advice)]


def _changes(plan: MemoryPlan) -> Iterator[Change]:
    """Yield changes, from what costs little time to what changes the training."""
    yield "hierarchicalPartition: None", lambda setting: _placed(setting, 1)
    yield (
        "optimization.recompute: All",
        lambda setting: _optimized(setting, recompute=Recompute.ALL, chosen=None) if setting[0].recomputed != EVERYTHING else None,
    )
    yield "optimization.microBatchSize: 1", lambda setting: _optimized(setting, micro_batch_size=1)
    yield "zeroStage: Stage2", lambda setting: _staged(setting, ZeroStage.STAGE2)
    yield "zeroStage: Stage3", lambda setting: _staged(setting, ZeroStage.STAGE3)
    yield "optimization.offload: CPU", _offloaded
    yield "checkpoint.content: Lite", _light
    length = plan.settings.max_length // 2
    while length >= SHORTEST:
        yield f"data.maxLength: {length}", _shortened(length)
        length //= 2
    yield "model.quantization: NF4", _quantized(plan.shape)
    yield "method: LoRA", lambda setting: (replace(setting[0], method=Method.LORA), setting[1])


def _placed(setting: Setting, partition: int) -> Setting | None:
    settings, place = setting
    return (settings, replace(place, partition=partition)) if place.partition != partition else None


def _optimized(setting: Setting, **changes: Any) -> Setting | None:
    settings, place = setting
    changed = replace(settings, **changes)
    return (changed, place) if changed != settings else None


def _staged(setting: Setting, stage: ZeroStage) -> Setting | None:
    settings, place = setting
    forbidden = stage is ZeroStage.STAGE3 and settings.quantization is not Quantization.NONE
    if stage.number <= settings.zero_stage.number or place.world_size < 2 or forbidden:
        return None
    return replace(settings, zero_stage=stage), place


def _offloaded(setting: Setting) -> Setting | None:
    return _optimized(setting, offload=Offload.CPU) if setting[1].gpu else None


def _light(setting: Setting) -> Setting | None:
    """Save the weights alone. On a GPU this changes nothing: the copy for a save is in the host's memory."""
    settings, place = setting
    return (replace(settings, content=Content.LITE), place) if settings.content is Content.FULL and not place.gpu else None


def _shortened(length: int) -> Callable[[Setting], Setting | None]:
    return lambda setting: (replace(setting[0], max_length=length), setting[1])


def _quantized(shape: ModelShape) -> Callable[[Setting], Setting | None]:
    def change(setting: Setting) -> Setting | None:
        settings, place = setting
        packed = settings.quantization is not Quantization.NONE
        if packed or settings.zero_stage is ZeroStage.STAGE3 or settings.method is Method.FULL or (shape.ragged and not place.gpu):
            return None
        return replace(settings, quantization=Quantization.NF4), place

    return change
