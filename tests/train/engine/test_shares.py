"""Real ranks that compute unlike numbers of samples: the same training, in less time."""

from __future__ import annotations

import json
import socket
import statistics
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, RunFile

from lockstep_train.checkpoint.format.manifest import decode
from support.rounding import SAME_LOSS

EXACT = 1e-6
"""Relative, between two orders of adding the same gradients in FP32."""


def records(folder: Path, log: str = "train_log") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / f"{log}.jsonl").read_text().splitlines()]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in records(folder, "events") if event["kind"] == kind]


SHARES: dict[int, list[tuple[int, list[int]]]] = {
    2: [(1, [1, 3]), (7, [3, 1]), (5, [1, 2])],
    3: [(2, [2, 1, 3]), (13, [6, 1, 2]), (7, [2, 1, 2]), (2, [1, 1, 1])],
}
"""Ranks → samples of a step and the sizes of their micro-batches: with ranks that have none in the last turn, in a whole step, or ever."""


@pytest.mark.parametrize(("stage", "world_size"), [("Stage1", 3), ("Stage2", 3), ("Stage3", 3), ("Stage2", 2)])
def test_any_shares_give_the_loss_and_the_gradients_of_equal_ones(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, stage: str, world_size: int
) -> None:
    output = tmp_path / "draws.json"
    path = run_file("drawn", zeroStage=stage, evaluation=None, optimization={"maxSteps": None, "weightDecay": "0", "maxGradientNorm": "0"})
    ranks.run("first_step_by_any_shares", [path] * world_size, arguments={"output": str(output), "shares": SHARES[world_size]})
    outcomes = json.loads(output.read_text())
    assert len(outcomes) == len(SHARES[world_size])
    for name, (equal, *others) in outcomes.items():
        assert len(others) == 3
        for other in others:
            assert other[:2] == pytest.approx(equal[:2], rel=EXACT), name
            assert other[2] == equal[2], f"{name}: each sample once"


def trained(*files: Path) -> dict[int, list[int]]:
    """Step → samples that any rank has trained on."""
    samples: dict[int, list[int]] = {}
    for file in files:
        for line in file.read_text().splitlines():
            step, indices = json.loads(line)
            samples.setdefault(step, []).extend(indices)
    return {step: sorted(indices) for step, indices in samples.items()}


