"""Model cards, and tokenizers beside trained weights."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import metadata_load
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lockstep_train.card import card, kept_tokenizers, licence_of, make_whole, provenance_of
from lockstep_train.checkpoint.format.manifest import Manifest
from lockstep_train.model.base_files import encode_record
from support.checkpoint_cases import manifest

PLANTED = ("secretword", "lab7.internal", "/mnt/private", "rows-of-people", "key0123")
FILES = {"model.safetensors": "ab" * 32, "config.json": "cd" * 32}
LORA: dict[str, Any] = {
    "base_model_name_or_path": "org/base-7b", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"], "modules_to_save": None,
    "target_parameters": ["mlp.experts.down_proj"], "use_dora": True,
}  # fmt: skip


def trained(config: dict[str, Any] | None, **changes: Any) -> Manifest:
    whole = replace(manifest(), step=120, adapter={"config": config, "names": {}}, **changes)
    return replace(whole, identity=replace(whole.identity, base_files=FILES))


def test_a_card_names_base_digest_targets_rank_steps_and_method(tmp_path: Path) -> None:
    make_whole(
        tmp_path, provenance_of(trained(LORA, base_origin={"name": "org/base-7b", "revision": None, "pin": "f" * 40})), tmp_path / "-", []
    )
    text = (tmp_path / "README.md").read_text()
    head = metadata_load(tmp_path / "README.md")
    assert head == {
        "base_model": "org/base-7b",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["base_model:adapter:org/base-7b", "lockstep", "lora"],
    }
    digest = hashlib.sha256(encode_record(FILES)).hexdigest()
    for row in (
        f"| base model | org/base-7b at {'f' * 40} |",
        f"| its digest | SHA-256 {digest} (of `base_files.json`) |",
        "| method | DoRA |",
        "| rank and alpha | 8 and 16 |",
        "| targets | `q_proj`, `v_proj`, `mlp.experts.down_proj` |",
        "| steps | 120 |",
    ):
        assert row in text.splitlines()


@pytest.mark.parametrize(
    "base",
    [
        "/mnt/private/lab7.internal/base",
        "s3://key0123@bucket",
        "s3://lab7.internal",
        "s3://secretword/base?sig=key0123",
        "../rows-of-people/x/base",
    ],
)
@pytest.mark.parametrize("full", [False, True])
def test_a_card_has_no_path_no_host_and_no_word_of_the_job(base: str, full: bool, tmp_path: Path) -> None:
    identity = replace(manifest().identity, data_files={"/mnt/private/rows-of-people.jsonl": "key0123"}, settings={"x": "secretword"})
    named: dict[str, Any] = {"job": "secretword", "job_uid": "key0123", "base_model": base}
    whole = replace(trained(None if full else LORA | {"base_model_name_or_path": base}, **named), identity=identity)
    make_whole(tmp_path, provenance_of(whole), tmp_path / "-", [])
    text = (tmp_path / "README.md").read_text()
    assert [word for word in PLANTED if word in text] == []
    assert "base_model" not in (metadata_load(tmp_path / "README.md") or {})


def test_a_whole_model_is_transformers_own(tmp_path: Path) -> None:
    text = card(provenance_of(trained(None, base_model="/models/tiny")), {}, merged=True)
    assert "library_name: transformers" in text and "# Fine-tuned tiny" in text and "| method | full fine-tuning |" in text


@pytest.mark.parametrize(
    ("readme", "config", "licence"),
    [
        (
            "---\nlicense: other\nlicense_name: llama3\nlicense_link: https://lab7.internal\n---\n",
            "{}",
            {"license": "other", "license_name": "llama3"},
        ),
        ("no head", '{"license": "mit"}', {"license": "mit"}),
        ("---\nlicense: [apache-2.0]\n---\n", "{}", {}),
        ("---\nlicense: '/mnt/private licence'\n---\n", "[]", {}),
        ("---\n: : {", "{", {}),
    ],
)
def test_a_licence_is_that_of_the_base_models_card_or_config(readme: str, config: str, licence: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(readme)
    (tmp_path / "config.json").write_text(config)
    assert licence_of(tmp_path) == licence
    assert licence_of(tmp_path / "gone") == {}


def test_transformers_finds_the_runs_own_chat_template_in_the_adapters_folder(tmp_path: Path) -> None:
    backend = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template="the base's").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").write_bytes(b"large")
    commit = tmp_path / "run" / "checkpoints" / "step-7.a1"
    for folder in (
        commit,
        tmp_path / "run" / "tokenizer",
        tmp_path / "elsewhere" / "tokenizer",
        tmp_path / "elsewhere" / "x" / "step-7.a1",
    ):
        folder.mkdir(parents=True)
    (tmp_path / "run" / "tokenizer" / "chat_template.jinja").write_text("the run's")
    (tmp_path / "elsewhere" / "tokenizer" / "chat_template.jinja").write_text("not of a run")
    commits = [commit, tmp_path / "elsewhere" / "x" / "step-7.a1"]
    make_whole(tmp_path / "adapter", provenance_of(trained(LORA)), tmp_path / "base", kept_tokenizers(commits))
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template == "the run's"
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
