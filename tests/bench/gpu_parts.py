"""Measures of gpu.py's rows, each in a process of its own: speed beside Hugging Face, the memory plan beside the peak, profiles, and what a
checkpoint costs.
"""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoint_ways import DcpAsync, DcpSync, DeepSpeed, Way
from checkpoint_ways import Lockstep as LockstepSaver
from gpu_model import Absent, Lockstep, Trainer, random_model, same_weights, start_trainer, synchronize, training_of
from gpu_rows import DEFAULT, LIGER, PEFT, ROWS, Row, tiny

from lockstep_train.base.errors import first_line, out_of_memory
from lockstep_train.base.ranks import Ranks
from lockstep_train.report.flops import FlopCount, count_flops, peak_flops

PROFILED_STEPS, TOP_KERNELS = 2, 15
LOSS_TOLERANCE = {"FP32": 1e-4, "BF16": 1e-2}
"""Relative tolerance of each step's loss: the same function of the same weights, in other kernels."""
NORM_TOLERANCE = {"FP32": 1e-3, "BF16": 5e-2}
"""Relative tolerance of the first step's gradient norm. The adapter's output is still zero then, so the first loss says nothing of the
backward pass.
"""
LEARNED = 3
"""Tolerances by which the reference's loss must fall: losses of models that learn nothing are equal whatever the updates are."""
Memory = dict[str, int]


@dataclass
class Started:
    """Trainers of a row that take part, in the row's order; why the others don't; and the memory of the default alone."""

    trainers: list[Trainer]
    absent: dict[str, str]
    memory: Memory
    parameters: int
    probed: dict[str, tuple[float, float]]
    """First step's loss and gradient norm without dropout, with an adapter whose output isn't zero; empty where the row has no dropout."""
    default: Any = None
    errors: list[str] = field(default_factory=list)


def start(row: Row, ranks: Ranks, folder: Path, precision: str) -> Started:
    """Start a row's trainers over one model's weights, and warm them up: the default first, whose memory is measured while nothing else has
    any.
    """
    model = random_model(row.config, precision, ranks.device)
    models = [same_weights(model) for _ in row.trainers[1:]] + [model]
    outputs: list[torch.Tensor] = []
    started = Started([], {}, {}, sum(parameter.numel() for parameter in model.parameters()), {})
    for name in sorted(row.trainers, key=lambda name: name != DEFAULT):
        reset_peak(ranks.device)
        try:
            trainer = start_trainer(name, row, models.pop(), ranks, folder, precision)
            if float(row.dropout):
                started.probed[name] = trainer.probe(1, outputs)
                reset_peak(ranks.device)
            trainer.steps(1, row.warm)
        except Exception as error:
            # Liger's kernels may not suit this transformers or this GPU
            if name == DEFAULT or not (isinstance(error, Absent) or name == LIGER or out_of_memory(error)):
                raise
            started.absent[name] = first_line(error)
            started.probed.pop(name, None)
            continue
        started.trainers.append(trainer)
        if name == DEFAULT:
            started.default, started.memory = trainer, peak(ranks.device)
    started.trainers.sort(key=lambda trainer: row.trainers.index(trainer.name))
    return started


def throughput(name: str, row: Row, ranks: Ranks, folder: Path, precision: str) -> dict[str, Any]:
    """Measure Lockstep's default alone for its memory, then all trainers in turns. `error`: reason why the row has no result."""
    started = start(row, ranks, folder, precision)
    flops = count_flops(started.default.engine.module)
    profiles = {trainer.name: profile_steps(trainer, 1 + row.warm) for trainer in started.trainers} if row.profiles else {}
    turns = take_turns(started, row, range(1 + row.warm, 1 + row.warm + row.block))
    documents = [length for step in range(row.block) for sample in row.documents(1 + row.warm + step) for length in sample]
    rows = {trainer.name: figures(trainer, turns[trainer.name], documents, flops, precision) for trainer in started.trainers}
    planned, peak_bytes = started.default.plan.total_bytes, started.memory["device"]
    rate = rows[DEFAULT]["tokens_per_second"]
    others = [rows[other]["tokens_per_second"] for other in (PEFT, LIGER) if other in rows]
    own = [each["tokens_per_second"] for other, each in rows.items() if other not in (DEFAULT, PEFT, LIGER)]
    if empty := [trainer for trainer, each in profiles.items() if not each["kernels_run"]]:
        started.errors.append(f"profiles without kernels: {', '.join(empty)}")
    return {
        "name": name,
        "parameters": started.parameters,
        "layers": row.config["num_hidden_layers"],
        "sequence": row.sequence,
        "micro_batch": row.micro,
        "samples": row.samples or row.micro,
        "lengths": row.lengths.value,
        "dropout": float(row.dropout),
        "hugging_face_recomputes": row.recompute,
        "precision": precision,
        "trainers": rows,
        "profiles": profiles,
        "absent": started.absent,
        **({"ratio_to_best_other": round(rate / max(others), 4)} if others else {}),
        **({"ratio_to_other_lockstep": round(rate / own[0], 4)} if own else {}),
        "planned_bytes": planned,
        "peak_bytes": peak_bytes,
        "plan_over_peak": round(planned / peak_bytes, 4) if row.full else None,
        **equality(started, precision),
        **({"error": "; ".join(started.errors)} if started.errors else {}),
    }