def test_a_run_goes_on_with_other_shares_and_ranks_on_the_same_samples(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    """On three ranks of two nodes, which state unlike sizes; then on two."""

    def train(name: str, path: Path, *nodes: int, kill: int | None = None) -> list[int]:
        given = {"output": str(tmp_path / name), "kill": kill}
        return ranks.run("record_samples", [path] * sum(nodes), nodes=nodes, arguments=given, codes=None, kill_rest_after_first=True).codes

    for name in ("all", "before", "after"):
        (tmp_path / name).mkdir()
    short: dict[str, Any] = {"evaluation": None, "optimization": {"maxSteps": 4}}
    assert train("all", run_file("whole", evaluation=None, optimization={"maxSteps": 4, "microBatchSize": 14}), 1) == [0]
    assert train("before", run_file("moved", micro_batches=[3, 1], **short), 2, 1, kill=4)[1] == -9
    assert train("after", run_file("moved", micro_batches=[1, 4], zeroStage="Stage3", **short), 1, 1) == [0, 0]
    assert [event["shares"] for event in events(tmp_path / "moved", "balance")] == [[0.4286, 0.4286, 0.1429], [0.2, 0.8]]
    expected = trained(*(tmp_path / "all").iterdir())
    later = trained(*(tmp_path / "after").iterdir())
    assert min(later) > 1, "the crash left no commit"
    assert {**trained(*(tmp_path / "before").iterdir()), **later} == expected
    losses = {name: [record["loss"] for record in records(tmp_path / name)] for name in ("whole", "moved")}
    assert losses["moved"] == pytest.approx(losses["whole"], rel=SAME_LOSS)


SETTINGS: dict[str, Any] = {
    "evaluation": None,
    "optimization": {"balance": "Measured", "microBatchSize": 8, "globalBatchSize": 24, "maxSteps": 2, "epochs": 200},
    "checkpoint": {"everySteps": 100},
}


@pytest.mark.parametrize("stage", ["Stage1", "Stage2", "Stage3"])
def test_tokens_follow_the_measured_speed_and_the_losses_stay(ranks: ForkServer, run_file: RunFile, tmp_path: Path, stage: str) -> None:
    speeds = {"0": 0.04, "1": 0.04 / 0.55, "2": 0.04 / 0.5}
    path = run_file("unlike", zeroStage=stage, **SETTINGS)
    ended = ranks.run("train_unlike", [path] * 3, arguments={"seconds": speeds})
    (balance,) = events(tmp_path / "unlike", "balance")
    assert 0.4 < balance["shares"][0] < 0.6, balance
    assert all(0.2 < share < 0.34 for share in balance["shares"][1:]), balance
    assert "Balance: a step's tokens by speed: " in ended.outputs[0]
    equal = run_file("equal", zeroStage=stage, **{**SETTINGS, "optimization": {**SETTINGS["optimization"], "balance": "Equal"}})
    ranks.run("main", [equal] * 3)
    for name in ("loss", "gradientNorm"):
        unlike, same = ([record[name] for record in records(tmp_path / run)] for run in ("unlike", "equal"))
        assert unlike[0] == pytest.approx(same[0], rel=EXACT)
        assert unlike == pytest.approx(same, rel=SAME_LOSS)


@pytest.mark.parametrize(("stage", "precision"), [("Stage1", "FP32"), ("Stage2", "BF16"), ("Stage3", "BF16")])
def test_measuring_changes_no_bit_of_what_is_learned(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, stage: str, precision: str
) -> None:
    optimization: dict[str, Any] = {"maxSteps": 2, "microBatchSize": 4}
    settings: dict[str, Any] = {"zeroStage": stage, "precision": precision, "lora": {"dropout": "0.1"}, "evaluation": None}
    ranks.run("main", [run_file("equal", optimization=optimization, **settings)] * 2)
    settings["optimization"] = optimization | {"balance": "Measured"}
    ranks.run("measure_and_keep", [run_file("measured", **settings)] * 2)
    assert len(events(tmp_path / "measured", "balance")) == 1
    commits = [decode((tmp_path / name / "checkpoints/step-2.a1/manifest.json").read_bytes()) for name in ("equal", "measured")]
    assert commits[0].shards == commits[1].shards
    assert commits[0].identity == commits[1].identity
    assert [record["loss"] for record in records(tmp_path / "equal")] == [record["loss"] for record in records(tmp_path / "measured")]


def test_a_rank_that_slows_down_gets_fewer_samples_at_the_next_commit(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    usual = {"0": 0.03, "1": 0.03}
    settings = {**SETTINGS, "optimization": {**SETTINGS["optimization"], "maxSteps": 24}, "checkpoint": {"everySteps": 8}}
    given = {"seconds": usual, "later": {"0": 0.03, "1": 0.09}, "after": 8, "watched": 6}
    ended = ranks.run("train_unlike", [run_file("throttled", **settings)] * 2, arguments=given)
    first, *renewed = events(tmp_path / "throttled", "balance")
    assert abs(first["shares"][0] - first["shares"][1]) < 0.1
    assert [event["step"] for event in renewed] == [16], "at the first commit after it, and once"
    assert renewed[0]["shares"][0] > 2 / 3
    assert "Balance after step 16: a step's tokens by speed: " in ended.outputs[0]
    ranks.run("main", [run_file("alone", **{**settings, "optimization": {**settings["optimization"], "balance": "Equal"}})])
    throttled, alone = ([record["loss"] for record in records(tmp_path / run)] for run in ("throttled", "alone"))
    assert throttled == pytest.approx(alone, rel=SAME_LOSS)


def test_a_rank_with_half_the_memory_gets_no_more_than_its_own_plan(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    """Though it is the fastest. And a size that its node states but its memory can't hold is refused."""
    half = 969_000_000
    given: dict[str, Any] = {"seconds": {"0": 0.02, "1": 0.005}, "bytes_of": {"0": 2 * half, "1": half}}
    ranks.run("train_unlike", [run_file("half", **SETTINGS)] * 2, nodes=2, arguments=given)
    (balance,) = events(tmp_path / "half", "balance")
    (plan,) = events(tmp_path / "half", "memoryPlan")
    assert plan["totalBytes"] <= plan["capacityBytes"] == half
    least, stated, most = balance["mostTokens"][1], SETTINGS["optimization"]["microBatchSize"] * 64, balance["mostTokens"][0]
    assert 64 <= least < stated < most
    refused = ranks.run(
        "train_unlike", [run_file("refused", micro_batches=[0, 4000], **SETTINGS)] * 2, nodes=2, arguments=given, codes=None
    )
    assert refused.codes != [0, 0]
    assert "node 1: training needs about " in refused.output


def test_a_rank_with_more_samples_by_its_share_is_not_slow(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    """Both compute equally fast; one has three times the samples."""
    path = run_file(
        "stated", micro_batches=[6, 2], evaluation=None, checkpoint={"everySteps": 100},
        optimization={"maxSteps": 12, "epochs": 20, "globalBatchSize": 8},
    )  # fmt: skip
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "agent.sock"))
        agent.settimeout(60)
        given = {"seconds": {"0": 0.04, "1": 0.04}, "pace_seconds": 0.0}
        outputs = ranks.start("train_unlike", [path] * 2, nodes=2, arguments=given, LOCKSTEP_REPORT_SOCKET=str(tmp_path / "agent.sock"))
        heard: list[dict[str, Any]] = []
        while not heard or heard[-1]["event"] not in {"end", "error"}:
            heard.append(json.loads(agent.recv(65536)))
        assert ranks.wait(outputs).codes == [0, 0]
    paces = [
        statistics.median(event["microseconds"] for event in heard if event["event"] == "pace" and event["rank"] == rank) for rank in (0, 1)
    ]
    assert max(paces) < 1.25 * min(paces), paces
