"""Rows, files, chat templates and DeepSpeed settings in the forms of other tools: what is learned, or the words that say why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError

from lockstep.api.training import Training
from lockstep_spec.choices import TrainOn
from lockstep_spec.training import LoraConfig, SourceConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.data.read.files import local_files
from lockstep_train.data.read.records import AnySample, Conversation, sample_of
from lockstep_train.data.read.text_files import Broken
from lockstep_train.data.tokens.tokenizer import load_tokenizer
from lockstep_train.model.load import refuse_missing_weights
from lockstep_train.model.trained import check_targets
from unit.train.data.chat_cases import runs, samples, template

ROWS, FILES, TEMPLATES, SETTINGS = (
    yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8"))
    for name in ("rows", "files", "templates", "deepspeed")
)


def learned(sample: AnySample) -> list[str]:
    """Answers that are learned, a call by its name."""
    if not isinstance(sample, Conversation):
        return [sample.text]
    turns = [
        message
        for number, message in enumerate(sample.messages)
        if message["role"] == "assistant" and number >= sample.prompt_count and number not in sample.untrained
    ]
    names = [[call["function"]["name"] for call in turn.get("tool_calls", [])] for turn in turns]
    return [text for turn, calls in zip(turns, names, strict=True) for text in (turn["content"], *calls) if text]


@pytest.mark.parametrize("case", ROWS, ids=[f"{number}-{case['from']}" for number, case in enumerate(ROWS)])
def test_a_row_of_another_tool_teaches_what_it_says_or_is_refused_by_name(case: dict[str, Any]) -> None:
    if "refused" in case:
        with pytest.raises(ValueError) as refused:
            sample_of(case["row"], 1)
        assert case["refused"] in str(refused.value) and case.get("advice", "") in str(refused.value)
        return
    sample = sample_of(case["row"], 1)
    assert learned(sample) == case["learned"]
    assert sorted(sample.unread) == sorted(case.get("unread", []))


@pytest.mark.parametrize("case", [case for case in ROWS if "advice" in case], ids=lambda case: case["from"])
def test_the_columns_that_a_refusal_advises_read_the_row(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as refused:
        sample_of(case["row"], 1)
    advised = str(refused.value).partition("training.data.columns: ")[2].partition("}")[0] + "}"
    columns = Training.model_validate({"model": {"name": "/m"}, "data": {"path": "/d", "columns": yaml.safe_load(advised)}}).data.columns
    assert columns is not None and learned(sample_of(case["row"], 1, columns=columns))


@pytest.mark.parametrize("case", FILES, ids=[case["from"] for case in FILES])
def test_a_file_that_is_not_what_its_name_says_is_named(case: dict[str, Any], tmp_path: Path) -> None:
    path, broken = tmp_path / case["name"], Broken("x")
    path.write_bytes(bytes.fromhex(case["hex"]) if "hex" in case else case["text"].encode())
    if "learned" in case:
        assert len(list(local_files(SourceConfig(str(path)), print).samples(broken))) == case["learned"] and not broken.count
        return
    try:
        list(local_files(SourceConfig(str(path)), print).samples(broken))
        said = broken.first[0]
    except ConfigError as error:
        said = str(error)
    assert case["refused"] in said


@pytest.mark.parametrize("case", TEMPLATES, ids=[case["from"] for case in TEMPLATES])
def test_a_chat_that_a_template_can_t_show_is_refused_with_what_helps_or_learned_without_it(case: dict[str, Any]) -> None:
    chat = template(case["template"], ["<|end|>"])
    train_on = TrainOn(case.get("train_on", "Assistant"))
    if "refused" in case:
        with pytest.raises(ValueError) as refused:
            samples(chat, case["messages"], train_on)
        assert case["refused"] in str(refused.value) and "generation marks" not in str(refused.value)
        return
    (sample,) = samples(chat, case["messages"], train_on, tools=case.get("tools", ()))
    assert "".join(runs(sample)) == case["learned"]
    assert case["remark"] in " ".join(sample.remarks)


@pytest.mark.parametrize("case", SETTINGS, ids=[case["from"] for case in SETTINGS])
def test_validate_names_every_raw_setting_that_the_trainer_would_refuse(case: dict[str, Any]) -> None:
    stated = {"model": {"name": "/m"}, "data": {"path": "/d"}, "zeroStage": case["stage"], "deepspeed": case["settings"]}
    try:
        Training.model_validate(stated)
        named = []
    except ValidationError as error:
        named = [rule.field.removeprefix("deepspeed.") for rule in error.errors()[0]["ctx"]["error"].rules]
    assert sorted(named) == sorted(case["refused"])


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("model-00001-of-00002.safetensors", refuse_missing_weights),
        ("pytorch_model.bin", refuse_missing_weights),
        ("tokenizer.json", load_tokenizer),
        ("tokenizer.model", load_tokenizer),
    ],
)
def test_a_model_that_was_cloned_without_git_lfs_says_so(name: str, load: Callable[[Path], object], tmp_path: Path) -> None:
    """microsoft/OmniParser#34, mlc-ai/mlc-llm PR 1954: the clone has pointers in place of weights and tokenizers."""
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(ConfigError, match=f"{name} is a Git LFS pointer and not the file itself: run `git lfs pull`"):
        load(tmp_path)


def test_an_embedding_as_a_target_is_told_where_it_can_be_trained() -> None:
    """Continued pretraining of Unsloth and Axolotl names embed_tokens beside the layers."""
    model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(4, 4), "q_proj": torch.nn.Linear(4, 4)})
    with pytest.raises(ConfigError, match=r"embed_tokens is no linear layer .*; train it whole by training.lora.modulesToSave"):
        check_targets(model, LoraConfig(rank=2, alpha=2, dropout=0.0, target_modules=("q_proj", "embed_tokens")))
