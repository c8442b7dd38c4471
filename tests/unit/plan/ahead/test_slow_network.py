"""Seconds of a step on a measured network, and which runs it is too slow for; expected numbers are worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from golden.plan_cases import TRAINING, job, profile
from lockstep.api.files.clusterkeys import Calibration, PairsFigure
from lockstep.plan.ahead.forecast import Forecast, RunFacts, forecast
from lockstep.plan.ahead.planned import EXIT_CODES, sentence, verdict
from lockstep.plan.ahead.slownetwork import NetworkSpeed, measured_speed, too_slow
from lockstep.plan.ahead.traffic import Flow
from lockstep.plan.cluster.finding import Outcome
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.plan.render.run import trainer_config
from lockstep_spec.families import shape_from_config
from lockstep_spec.settings import size_settings

MOST_SECONDS = 15.0

LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
LAN = NetworkSpeed(0.94, "the slowest pair of nodes on 2026-11-24 (section pairs of the cluster file)")
FAST = NetworkSpeed(400.0, "the all-reduce of 2026-11-24 (section calibration of the cluster file)")


def planned(speed: NetworkSpeed | None, *, refuses: bool = True, device: str = "", **training: Any) -> Forecast:
    """Llama-3.1-8B on two nodes of one GPU: nothing can be gathered inside of a node."""
    lora = {} if training.get("method") == "Full" else {"lora": {"rank": 16}}
    stated = {
        **{key: value for key, value in TRAINING.items() if key != "lora"},
        **lora,
        "optimization": {"microBatchSize": 2, "globalBatchSize": 32},
        **training,
    }
    resolved = resolve(
        job(nodes=2, training=stated), profile(image="t", gpus={"perNode": 1, "type": "H100 80GB"}), PlatformDefaults(namespace="n")
    )
    facts = RunFacts(shape=shape_from_config(LLAMA_8B), capacity_bytes=80 * 10**9, speed=speed, refuses_slow_network=refuses, device=device)
    return forecast(resolved, facts)


def network(found: Forecast, outcome: Outcome) -> list[str]:
    return [one.message for one in found.findings if one.subject == "network" and one.outcome is outcome]


def test_a_step_has_its_seconds_on_the_measured_network() -> None:
    found = planned(LAN, zeroStage="Stage1")
    seconds = found.figures["stepNodeBytes"] * 8 / 0.94e9
    assert found.figures["networkStepSeconds"] == pytest.approx(seconds, rel=1e-3) and found.figures["measuredGigabitsPerSecond"] == 0.94
    assert any(
        message.startswith("that takes ") and message.endswith(f" a step at 0.94 Gb/s, {LAN.source}")
        for message in network(found, Outcome.NOTE)
    )
    assert not any("at 10" in message for message in network(found, Outcome.NOTE))
    assert any("at 10 s" not in message and "10 Gb/s" in message for message in network(planned(None, zeroStage="Stage1"), Outcome.NOTE))


def test_stage3_over_a_slow_lan_is_refused_with_the_seconds_and_what_to_change() -> None:
    found = planned(LAN, zeroStage="Stage3")
    (message,) = network(found, Outcome.REFUSED)
    assert (
        message.startswith("this network is too slow for Stage3: a step sends ")
        and "a micro-batch at 0.94 Gb/s, the slowest pair" in message
    )
    (finding,) = [one for one in found.findings if one.outcome is Outcome.REFUSED]
    assert finding.fix.startswith("zeroStage: Stage1 sends only the adapter's gradients")
    assert EXIT_CODES[verdict(found.findings)] == 1 and sentence(found.findings).startswith("refused: this network is too slow")


def test_where_a_start_does_not_refuse_it_is_a_warning() -> None:
    found = planned(LAN, refuses=False, zeroStage="Stage3")
    assert network(found, Outcome.REFUSED) == [] and any("too slow for Stage3" in message for message in network(found, Outcome.WARNING))


@pytest.mark.parametrize(
    ("stage", "gigabits", "share", "fix"),
    [
        ("Stage1", 0.94, 0, ""),
        ("Stage2", 2.0, 0, ""),
        ("Stage2", 0.94, 44, "zeroStage: Stage1 sends gradients once a step, and not after every micro-batch"),
        ("Stage1", 0.2, 40, "a larger globalBatchSize sends once for more samples"),
        ("Stage3", 1600.0, 0, ""),
        ("Stage3", 400.0, 51, "zeroStage: Stage1 sends only the adapter's gradients"),
    ],
)
def test_a_network_that_takes_more_than_three_tenths_of_a_step_is_told(stage: str, gigabits: float, share: int, fix: str) -> None:
    found = planned(NetworkSpeed(gigabits, "measured"), device="NVIDIA H100 80GB HBM3", zeroStage=stage)
    told = [one for one in found.findings if "of a step:" in one.message]
    assert len(told) == bool(share) and found.figures["networkStepSeconds"] > 0
    if told:
        assert told[0].message.startswith(f"the network takes about {share}% of a step: ") and told[0].fix.startswith(fix)


def test_a_share_is_not_told_where_nobody_knows_how_fast_the_gpu_is() -> None:
    for device, told in (
        ("Some GPU", False),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", False),
        ("NVIDIA L4", True),
        ("", True),
    ):  # (the cluster's gpus.type stands in for no name)
        found = planned(NetworkSpeed(0.02, "measured"), device=device, zeroStage="Stage2")
        assert any("of a step:" in one.message for one in found.findings) == told


@pytest.mark.parametrize("stage", ["Stage1", "Stage2"])
def test_a_loras_gradients_may_go_over_any_network(stage: str) -> None:
    assert network(planned(LAN, zeroStage=stage), Outcome.REFUSED) == []


def test_a_fast_network_carries_stage3_and_an_unmeasured_one_is_not_judged() -> None:
    assert network(planned(FAST, zeroStage="Stage3"), Outcome.REFUSED) == []
    assert network(planned(None, zeroStage="Stage3"), Outcome.REFUSED) == []


def test_full_fine_tuning_is_judged_at_every_stage() -> None:
    (message,) = network(planned(LAN, method="Full", zeroStage="Stage2"), Outcome.REFUSED)
    assert "too slow for full fine-tuning" in message


def test_the_limit_is_of_a_micro_batch_and_not_of_a_step() -> None:
    second = NetworkSpeed(8.0, "x")  # a GB a second
    flows = [Flow("weights", round(MOST_SECONDS * 4 * 1e9))]
    config = resolve(job(nodes=2, training={**TRAINING, "zeroStage": "Stage3"}), profile(image="t"), PlatformDefaults(namespace="n"))
    assert config.training is not None
    sizes = size_settings(trainer_config(config.training))
    assert too_slow(flows, sizes, 4, second) == ""
    assert "which takes 60s, 20s a micro-batch at 8 Gb/s, x" in too_slow(flows, sizes, 3, second)
    assert too_slow([], sizes, 1, second) == ""


SWEEP = Calibration.model_validate(
    {
        "transport": "TCP",
        "nodes": 2,
        "ranks": 8,
        "day": "2026-11-21",
        "sweep": [{"bytes": 1, "busbw": "0.2"}, {"bytes": 2, "busbw": "1.25"}],
    }
)
PAIRS = PairsFigure.model_validate({"transport": "TCP", "nodes": 3, "day": "2026-11-24", "leastGigabits": "0.94", "usualGigabits": "2.3"})


def test_a_jobs_own_traffic_counts_before_pairs_and_only_of_its_transport() -> None:
    assert measured_speed([SWEEP], [PAIRS], "TCP") == NetworkSpeed(
        10.0, "the all-reduce of 2026-11-21 (section calibration of the cluster file)"
    )
    assert measured_speed([], [PAIRS], "TCP") == LAN
    assert measured_speed([SWEEP], [PAIRS], "RDMA") is None
