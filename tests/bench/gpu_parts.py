"""Parts of gpu.py, each in a process of its own: speed beside Hugging Face, the memory plan beside the peak, and what a checkpoint costs."""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint_ways import DcpAsync, DcpSync, DeepSpeed, Way
from checkpoint_ways import Lockstep as LockstepSaver
from gpu_model import (
    LARGE,
    TINY,
    HuggingFace,
    HuggingFaceDeepSpeed,
    Lockstep,
    Shape,
    Trainer,
    fitted,
    planned,
    random_model,
    same_weights,
    synchronize,
    training_of,
)

from lockstep_train.base.errors import first_line, out_of_memory
from lockstep_train.base.ranks import Ranks
from lockstep_train.memory.capacity import device_bytes
from lockstep_train.report.flops import FlopCount, count_flops, peak_flops

WARM_STEPS = 2
ROOM = 0.85
"""Share of the device's memory for models that are made as large as fits: a plan may be 10 % off."""
LOSS_TOLERANCE = {"FP32": 1e-4, "BF16": 1e-2}
"""Relative tolerance of the first step's loss: the same function of the same weights, in other kernels. The adapter's output is still zero."""


def throughput(name: str, ranks: Ranks, folder: Path, tiny: bool, rounds: int, block: int) -> dict[str, Any]:
    """Lockstep alone for its memory, then all trainers in turns."""
    device, precision = ranks.device, "FP32" if tiny else "BF16"
    capacity = device_bytes(device, 1) or 0
    shape = fitted((TINY if tiny else LARGE)[name], folder, precision, device, int(ROOM * capacity))
    training = training_of(shape, folder, precision)
    plan = planned(training, device, capacity)
    model = random_model(shape.config, precision, device)
    others = [same_weights(model), same_weights(model)]
    if shape.fits == "sequence":  # a step takes a minute, most of it attention
        warm, rounds, block = 1, 1, 1
    else:
        warm = WARM_STEPS
    parameters = sum(parameter.numel() for parameter in model.parameters())
    reset_peak(device)
    ours = Lockstep(shape, training, model, ranks)
    flops = count_flops(ours.engine.module)
    ours.steps(1, warm)
    memory = peak(device)
    trainers: list[Trainer] = [ours]
    failures = {}
    for kind, other in zip((HuggingFace, HuggingFaceDeepSpeed), others, strict=True):
        trainer = kind(shape, precision, other, device)
        try:
            trainer.steps(1, warm)
            trainers.append(trainer)
        except Exception as error:
            if not out_of_memory(error):
                raise
            failures[kind.name] = first_line(error)
    turns = take_turns(trainers, rounds, block, 1 + warm)
    tokens = shape.micro * shape.sequence
    rows = {trainer.name: row(tokens, block, turns[trainer.name], flops, shape, precision, device) for trainer in trainers}
    rates = [rows[trainer.name]["tokens_per_second"] for trainer in trainers]
    return {
        "name": name,
        "parameters": parameters,
        "layers": shape.config["num_hidden_layers"],
        "sequence": shape.sequence,
        "micro_batch": shape.micro,
        "gradient_checkpointing": shape.gradient_checkpointing,
        "precision": precision,
        "trainers": rows,
        "out_of_memory": failures,
        "ratio_to_best_other": round(rates[0] / max(rates[1:]), 4) if rates[1:] else None,
        **beside_plan(plan.total_bytes, memory),
        **losses(trainers, precision),
    }


def take_turns(trainers: Sequence[Trainer], rounds: int, block: int, step: int) -> dict[str, list[tuple[float, dict[str, int]]]]:
    """Name → (seconds, peak memory) of each block, in the order A B C C B A, so that none gains from what else the machine does."""
    turns: dict[str, list[tuple[float, dict[str, int]]]] = {trainer.name: [] for trainer in trainers}
    for _ in range(rounds):
        for trainer in [*trainers, *reversed(trainers)]:
            reset_peak(trainer.device)
            seconds = trainer.steps(step, block)
            turns[trainer.name].append((seconds, peak(trainer.device)))
        step += block
    return turns


