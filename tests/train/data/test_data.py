"""Packed and unpacked are the same training; no document sees another; data is prepared once a volume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, RunFile

from support.rounding import SAME_LOSS


def losses(folder: Path, log: str = "train_log", key: str = "loss") -> list[float]:
    return [json.loads(line)[key] for line in (folder / "logs" / f"{log}.jsonl").read_text().splitlines()]


CASES = {
    "a real chat template gives the masks of the assistant's turns": ("chat_masks", 1, "model", "folder"),
    "a chat template of the run's own is used with its variables": ("own_template", 1, "model", "folder"),
    "several processes tokenize what one does, also when they are killed": ("several_processes", 1, "model", "folder"),
    "what one rank can't compute no rank joins": ("isolation_on_unlike_ranks", 2, "model"),
    "isolation holds for experts, and refuses recurrent layers": ("isolation_of_families", 1),
    "FlashAttention is told where documents begin and end": ("boundaries", 1),
    "kernels are chosen by the device": ("attention_choice", 1),
}


@pytest.mark.parametrize("told", CASES)
def test_what_ranks_find_out_by_themselves(ranks: ForkServer, model: Path, tmp_path: Path, told: str) -> None:
    case, size, *names = CASES[told]
    ranks.run(case, [None] * size, arguments={name: str({"model": model, "folder": tmp_path / "data"}[name]) for name in names})


def test_a_tokenizer_larger_than_the_model_is_refused_before_the_model_is_loaded(
    ranks: ForkServer, run_file: RunFile, model: Path, tmp_path: Path
) -> None:
    smaller = tmp_path / "smaller"
    path = run_file("smaller-model", model={"name": str(smaller)})
    ended = ranks.run("rows_of_the_embedding", [path], arguments={"model": str(model), "folder": str(smaller)}, codes=78)
    assert "but the model has only those below 60 (vocab_size of its config.json)" in ended.output


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_and_joined_rows_have_the_losses_and_gradients_of_their_documents_alone(
    ranks: ForkServer, model: Path, attention: str, apart: bool
) -> None:
    ranks.run("packed_like_unpacked", [None], arguments={"model": str(model), "attention": attention, "apart": apart})


def test_isolation_is_seen_and_a_model_that_forgets_documents_is_refused(ranks: ForkServer, model: Path) -> None:
    ranks.run("isolation_of", [None], arguments={"model": str(model)})


FAMILIES = {"llama": "varlen", "gemma3_text": "varlen", "deepseek_v3": "varlen", "gemma2": "flex", "gpt_oss": "flex"}
MORE_FAMILIES = (
    "cohere2", "glm4_moe", "glm4_moe_lite", "granite", "granitemoe", "minimax_m2", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2",
        "qwen2_moe", "qwen3",
    "qwen3_moe", "smollm3",
)  # fmt: skip


@pytest.mark.parametrize(
    "families", [FAMILIES, pytest.param(dict.fromkeys(MORE_FAMILIES, "varlen"), marks=pytest.mark.long)], ids=["usual", "more"]
)
def test_a_kernel_computes_all_documents_where_it_is_right(ranks: ForkServer, families: dict[str, str]) -> None:
    ranks.run("attention_kernels", [None], arguments={"families": families})


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Losses of one process with packing; filled by the first test that needs them."""
    return {}


PACKED: dict[str, Any] = {
    "data": {"packing": True, "maxLength": 128},
    "optimization": {"globalBatchSize": 4, "maxSteps": 3, "schedule": "Constant", "microBatchSize": 1},
}


def packed_alone(ranks: ForkServer, run_file: RunFile, tmp_path: Path, alone: dict[str, Any]) -> dict[str, Any]:
    if not alone:
        ended = ranks.run("main", [run_file("alone", **PACKED | {"optimization": PACKED["optimization"] | {"microBatchSize": 2}})])
        assert "Attention: documents are kept apart by attention to each by itself" in ended.output
        assert "Packed " in ended.output
        alone["losses"] = losses(tmp_path / "alone")
        alone["evaluations"] = losses(tmp_path / "alone", "eval_log", "evalLoss")
    return alone


@pytest.mark.parametrize(("stage", "world_size"), [("Stage2", 2), ("Stage3", 3)])
def test_packed_training_gives_the_same_losses_at_any_number_of_ranks(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, alone: dict[str, Any], stage: str, world_size: int
) -> None:
    """Under Stage3 with gradient checkpointing: a layer that computes again must be told of the documents again."""
    expected = packed_alone(ranks, run_file, tmp_path, alone)
    optimization = PACKED["optimization"] | {"recompute": "All" if stage == "Stage3" else "None"}
    ranks.run("main", [run_file("several", zeroStage=stage, **PACKED | {"optimization": optimization})] * world_size)
    assert losses(tmp_path / "several") == pytest.approx(expected["losses"], rel=SAME_LOSS)
    assert losses(tmp_path / "several", "eval_log", "evalLoss") == pytest.approx(expected["evaluations"], rel=SAME_LOSS)


