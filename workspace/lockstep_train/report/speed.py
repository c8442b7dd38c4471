"""Speed of a run, and the time that is left."""

from __future__ import annotations

import resource
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep_spec.settings import Level, Recomputed
from lockstep_spec.training import TrainingConfig
from lockstep_train.report.flops import FlopCount, count_flops, peak_flops
from lockstep_train.report.reporter import Reporter

MEASURED_STEPS = 50


@dataclass
class Speed:
    """Speed of steps against what the devices could do."""

    flops: FlopCount | None
    """None: not counted, because the model is of an unknown kind."""
    devices: int
    peak: float | None
    """FLOP/s of one device."""
    recomputed: tuple[float, float]
    """Shares of the layers of which the backward pass computes products again, and attention; both 0: of none."""
    last_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED_STEPS))

    def step(self, seconds: float, documents: Sequence[int]) -> dict[str, float | None]:
        """Values of one step. `documents`: lengths in tokens of what all ranks trained on, padding left out."""
        self.last_seconds.append(seconds)
        needed = self.flops.needed(documents) if self.flops else None
        again = self.flops.recomputed(documents, *self.recomputed) if self.flops and any(self.recomputed) else None
        return {
            "tokens": sum(documents),
            "tokensPerSecond": sum(documents) / seconds,
            "mfu": self._share(needed, seconds),
            "hfu": self._share(needed + again, seconds) if needed is not None and again is not None else None,
            "stepSeconds": seconds,
        }

    def remaining_seconds(self, steps: int) -> float:
        """Seconds of so many steps like the last fifty: by their median, which one slow step doesn't move."""
        return statistics.median(self.last_seconds) * steps

    def _share(self, operations: float | None, seconds: float) -> float | None:
        return operations / seconds / (self.devices * self.peak) if operations is not None and self.peak is not None else None


def measure_speed(model: Any, training: TrainingConfig, recomputed: Recomputed, devices: int, reporter: Reporter) -> Speed:
    """Speed of a loaded model. What its MFU is computed from is in events.jsonl, or why there is none."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak, reason = peak_flops(device, training.precision.value)
    flops = None
    try:
        flops = count_flops(model)
    except AttributeError as error:  # a model whose configuration has other names than transformers' own
        reason = f"operations of this model are not counted: {error}"
    active = None if flops is None else flops.active_weights
    reporter.event("speed", device=device, devices=devices, peakFlops=peak, activeWeights=active, noMfuBecause=reason)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 1)
    shares = (recomputed.share(Level.ATTENTION, layers), recomputed.share(Level.ALL, layers))
    return Speed(flops, devices, peak, shares)


def peak_memory_bytes(on_gpu: bool) -> int:
    """Most memory that this rank has held: of the GPU's, or else of the machine's."""
    if on_gpu:
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_reserved_bytes(on_gpu: bool) -> int:
    """Most memory that torch had taken of the GPU's, with what lay unused between tensors; 0 on CPUs."""
    if not on_gpu:
        return 0
    import torch

    return int(torch.cuda.max_memory_reserved())


def across_ranks(reports: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """Compare the ranks by their `reports`: of each its peak memory in bytes, the seconds it computed in the step before, 0 when there was
    none, its peak of reserved memory, 0 on CPUs, and what else it may tell.
    """
    seconds = [row[1] for row in reports]
    slowest = seconds.index(max(seconds))
    measured = seconds[slowest] > 0
    return {
        "peakMemoryBytes": max(row[0] for row in reports),
        "peakReservedBytes": max(row[2] for row in reports) or None,
        "slowestRank": slowest if measured else None,
        "slowestRankSeconds": seconds[slowest] if measured else None,
        "medianRankSeconds": statistics.median(seconds) if measured else None,
    }
