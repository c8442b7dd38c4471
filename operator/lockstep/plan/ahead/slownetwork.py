"""Seconds of a step on a measured network, and the judgement that a network is too slow for a run (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lockstep.api.cluster import Network
from lockstep.api.files.clusterkeys import Calibration, PairsFigure
from lockstep.plan.ahead.traffic import Flow, total_bytes
from lockstep.plan.render.fabric import Transport
from lockstep_spec.choices import Method, Quantization, ZeroStage
from lockstep_spec.gpus import known_peak
from lockstep_spec.memory import Place
from lockstep_spec.settings import Level, Settings
from lockstep_spec.shape import ModelShape
from lockstep_spec.words import decimal_size, step_duration

MOST_SECONDS = 15.0
"""Seconds that a micro-batch's part of the traffic may take: several times what a GPU computes of it meanwhile."""
MOST_SHARE = 0.3
"""Share of a step above which a plan warns of the network."""
USUAL_SHARE = 0.4
"""Share of its peak at which a GPU is taken to compute."""
LEAST_GIGABITS = {Transport.TCP: 10, Transport.RDMA: 100}
"""Gb/s of a node's sockets, and of one of its rails, that are assumed where they were not measured."""


@dataclass(frozen=True)
class NetworkSpeed:
    """Rate of a node, and who states it."""

    gigabits: float
    """Decimal Gb/s that each node sends, and receives."""
    source: str

    def seconds(self, node_bytes: float) -> float:
        return node_bytes * 8 / (self.gigabits * 1e9)


def measured_speed(calibration: Sequence[Calibration], pairs: Sequence[PairsFigure], transport: str) -> NetworkSpeed | None:
    """Speed over this transport that the cluster file keeps: of the all-reduce sweep, which is a job's own traffic, else of the slowest
    pair.
    """
    sweep = next((one for one in calibration if one.transport.value == transport), None)
    if sweep is not None:
        best = max(float(point.busbw) for point in sweep.sweep) * 8
        if best > 0:
            return NetworkSpeed(best, f"the all-reduce of {sweep.day} (section calibration of the cluster file)")
    figure = next((one for one in pairs if one.transport.value == transport), None)
    if figure is not None and float(figure.least_gigabits) > 0:
        return NetworkSpeed(float(figure.least_gigabits), f"the slowest pair of nodes on {figure.day} (section pairs of the cluster file)")
    return None


def stated_speed(network: Network, transport: Transport) -> NetworkSpeed:
    """Return the speed by the cluster file where it was not measured: network.minimum_busbw, else what the transport has at least."""
    if network.minimum_busbw is not None:
        return NetworkSpeed(float(network.minimum_busbw) * 8, "the cluster's network.minimum_busbw")
    rails = max(1, len(network.rdma.rails)) if transport is Transport.RDMA else 1
    return NetworkSpeed(LEAST_GIGABITS[transport] * rails, "assumed, not measured (lockstep cluster calibrate --save)")


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
        f"this network is too slow for {what}: a step sends {decimal_size(total)} from each node, which takes"
        f" {step_duration(seconds)}{each} at {speed.gigabits:.3g} Gb/s, {speed.source}"
    )


def large_share(flows: Sequence[Flow], shape: ModelShape, settings: Settings, samples: int, speed: NetworkSpeed, device: str) -> str:
    """Sentence about a network that takes more than 30 % of a step; '' if it doesn't, or nobody knows how fast the GPU is.

    `samples` of a rank in a step; `device`: the slowest GPU's name. The GPU is assumed to compute at 40 % of its peak. Few trainings reach
    that, so the real share is usually lower. Experts that a token doesn't visit can't be told from the shape, so mixtures of experts aren't
    judged.
    """
    peak = known_peak(device)
    if peak is None or shape.experts_per_token or not flows:
        return ""
    weights = sum(weight.numel for weight in shape.weights if weight.linear)
    operations = (6 if settings.method is Method.FULL else 4) + 2 * settings.recomputed.share(Level.ATTENTION, shape.layers)
    compute = operations * weights * samples * settings.max_length / (USUAL_SHARE * peak)
    sent = speed.seconds(total_bytes(list(flows)))
    share = sent / (sent + compute)
    if share <= MOST_SHARE:
        return ""
    return (
        f"the network takes about {share:.0%} of a step: {step_duration(sent)} to send at {speed.gigabits:.3g} Gb/s,"
        f" {step_duration(compute)} to compute at {USUAL_SHARE:.0%} of the peak of {device}"
    )


def slowest(devices: Iterable[str]) -> str:
    """Name of the GPU with the lowest peak; one that nobody knows counts as the lowest. '' without any."""
    return min(devices, key=lambda device: known_peak(device) or 0.0, default="")


def remedy(settings: Settings, place: Place, fits: Callable[[Settings, Place], bool]) -> str:
    """Return the settings that send less, of an adapter those alone that still fit into memory."""
    if not moves_weights(settings):
        at_once = settings.zero_stage is ZeroStage.STAGE1
        return (
            "a larger globalBatchSize sends once for more samples"
            if at_once
            else "zeroStage: Stage1 sends gradients once a step, and not after every micro-batch"
        )
    if settings.method is Method.FULL:
        return (
            "method: LoRA sends only the adapter's gradients; else a larger globalBatchSize with zeroStage: Stage1, which sends once a step"
        )
    once, alone = replace(settings, zero_stage=ZeroStage.STAGE1), replace(place, partition=1)
    node = (settings, replace(place, partition=place.ranks_per_node))
    changes = {
        "zeroStage: Stage1 sends only the adapter's gradients, once a step": (once, alone),
        "zeroStage: Stage1 with model.quantization: NF4 sends as little": (replace(once, quantization=Quantization.NF4), alone),
        **({"hierarchicalPartition: Node keeps the gathers inside of a node": node} if place.world_size > place.ranks_per_node > 1 else {}),
    }
    fitting = [text for text, change in changes.items() if fits(*change)]
    return "; ".join(fitting) or "no setting that sends less fits into this memory: take a faster network (RDMA), or nodes with more memory"
