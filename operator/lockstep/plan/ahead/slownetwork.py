"""Seconds of a step on a measured network, and the judgement that a network is too slow for a run (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.api.files.clusterkeys import Calibration, PairsFigure
from lockstep_spec.choices import Method, ZeroStage
from lockstep_spec.settings import Settings
from lockstep_spec.traffic import Flow, total_bytes
from lockstep_spec.words import decimal_size, step_duration

MOST_SECONDS = 15.0
"""Seconds that a micro-batch's part of the traffic may take: several times what a GPU computes of it meanwhile."""


@dataclass(frozen=True)
class NetworkSpeed:
    """Rate of a node, and who states it."""

    gigabits: float
    """Decimal Gb/s that each node sends, and receives."""
    source: str

    def seconds(self, node_bytes: float) -> float:
        return node_bytes * 8 / (self.gigabits * 1e9)


def measured_speed(calibration: Sequence[Calibration], pairs: Sequence[PairsFigure], transport: str) -> NetworkSpeed | None:
    """Speed over this transport that the cluster file keeps: of the all-reduce sweep, which is a job's own traffic, else of the slowest pair."""
    sweep = next((one for one in calibration if one.transport.value == transport), None)
    if sweep is not None:
        best = max(float(point.busbw) for point in sweep.sweep) * 8
        if best > 0:
            return NetworkSpeed(best, f"the all-reduce of {sweep.day} (section calibration of the cluster file)")
    figure = next((one for one in pairs if one.transport.value == transport), None)
    if figure is not None and float(figure.least_gigabits) > 0:
        return NetworkSpeed(float(figure.least_gigabits), f"the slowest pair of nodes on {figure.day} (section pairs of the cluster file)")
    return None


def moves_weights(settings: Settings) -> bool:
    """Return True for a run that sends the model's weights or all of their gradients, and not just those of an adapter."""
    return settings.zero_stage is ZeroStage.STAGE3 or settings.method is Method.FULL


def too_slow(flows: Sequence[Flow], settings: Settings, accumulation: int, speed: NetworkSpeed | None) -> str:
    """Reason that this network is too slow for the run, with its seconds; '' if it isn't, or nobody has measured it.

    Only what moves weights is judged: Stage3, and full fine-tuning. A LoRA's gradients are small at Stage1 and Stage2.
    """
    if speed is None or not flows or not moves_weights(settings):
        return ""
    total = total_bytes(list(flows))
    seconds = speed.seconds(total)
    if seconds / accumulation <= MOST_SECONDS:
        return ""
    what = settings.zero_stage.value if settings.zero_stage is ZeroStage.STAGE3 else "full fine-tuning"
    each = f", {step_duration(seconds / accumulation)} a micro-batch" if accumulation > 1 else ""
    return (
        f"this network is too slow for {what}: a step sends {decimal_size(total)} from each node, which takes {step_duration(seconds)}{each}"
        f" at {speed.gigabits:.3g} Gb/s, {speed.source}"
    )


def remedy(settings: Settings) -> str:
    """Settings that send less."""
    if settings.method is Method.FULL:
        return (
            "method: LoRA sends only the adapter's gradients; else a larger globalBatchSize with zeroStage: Stage1, which sends once a step"
        )
    return (
        "zeroStage: Stage1 sends only the adapter's gradients, once a step; model.quantization makes the frozen weights fit on each GPU; "
        "hierarchicalPartition: Auto keeps the gathers inside of a node"
    )
