"""Whole runs of other kinds than a dense model with plain LoRA: experts and their usage, full fine-tuning, an adapter to start with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from rank_harness import ForkServer, RunFile

from lockstep_train import merge
from lockstep_train.model.load import model_class
from support.rounding import SAME_LOSS
from train.engine.test_training import losses, records

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def make(ranks: ForkServer, folder: Path, family: str, **options: Any) -> Path:
    ranks.run("make_whole_family", [None], arguments={"folder": str(folder), "family": family, **options})
    return folder


@pytest.fixture(scope="module")
def glm(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(ranks, tmp_path_factory.mktemp("moe") / "glm4_moe", "glm4_moe")


def test_a_mixture_of_experts_goes_on_from_a_commit_to_the_same_losses_and_counts(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, glm: Path
) -> None:
    settings: dict[str, Any] = {
        "model": {"name": str(glm)},
        "zeroStage": "Stage3",
        "lora": {"targetModules": ["q_proj"], "targetParameters": EXPERTS},
        "optimization": {"maxSteps": 4, "microBatchSize": 3, "globalBatchSize": 6, "recompute": "All"},
        "evaluation": None,
    }
    ended = ranks.run("main", [run_file("whole", **settings)] * 2)
    path = run_file("cut", **settings)
    ranks.run("terminate_at", [path] * 2, arguments={"step": 2, "rank": 1}, codes=75)
    ended = ranks.run("main", [path] * 2)
    assert "Resuming from" in ended.outputs[0]
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    usage = [records(tmp_path / folder, "expert_usage") for folder in ("whole", "cut")]
    for whole, cut in zip(*usage, strict=True):
        assert whole["layers"] == cut["layers"]
    assert [record["step"] for record in usage[0]] == [2, 4]
    first = usage[0][0]
    assert sum(first["layers"]["1"]) % 2 == 0  # top_k is 2
    assert sum(first["share"]["1"]) == pytest.approx(1, abs=1e-5)
    assert 0 < first["entropy"]["1"] < 1
    assert first["maxShare"]["1"] == max(first["share"]["1"])


def test_a_model_that_also_sees_learns_text_goes_on_elsewhere_and_is_merged(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    """Two ranks under Stage3, then one under Stage2; the merged model gives what the base does with the adapter."""
    folder = make(ranks, tmp_path / "mistral3", "mistral3")
    settings: dict[str, Any] = {
        "model": {"name": str(folder)},
        "lora": {"targetModules": ["q_proj", "down_proj"]},
        "optimization": {"maxSteps": 4, "microBatchSize": 3, "globalBatchSize": 6, "learningRate": "2e-2"},
        "evaluation": None,
    }
    whole, cut = run_file("whole", zeroStage="Stage2", **settings), run_file("cut", zeroStage="Stage3", **settings)
    ranks.run("main", [whole])
    ranks.run("terminate_at", [cut] * 2, arguments={"step": 2, "rank": 1}, codes=75)
    ended = ranks.run("main", [run_file("cut", zeroStage="Stage2", **settings)])
    assert "Resuming from" in ended.output
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=SAME_LOSS)
    assert merge.main([str(tmp_path / "cut"), "--output", str(tmp_path / "merged")]) == 0
    base = model_class(folder).from_pretrained(folder)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "cut/adapter").merge_and_unload().eval()
    merged = model_class(folder).from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected, plain = adapted(input_ids=ids).logits, model_class(folder).from_pretrained(folder).eval()(input_ids=ids).logits
        assert (merged(input_ids=ids).logits - expected).abs().max() < 1e-3 * (plain - expected).abs().max()


@pytest.mark.parametrize("family", ["glm4_moe", pytest.param("mistral3", marks=pytest.mark.long)])
def test_a_fully_trained_model_is_left_as_a_folder_that_gives_the_live_models_logits(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, family: str
) -> None:
    settings: dict[str, Any] = {
        "model": {"name": str(make(ranks, tmp_path / family, family))},
        "method": "Full",
        "optimization": {"maxSteps": 3, "learningRate": "1e-3", "microBatchSize": 4, "globalBatchSize": 12},
        "checkpoint": {"everySteps": 1},
        "evaluation": None,
        "data": {"chatTemplate": str(tmp_path / "own.jinja")},
    }
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    small = {"export.SHARD_BYTES": 20_000}
    whole = ranks.run("main_with", [run_file("whole", zeroStage="Stage2", **settings)] * 2, nodes=2, arguments={"constants": small})
    assert f"Model: {tmp_path / 'whole/model'}" in whole.output
    shutil.copytree(tmp_path / "whole/checkpoints", tmp_path / "live/checkpoints")
    for commit in (tmp_path / "live/checkpoints").glob("step-[23].a1"):
        shutil.rmtree(commit)
    model = tmp_path / "live/model"
    model.mkdir()
    for stale in (".model.0123.tmp", "model.safetensors", "model-00001-of-00002.safetensors"):
        (model / stale).touch()  # of an export that was killed, and of one with other files
    logits = str(tmp_path / "logits.safetensors")
    arguments = {"output": logits, "constants": small}
    ranks.run("live_logits", [run_file("live", zeroStage="Stage3", **settings)] * 2, arguments=arguments)
    assert losses(tmp_path / "live") == pytest.approx(losses(tmp_path / "whole")[1:], rel=SAME_LOSS)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    files = {path.name for path in model.glob("*.safetensors")}
    assert len(files) > 2
    assert files == set(index["weight_map"].values())
    assert sorted(path.name for path in model.glob(".*")) == []
    ranks.run("compare_model", [None], arguments={"folder": str(model), "logits": logits})
    assert not (tmp_path / "live/adapter").exists()
    assert (model / "chat_template.jinja").read_text() == "{{ messages }}", "it has the run's template"
    assert "| method | full fine-tuning |" in (model / "README.md").read_text()


LORA = {"modulesToSave": ["embed_tokens"], "rankStabilized": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that needs it keeps an adapter and the evaluation loss it has."""
    return tmp_path_factory.mktemp("initial")