def row(
    tokens: int, block: int, turns: list[tuple[float, dict[str, int]]], flops: FlopCount, shape: Shape, precision: str, device: torch.device
) -> dict[str, Any]:
    """One trainer's figures. The operations are those that the mathematics needs, the same for all."""
    seconds = statistics.median(each for each, _ in turns) / block
    operations = flops.needed([shape.sequence] * shape.micro) / seconds
    best, _ = peak_flops(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", precision)
    return {
        "tokens_per_second": round(tokens / seconds, 1),
        "step_seconds": round(seconds, 4),
        "block_seconds": [round(each, 4) for each, _ in turns],
        "tflops": float(f"{operations / 1e12:.4g}"),
        "mfu": round(operations / best, 4) if best else None,
        "peak_allocated_bytes": max(memory["allocated"] for _, memory in turns),
        "peak_reserved_bytes": max(memory["reserved"] for _, memory in turns),
    }


def beside_plan(planned_bytes: int, memory: dict[str, int]) -> dict[str, Any]:
    """The peak that a plan is held against is all that the device has given this process, with CUDA's own part and the allocator's gaps."""
    return {
        "planned_bytes": planned_bytes,
        "peak_bytes": memory["device"],
        "peak_allocated_bytes": memory["allocated"],
        "peak_reserved_bytes": memory["reserved"],
        "plan_over_peak": round(planned_bytes / memory["device"], 4),
    }


def losses(trainers: Sequence[Trainer], precision: str) -> dict[str, Any]:
    first = {trainer.name: trainer.losses[0] for trainer in trainers}
    reference = next(iter(first.values()))
    difference = max(abs(loss - reference) / reference for loss in first.values())
    last = {trainer.name: trainer.losses[-1] for trainer in trainers}
    equal = difference <= LOSS_TOLERANCE[precision]
    return {"first_losses": first, "last_losses": last, "first_loss_difference": difference, "losses_equal": equal}


def reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> dict[str, int]:
    """Bytes at their highest: of tensors, of what the allocator holds, and of all that this process has of the device."""
    if device.type != "cuda":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"allocated": resident, "reserved": resident, "device": resident}
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.max_memory_reserved(device)
    beside = total - free - torch.cuda.memory_reserved(device)
    return {"allocated": torch.cuda.max_memory_allocated(device), "reserved": reserved, "device": reserved + beside}


def checkpoint(name: str, ranks: Ranks, folder: Path, tiny: bool, rounds: int, block: int) -> dict[str, Any]:
    """Blocks of steps with one save in each, beside the same without, for every way to save the same state."""
    device, precision = ranks.device, "FP32" if tiny else "BF16"
    shape = (TINY if tiny else LARGE)[name]
    training = training_of(shape, folder, precision)
    trainer = Lockstep(shape, training, random_model(shape.config, precision, device), ranks)
    ways: list[Way] = [way(trainer.engine, ranks, folder) for way in (LockstepSaver, DeepSpeed, DcpSync, DcpAsync)]
    trainer.steps(1, WARM_STEPS)
    failures = {}
    for way in tuple(ways):  # warms buffers and page cache up
        try:
            one_save(trainer, way, 1, 1)
        except Exception as error:
            if way.name == LockstepSaver.name:
                raise
            failures[way.name] = f"{type(error).__name__}: {first_line(error)}"
            ways.remove(way)
    samples: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            samples[way.name].append(one_save(trainer, way, 2 + number, block))
    rows = {way: {key: round(statistics.median(each[key] for each in of_way), 6) for key in of_way[0]} for way, of_way in samples.items()}
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


def main(part: str, ranks: Ranks, folder: Path, tiny: bool, rounds: int, block: int) -> dict[str, Any]:
    print(f"{part}: begins", file=sys.stderr, flush=True)
    return (checkpoint if part == "checkpoint" else throughput)(part, ranks, folder, tiny, rounds, block)
