"""Merges that are refused: at once, in one sentence, and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy import zeros
from safetensors.numpy import save
from transformers import GPT2Config, GPT2LMHeadModel

from lockstep_train import merge
from lockstep_train.base.imports import import_peft
from lockstep_train.merge import nothing_half, unmergeable
from lockstep_train.model.base_files import RECORD, hash_base
from support.checkpoint_cases import make_commit

LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "init_lora_weights": True, "target_modules": ["q_proj"]}
WHOLE = save({"a": zeros(100, "float32")})
MERGES = """
import json, sys
from lockstep_train import merge
codes = [merge.main([*map(str, words), "--output", sys.argv[2]]) for words in json.loads(sys.argv[1])]
print(json.dumps([codes, "torch" in sys.modules]))
"""


def make_adapter(folder: Path, weights: bytes = WHOLE, **config: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(LORA | config))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def make_base(folder: Path, word: str = "a") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": word}))
    (folder / "model.safetensors").write_bytes(WHOLE)
    return folder


def test_what_needs_no_weights_is_refused_without_torch_and_leaves_nothing(tmp_path: Path) -> None:
    base, other = make_base(tmp_path / "base"), make_base(tmp_path / "other", "b")
    recorded = make_adapter(tmp_path / "recorded")
    (recorded / RECORD).write_text(json.dumps(hash_base(base)))
    (tmp_path / "strange").mkdir()
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    commit = make_commit(tmp_path / "run" / "checkpoints", "step-7.a1")
    named = make_adapter(tmp_path / "named", base_model_name_or_path="org/base")
    plain = make_adapter(tmp_path / "plain", base_model_name_or_path=str(base))
    cut = make_adapter(tmp_path / "cut", WHOLE[:-1])
    table: list[tuple[list[Path | str], str]] = [
        ([tmp_path / "strange"], "strange is not a run's folder"),
        ([tmp_path / "new"], "holds no commit to merge (no commits are there)"),
        ([commit], "holds no config.json; say where the base model "),
        ([cut, "--base", base], "is cut off: it has"),
        ([recorded, "--base", other], "is not the base model that the adapter"),
        ([named], "fetch it with: lockstep model get org/base, and name its folder with --base"),
        (
            [make_adapter(tmp_path / "ia3", peft_type="IA3"), "--base", base],
            "ia3 can't be merged: its peft_type is IA3, and only LORA can be",
        ),
        ([plain, "--base", tmp_path / "pickled"], "has no safetensors weights; convert the base model"),
    ]
    typed = json.dumps([[str(word) for word in words] for words, _ in table])
    done = subprocess.run(
        [sys.executable, "-c", MERGES, typed, str(tmp_path / "out")], capture_output=True, text=True, timeout=300, check=True
    )
    sentences = done.stderr.splitlines()
    assert len(sentences) == len(table)
    for sentence, (_, says) in zip(sentences, table, strict=True):
        assert sentence.startswith("lockstep: ") and says in sentence
    assert json.loads(done.stdout.splitlines()[-1]) == [[78] * len(table), False]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, ""),
        ({"use_dora": True, "use_rslora": True, "alpha_pattern": {"q_proj": 8}, "modules_to_save": ["lm_head"]}, ""),
        ({"target_parameters": ["experts.down_proj"], "init_lora_weights": "gaussian", "lora_dropout": 0.1}, ""),
        ({"peft_type": "IA3"}, "its peft_type is IA3, and only LORA can be"),
        ({"init_lora_weights": "pissa_niter_4"}, "its init_lora_weights is pissa_niter_4, which changed the base model"),
        ({"bias": "all"}, 'its bias is "all"'),
        ({"lora_bias": True}, "its lora_bias is true"),
        ({"layer_replication": [[0, 4]]}, "its layer_replication is [[0, 4]]"),
        ({"trainable_token_indices": [1]}, "its trainable_token_indices is [1]"),
        ({"use_what_comes_next": 3}, "its use_what_comes_next is 3"),
    ],
)
def test_a_setting_of_peft_that_changes_weights_otherwise_is_refused_by_its_name(config: dict[str, Any], says: str) -> None:
    assert unmergeable(LORA | config) == says


def test_a_folder_that_can_t_be_made_is_told_by_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), nothing_half(tmp_path / "file" / "out"):
        pytest.fail("it is there")


@pytest.mark.parametrize("was_there", [False, True])
def test_what_was_written_before_an_error_goes_and_the_folder_is_as_it_was(was_there: bool, tmp_path: Path) -> None:
    output = tmp_path / "out"
    if was_there:
        output.mkdir()
    with pytest.raises(KeyboardInterrupt), nothing_half(output):
        (output / "model.safetensors").touch()
        (output / ".model.tmp").touch()
        raise KeyboardInterrupt
    assert output.exists() is was_there
    assert not was_there or list(output.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dora", [False, True])
def test_layers_that_keep_their_weights_transposed_are_merged_but_by_dora_refused(
    dora: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2, n_positions=64))
    base.save_pretrained(tmp_path / "base")
    peft = import_peft()
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, use_dora=dora)).eval()
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "adapter")
    code = merge.main([str(tmp_path / "adapter"), "--base", str(tmp_path / "base"), "--output", str(tmp_path / "out")])
    if dora:
        assert code == 78 and "c_attn.lora_A.default.weight can't be merged" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        return
    tokens = torch.arange(20)[None]
    with torch.no_grad(), model.disable_adapter():
        plain = model(tokens).logits
    with torch.no_grad():
        live, loaded = model(tokens).logits, GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()(tokens).logits
    assert (live - plain).abs().max() > 1e-2
    torch.testing.assert_close(loaded, live)