def take_turns(started: Started, row: Row, steps: range) -> dict[str, list[tuple[float, Memory]]]:
    """Return name → (seconds, peak memory) of each turn, in the order A B C D D C B A, so that none gains from what else the machine does.
    A trainer whose memory is exhausted leaves.
    """
    turns: dict[str, list[tuple[float, Memory]]] = {trainer.name: [] for trainer in started.trainers}
    largest = max(steps, key=lambda step: max(map(sum, row.documents(step))))
    alone = len(started.trainers) == 1
    for trainer in started.trainers if alone else [*started.trainers, *reversed(started.trainers)]:
        if trainer.name in started.absent:
            continue
        try:
            if not alone:
                reset_peak(trainer.device)
                trainer.steps(largest, 1)  # the allocator asks the device for memory again
            seconds = trainer.steps(steps.start, len(steps))
        except Exception as error:
            if trainer.name == DEFAULT or not out_of_memory(error):
                raise
            started.absent[trainer.name] = first_line(error)
            continue
        turns[trainer.name].append((seconds, peak(trainer.device)))
    started.trainers = [trainer for trainer in started.trainers if trainer.name not in started.absent]
    return turns


def figures(trainer: Trainer, turns: list[tuple[float, Memory]], documents: list[int], flops: FlopCount, precision: str) -> dict[str, Any]:
    """Return a trainer's figures, of tokens of documents: padding counts nothing. The operations are those that the mathematics needs, the
    same for all.
    """
    seconds = statistics.median(each for each, _ in turns)
    operations = flops.needed(documents) / seconds
    best, _ = peak_flops(torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "CPU", precision)
    return {
        "tokens_per_second": round(sum(documents) / seconds, 1),
        "step_seconds": round(seconds / trainer.row.block, 4),
        "turn_seconds": [round(each, 4) for each, _ in turns],
        "tflops": float(f"{operations / 1e12:.4g}"),
        "mfu": round(operations / best, 4) if best else None,
        "peak_allocated_bytes": max(memory["allocated"] for _, memory in turns),
        "peak_reserved_bytes": max(memory["reserved"] for _, memory in turns),
        "notes": trainer.notes,
    }


def equality(started: Started, precision: str) -> dict[str, Any]:
    """Compare what all trainers must agree on. They have had the same samples in the same order; dropout draws other numbers in each."""
    trainers, words = started.trainers, "all steps' losses and the first gradient norm"
    if len(trainers) == 1:
        return {}
    losses = {trainer.name: trainer.losses for trainer in trainers}
    norms = {trainer.name: trainer.norms[0] for trainer in trainers}
    fall = 1 - min(losses[DEFAULT]) / losses[DEFAULT][0]
    if started.probed:
        words = "the first step's loss and gradient norm without dropout, by one adapter whose output isn't zero"
        losses = {trainer.name: [started.probed[trainer.name][0]] for trainer in trainers}
        norms = {trainer.name: started.probed[trainer.name][1] for trainer in trainers}
    elif fall < LEARNED * LOSS_TOLERANCE[precision]:
        started.errors.append(f"nothing was learned: the loss fell by {fall:.2%}, less than {LEARNED} tolerances")
    difference = max(abs(1 - other / mine) for each in losses.values() for mine, other in zip(losses[DEFAULT], each, strict=True))
    norm_difference = max(abs(1 - norm / norms[DEFAULT]) for norm in norms.values())
    return {
        "equality": words,
        "first_losses": {name: each[0] for name, each in losses.items()},
        "last_losses": {name: each[-1] for name, each in losses.items()},
        "first_gradient_norms": norms,
        "largest_loss_difference": difference,
        "first_norm_difference": norm_difference,
        "losses_equal": difference <= LOSS_TOLERANCE[precision] and norm_difference <= NORM_TOLERANCE[precision],
    }