def adapter(ranks: ForkServer, run_file: RunFile, tmp_path: Path, trained: Path) -> Path:
    if not (trained / "adapter").exists():
        ranks.run("main", [run_file("first", lora=LORA, optimization={"maxSteps": 4, "learningRate": "2e-2"})])
        shutil.copytree(tmp_path / "first/adapter", trained / "adapter")
        (trained / "loss").write_text(str(records(tmp_path / "first", "eval_log")[-1]["evalLoss"]))
    return trained / "adapter"


@pytest.mark.parametrize("stage", ["Stage2", "Stage3"])
def test_a_run_can_start_with_the_weights_of_an_adapter(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, trained: Path, stage: str
) -> None:
    folder = adapter(ranks, run_file, tmp_path, trained)
    path = run_file("second", zeroStage=stage, lora={**LORA, "initFrom": str(folder)}, optimization={"maxSteps": 1, "globalBatchSize": 4})
    ranks.run("main", [path] * 2)
    before = records(tmp_path / "second", "eval_log")[0]["evalLoss"]
    assert before == pytest.approx(float((trained / "loss").read_text()), rel=SAME_LOSS)


@pytest.mark.parametrize(("lora", "said"), [({"rank": 4}, "its rank is 5, not 4"), ({}, "no readable adapter_model.safetensors")])
def test_an_adapter_of_another_kind_is_refused_by_its_difference(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, trained: Path, lora: dict[str, Any], said: str
) -> None:
    folder = shutil.copytree(adapter(ranks, run_file, tmp_path, trained), tmp_path / "copy")
    if not lora:
        (folder / "adapter_model.safetensors").unlink()
    ended = ranks.run("main", [run_file("refused", lora={**LORA, **lora, "initFrom": str(folder)})], codes=78)
    assert said in ended.output


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        ({"forced": "eager"}, {"zeroStage": "Stage3"}, "computes its experts with `eager`, which hangs under Stage3"),
        ({"moe_intermediate_size": 18}, {}, "has rows of 72 bytes, but grouped_mm needs a multiple of 16"),
        ({}, {"lora": {"targetParameters": ["experts.up_proj"]}}, "available: mlp.experts.down_proj, mlp.experts.gate_up_proj"),
    ],
)
def test_what_a_model_cannot_do_is_refused_before_the_first_step(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, glm: Path, options: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    folder = make(ranks, tmp_path / "glm4_moe", "glm4_moe", **options) if options else glm
    settings = {**settings, "lora": {"targetModules": ["q_proj"], **settings.get("lora", {})}}
    settings["model"] = {"name": str(folder), **settings.get("model", {})}
    ended = ranks.run("main", [run_file("refused", **settings)], codes=78)
    assert said in ended.output