def test_a_packed_run_goes_on_at_another_number_of_ranks_without_losing_or_repeating_a_sequence(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, alone: dict[str, Any]
) -> None:
    expected = packed_alone(ranks, run_file, tmp_path, alone)
    begun = run_file("begun", **PACKED | {"optimization": PACKED["optimization"] | {"maxSteps": 2}})
    ranks.run("main", [begun] * 2)
    ranks.run("main", [run_file("begun", **PACKED)] * 3)
    assert losses(tmp_path / "begun") == pytest.approx(expected["losses"], rel=SAME_LOSS)


def test_packed_and_unpacked_evaluation_are_the_same_number(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, alone: dict[str, Any]
) -> None:
    expected = packed_alone(ranks, run_file, tmp_path, alone)
    ranks.run("main", [run_file("unpacked", data={"maxLength": 128}, optimization={"maxSteps": 1, "globalBatchSize": 2})])
    assert losses(tmp_path / "unpacked", "eval_log", "evalLoss")[0] == pytest.approx(expected["evaluations"][0], rel=SAME_LOSS)


def test_a_model_that_lets_documents_leak_is_refused_on_every_rank(ranks: ForkServer, run_file: RunFile) -> None:
    ended = ranks.run("train_leaking", [run_file("leaking", zeroStage="Stage3", **PACKED)] * 2, codes=78)
    assert "changing one document moved the logits of the next one in the same sequence" in ended.output


def test_a_rank_without_a_token_to_learn_neither_hangs_nor_poisons_a_step(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimization": {"globalBatchSize": 2, "microBatchSize": 1, "maxSteps": 3}, "evaluation": None}
    ranks.run("main", [run_file("one", **settings)])
    ranks.run("main", [run_file("idle", zeroStage="Stage3", **settings)] * 3)
    assert losses(tmp_path / "idle") == pytest.approx(losses(tmp_path / "one"), rel=SAME_LOSS)


def test_data_is_prepared_by_one_rank_a_volume_and_its_problems_reach_every_rank(
    ranks: ForkServer, run_file: RunFile, model: Path, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "prepared"
    folder.mkdir()
    arguments = {"folder": str(folder), "data": str(data), "model": str(model)}
    ranks.run("prepared_once", [run_file("prepared")] * 4, nodes=2, arguments=arguments)
    assert sorted(path.name for path in folder.glob("*.[0-3]")) == ["apart.0", "apart.2", "broken.2", "differing.2", "shared.0"]


def test_a_commit_of_other_data_is_refused_by_naming_the_setting(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    ranks.run("main", [run_file("mine", optimization={"maxSteps": 2, "microBatchSize": 14}, evaluation=None)])
    commit = str(tmp_path / "mine" / "checkpoints" / "step-2.a1")
    ended = ranks.run(
        "main",
        [run_file("other", data={"maxLength": 32, "overlong": "Split"}, checkpoint={"resumeFrom": commit}, evaluation=None)],
        codes=78,
    )
    assert "the dataset is " in ended.output
    assert "data.maxLength is 64, not 32" in ended.output
    assert "data.overlong is the default, not Split" in ended.output


def test_a_damaged_token_cache_is_made_again_and_the_run_goes_on(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    short: dict[str, Any] = {"evaluation": None, "optimization": {"maxSteps": 2, "microBatchSize": 14}}
    ranks.run("main", [run_file("again", **short)])
    path = run_file("again", **short | {"optimization": short["optimization"] | {"maxSteps": 3}})
    ended = ranks.run("corrupt_cache_while_resuming", [path], arguments={"cache": str(tmp_path / "again" / "cache")})
    assert "Rebuilding the token cache of " in ended.output
    assert "(step 2)" in ended.output


def test_the_preview_marks_what_is_learned_and_loads_no_model(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "two and two is", "completion": " four"}\n{"text": "x"}\n')
    path = run_file("preview", data={"path": str(tmp_path / "x.jsonl")})
    ended = ranks.run("no_model_in_preview", [None], arguments={"run": str(path)})
    assert f"{tmp_path}/x.jsonl:1: 21 tokens, 6 learned\n<s>two and two is[ four«</s>»]\n" in ended.output
    assert "x.jsonl:2" not in ended.output
    assert not (tmp_path / "preview").exists()
