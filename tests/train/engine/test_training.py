"""The same losses for any number of ranks and any stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, RunFile

from support.rounding import SAME_LOSS


def records(folder: Path, log: str = "train_log") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / f"{log}.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder)]


SHORT: dict[str, Any] = {"optimization": {"maxSteps": 3, "microBatchSize": 4, "warmupSteps": "1"}, "evaluation": {"everySteps": 2}}
"""A step of 14 samples is several uneven micro-batches on any number of ranks here, and the third step has samples of both epochs."""


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """Losses of one process; filled by the first test that needs it."""
    return {}


def one_process(ranks: ForkServer, run_file: RunFile, tmp_path: Path, reference: dict[str, Any]) -> dict[str, Any]:
    if not reference:
        ranks.run("main", [run_file("alone", **SHORT | {"optimization": SHORT["optimization"] | {"microBatchSize": 14}})])
        reference["losses"] = losses(tmp_path / "alone")
        reference["evaluations"] = [record["evalLoss"] for record in records(tmp_path / "alone", "eval_log")]
    return reference


@pytest.mark.parametrize("stage", ["Stage1", "Stage2", "Stage3"])
def test_two_ranks_give_the_losses_of_one_process_with_the_same_global_batch(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, reference: dict[str, Any], stage: str
) -> None:
    expected = one_process(ranks, run_file, tmp_path, reference)
    ranks.run("main", [run_file("two", zeroStage=stage, **SHORT)] * 2)
    assert losses(tmp_path / "two") == pytest.approx(expected["losses"], rel=SAME_LOSS)
    evaluations = [record["evalLoss"] for record in records(tmp_path / "two", "eval_log")]
    assert evaluations == pytest.approx(expected["evaluations"], rel=SAME_LOSS)
    assert len(evaluations) == 3  # before the first step, at step 2, at the end


def test_a_rank_count_that_does_not_divide_the_batch_gives_the_same_losses(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, reference: dict[str, Any]
) -> None:
    expected = one_process(ranks, run_file, tmp_path, reference)
    ranks.run("main", [run_file("three", zeroStage="Stage3", **SHORT)] * 3)
    assert losses(tmp_path / "three") == pytest.approx(expected["losses"], rel=SAME_LOSS)


def test_training_lowers_the_loss_on_samples_it_never_saw(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    ranks.run(
        "main",
        [run_file("learn", precision="BF16", optimization={"learningRate": "2e-2", "maxSteps": 16, "epochs": 10, "microBatchSize": 14})],
    )
    first, *_, last = [record["evalLoss"] for record in records(tmp_path / "learn", "eval_log")]
    assert last < 0.9 * first


def test_progress_lines_are_the_ones_people_grep_for(ranks: ForkServer, run_file: RunFile) -> None:
    ended = ranks.run("main", [run_file("lines", optimization={"maxSteps": 2})])
    assert "\nStep 2/2 | Loss: " in ended.output
    assert "\nEval Loss: " in ended.output
    assert "\nCHECKPOINT step 2 | " in ended.output


def test_plain_text_trains(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    text = tmp_path / "plain.txt"
    text.write_text("\n\n".join(f"Paragraph {number} says that shards are kept apart and read together." for number in range(30)))
    ranks.run("main", [run_file("plain", data={"path": str(text)}, optimization={"maxSteps": 2})])