def profile_steps(trainer: Trainer, step: int) -> dict[str, Any]:
    """Return the kernels of a few steps of a trainer, by time, and the share of the time in which none ran. On a CPU its operations stand
    for kernels.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    on_gpu = trainer.device.type == "cuda"
    trainer.steps(step, 1)
    with recording(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as record:
        seconds = trainer.steps(step, PROFILED_STEPS)
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in record.events()
        if not getattr(event, "is_user_annotation", False) and (event.device_type == DeviceType.CUDA if on_gpu else not event.cpu_children)
    ]
    return {"step_seconds": round(seconds / PROFILED_STEPS, 4), "notes": trainer.notes, **summary(kernels)}


def summary(kernels: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """Return how many kernels (name, start, end) ran, the share of the time in which none did, and those that took most."""
    if not kernels:
        return {"kernels_run": 0, "idle_share": 1.0, "top": []}
    taken: dict[str, list[float]] = defaultdict(list)
    for kernel, start_, end in kernels:
        taken[kernel].append(end - start_)
    whole, longest = sum(map(sum, taken.values())), sorted(taken, key=lambda kernel: -sum(taken[kernel]))
    top = [
        {"kernel": kernel[:120], "share": round(sum(taken[kernel]) / whole, 4), "calls": len(taken[kernel])}
        for kernel in longest[:TOP_KERNELS]
    ]
    return {"kernels_run": len(kernels), "idle_share": round(idle_share([each[1:] for each in kernels]), 4), "top": top}


def idle_share(spans: Iterable[tuple[float, float]]) -> float:
    """Return the share of the time from the first start to the last end in which no span runs."""
    ordered = sorted(spans)
    first, busy = ordered[0][0], 0.0
    end = first
    for start_, stop in ordered:
        busy += max(0.0, stop - max(start_, end))
        end = max(end, stop)
    return 1 - busy / (end - first)


def reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> Memory:
    """Return bytes at their highest: of tensors, of what the allocator holds, and of all that this process has of the device."""
    if device.type != "cuda":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"allocated": resident, "reserved": resident, "device": resident}
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.max_memory_reserved(device)
    beside = total - free - torch.cuda.memory_reserved(device)
    return {"allocated": torch.cuda.max_memory_allocated(device), "reserved": reserved, "device": reserved + beside}


def checkpoint(name: str, row: Row, ranks: Ranks, folder: Path, precision: str) -> dict[str, Any]:
    """Blocks of steps with one save in each, beside the same without, for every way to save the same state."""
    model = random_model(row.config, precision, ranks.device)
    trainer = Lockstep(DEFAULT, row, training_of(row, folder, precision), model, ranks)
    ways: list[Way] = [way(trainer.engine, ranks, folder) for way in (LockstepSaver, DeepSpeed, DcpSync, DcpAsync)]
    trainer.steps(1, row.warm)
    failures = {}
    for way in tuple(ways):  # warms buffers and page cache up
        try:
            one_save(trainer, way, 1, 1)
        except Exception as error:
            if way.name == LockstepSaver.name:
                raise
            failures[way.name] = f"{type(error).__name__}: {first_line(error)}"
            ways.remove(way)
    rows = {way.name: {key: round(value, 6) for key, value in one_save(trainer, way, 2, row.block).items()} for way in ways}
    others = [values["stall_seconds"] for way, values in rows.items() if way != LockstepSaver.name]
    return {
        "name": name,
        "state_bytes": sum(path.stat().st_size for path in ways[0].folder(1).rglob("*") if path.is_file()),
        "ways": rows,
        "failed": failures,
        "tokens_lost_share": rows[LockstepSaver.name]["tokens_lost_share"],
        "stall_of_best_other": round(rows[LockstepSaver.name]["stall_seconds"] / min(others), 5),
    }


def one_save(trainer: Lockstep, way: Way, number: int, block: int) -> dict[str, float]:
    """`tokens_lost_share`: of those that the same time trains without a save, from the call until all is durable."""
    plain = sum(trainer.steps(1000 * number + step, 1) for step in range(2 * block)) / (2 * block)
    saving = trainer.saving
    saving.waited_seconds, saving.wait = 0.0, way.before_update
    called = time.monotonic()
    synchronize(trainer.device)
    began = time.monotonic()
    way.start(number)
    call = time.monotonic() - began
    seconds, taken = call, 0
    while taken < block or not durable(way):
        seconds += trainer.steps(1000 * number + taken, 1)
        taken += 1
        if taken > 50 * block:
            raise SystemExit(f"{way.name} is not durable after {taken} steps")
    committed = way.done() - called
    saving.wait = None
    without = plain * taken
    return {
        "stall_seconds": call + saving.waited_seconds,
        "commit_seconds": committed,
        "step_seconds": plain,
        "steps_beside": float(taken),
        "tokens_lost_share": max(0.0, (seconds - without) / seconds),
    }


def durable(way: Way) -> bool:
    """Return True if all of the save's files are on the volume, without waiting for them."""
    future = getattr(way, "_saving", None) or way._durable
    return bool(future.done())


def main(name: str, ranks: Ranks, folder: Path, small: bool) -> dict[str, Any]:
    """Measure a row."""
    print(f"{name}: begins", file=sys.stderr, flush=True)
    row = tiny(ROWS[name]) if small else ROWS[name]
    return {"checkpoint": checkpoint}.get(name, throughput)(name, row, ranks, folder, "FP32" if small else "BF16")
