"""Full fine-tuning beside torch's AdamW in one process, with the decay groups of transformers' Trainer, and its loss that balances
experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, RunFile

from support.rounding import SAME_LOSS, forward_roundings, gradient_roundings, tolerance

STEPS = 3
FORWARD = forward_roundings(hidden=36, intermediate=44, attention=32, vocabulary=96, sequence=24)
APART = 2 * STEPS * tolerance(gradient_roundings(FORWARD, 24 + 19 + 14 + 9), results=500)
"""Of the way that a parameter went: each of the steps adds the roundings of its gradient, and of Adam's square root."""


FAMILIES = {"qwen2": 0.0, "qwen3_moe": 0.3, "mixtral": 0.2}
"""Family → the factor of its balance loss."""


@pytest.mark.parametrize(("stage", "size"), [("Stage1", 2), ("Stage2", 1), ("Stage3", 2)])
def test_every_weight_takes_the_way_that_torchs_adamw_gives_it(ranks: ForkServer, tmp_path: Path, stage: str, size: int) -> None:
    results: dict[str, Any] = ranks.run_each("full_steps", size, FAMILIES, tmp_path / "results.json", folder=str(tmp_path), stage=stage)
    for family in FAMILIES:
        result = results[family]
        assert min(result["moved"].values()) > 0
        shares = {name: apart / result["moved"][name] for name, apart in result["apart"].items()}
        assert max(shares.values()) < APART, {name: share for name, share in shares.items() if share >= APART}


def test_a_commit_from_before_vectors_were_spared_is_resumed_under_any_stage(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    """The flat buffers of one group of parameters are gone on with in those of two."""

    def train(name: str, folder: str, steps: int, decay: str, stage: str) -> dict[int, float]:
        optimization = {"maxSteps": steps, "warmupSteps": "0", "schedule": "Constant", "weightDecay": decay}
        optimization |= {"learningRate": "1e-3", "microBatchSize": 4, "globalBatchSize": 12}
        options: dict[str, Any] = {"method": "Full", "evaluation": None, "checkpoint": {"everySteps": 2}}
        ranks.run("main", [run_file(name, folder=folder, zeroStage=stage, optimization=optimization, **options)] * 2)
        records = [json.loads(line) for line in (tmp_path / folder / "logs" / "train_log.jsonl").read_text().splitlines()]
        return {record["step"]: record["loss"] for record in records}

    plain = train("plain", "plain", 4, "0", "Stage2")
    train("first", "both", 2, "0", "Stage2")
    both = train("second", "both", 4, "20", "Stage3")
    assert both[3] == pytest.approx(plain[3], rel=SAME_LOSS), "the decay changes only what comes after the third update"
    assert abs(both[4] - plain[4]) > 10 * SAME_LOSS * plain[4]
