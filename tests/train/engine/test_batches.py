"""A step's samples divided by tokens and joined without padding: the same update as by padded rows, with less to compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases_models import OTHERS
from cases_shares import LONGEST, MICRO, STEPS, ragged
from rank_harness import ForkServer, RunFile

from lockstep_spec.choices import Batches
from lockstep_train.checkpoint.format.manifest import decode, seal, unseal

EXACT = 1e-6
"""Relative, between two orders of adding the same numbers in FP32."""
OUTPUT = {"lfm2_moe": "out_proj"}
"""Name of attention's last layer, where it is another than most families'."""
BY_ROWS = frozenset({"falcon_h1", "granitemoehybrid", "lfm2_moe", "llama4_text", "minimax", "nemotron_h", "qwen3_5_text", "qwen3_next"})
"""Families whose layers see what is before a document, or limit attention in chunks of the whole row."""
PARTS = 4
"""Groups of families, each of which ends within a group's time limit on a busy machine."""
GROUPS: dict[str, tuple[str, int, list[str]]] = {
    "Stage1 on 1 rank": ("Stage1", 1, ["gemma3_text"]),
    "Stage2 on 3 ranks": ("Stage2", 3, ["qwen3"]),
    "Stage3 on 2 ranks": ("Stage3", 2, ["glm4_moe"]),
    "Stage3 on 4 ranks": ("Stage3", 4, ["qwen3"]),
}


def outcomes(ranks: ForkServer, folder: Path, stage: str, size: int, families: list[str]) -> dict[str, Any]:
    variants = {
        family: {"family": family, "lora": {"targetModules": [OUTPUT.get(family, "o_proj")]}, "gc": size % 2 == 0, "learningRate": "5e-3"}
        for family in families
    }
    ends = ranks.run_each("same_update", size, variants, folder / "outcomes.json", folder=str(folder), stage=stage)
    return {family: ends[family] for family in families}


def check_same_update(outcome: dict[str, Any]) -> None:
    rows, tokens = outcome["Rows"], outcome["Tokens"]
    assert (rows["batches"], tokens["batches"], tokens["said"]) == ("Rows", "Tokens", [])
    assert len(set(rows["losses"])) == STEPS, "equal losses say nothing"
    assert tokens["losses"] == pytest.approx(rows["losses"], rel=EXACT)
    assert tokens["norm"] == pytest.approx(rows["norm"], rel=EXACT)


def check_work(outcome: dict[str, Any]) -> None:
    """By tokens each is computed once, in micro-batches with room for it, of which all ranks have equally many."""
    by_rows, by_tokens = (outcome[name]["computed"] for name in ("Rows", "Tokens"))
    for step in range(STEPS):
        real = sum(len(example.ids) for example in ragged(step + 1))
        computed = [rank[step] for rank in by_tokens]
        assert sum(map(sum, computed)) == real <= sum(sum(rank[step]) for rank in by_rows)
        assert max(micro for rank in computed for micro in rank) <= MICRO * LONGEST
        assert max(map(len, computed)) <= max(len(rank[step]) for rank in by_rows)


@pytest.mark.parametrize("group", GROUPS)
def test_ten_steps_by_tokens_are_those_by_rows(ranks: ForkServer, tmp_path: Path, group: str) -> None:
    stage, size, families = GROUPS[group]
    for outcome in outcomes(ranks, tmp_path, stage, size, families).values():
        check_same_update(outcome)
        check_work(outcome)


def logged(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "logs" / "train_log.jsonl").read_text().splitlines()]


def test_a_run_with_a_commit_goes_on_as_it_began(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    """By rows, though the file now says nothing, and the commit is then one by rows, too."""

    def train(name: str, steps: int, **optimization: Any) -> str:
        path = run_file(name, evaluation=None, optimization={"maxSteps": steps, "schedule": "Constant", **optimization})
        ended = ranks.run("main", [path] * 2)
        return ended.outputs[0]

    assert "global batch 14 (accumulation 4)" in train("whole", 4, batches="Rows")
    train("moved", 2, batches="Rows")
    output = train("moved", 4)
    commit = tmp_path / "moved/checkpoints/step-2.a1"
    assert f"Batches: Rows, as in {commit}, and not Tokens: a run goes on as it began" in output
    assert "global batch 14 (accumulation 4)" in output
    assert logged(tmp_path / "moved") == logged(tmp_path / "whole")
    manifest = decode((tmp_path / "moved/checkpoints/step-4.a2/manifest.json").read_bytes())
    assert manifest.batches is Batches.ROWS
    assert "(by tokens)" in train("fresh", 1)


def test_a_commit_from_before_batches_were_recorded_was_trained_by_rows(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    ranks.run("main", [run_file(evaluation=None, optimization={"maxSteps": 2})])
    manifest = unseal((tmp_path / "run/checkpoints/step-2.a1/manifest.json").read_bytes())
    assert manifest.pop("batches") == "Tokens"
    assert decode(seal(manifest)).batches is Batches.ROWS


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("stage", "size"), [("Stage2", 2), ("Stage3", 2)])
def test_ten_steps_by_tokens_are_those_by_rows_in_every_family_or_it_trains_by_rows(
    ranks: ForkServer, tmp_path: Path, stage: str, size: int, part: int
) -> None:
    every = sorted({*OTHERS, "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe", "glm4_moe"})
    assert len(every) - len(BY_ROWS) >= 15
    families = every[part::PARTS]
    results = outcomes(ranks, tmp_path, stage, size, families)
    by_rows = {family: outcome["Tokens"] for family, outcome in results.items() if outcome["Tokens"]["batches"] == "Rows"}
    assert set(results) == set(families)
    assert set(by_rows) == BY_ROWS & set(families)
    for family, outcome in by_rows.items():
        assert outcome["said"][0].startswith("Batches: this model trains by rows"), family
        assert outcome["losses"] == results[family]["Rows"]["losses"], family
    for family in results.keys() - by_rows:
        check_same_update(results[family])
