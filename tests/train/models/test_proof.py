"""Runs record what the live model gives; exports are read so, and a comparison finds every tensor that isn't."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, Outcomes, RunFile
from references import Reference
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep_train.data.tokens.tokenizer import load_tokenizer
from lockstep_train.proof import __main__ as proof
from train.models.test_model_runs import make

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SEVEN = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
DENSE, ROUTED = ("llama", "qwen2", "qwen3", "mistral", "gemma2"), ("glm4_moe", "qwen3_moe", "mixtral")
READ: dict[str, dict[str, Any]] = {
    **{f"{family} attention": {"family": family, "lora": {"targetModules": ATTENTION}} for family in ROUTED},
    **{f"{family} all layers": {"family": family, "lora": {"targetModules": SEVEN}} for family in DENSE},
    **{f"{family} experts": {"family": family, "lora": {"targetParameters": EXPERTS}} for family in ROUTED},
    "half of the experts' stacks": {"family": "qwen3_moe", "lora": {"targetParameters": EXPERTS[:1]}},
    "rslora": {"family": "llama", "lora": {"rankStabilized": True}},
}
REFUSED: dict[str, dict[str, Any]] = {
    "dora": {"family": "llama", "lora": {"dora": True}},
    "whole layers": {"family": "llama", "lora": {"modulesToSave": ["embed_tokens", "lm_head"]}},
    "full": {"family": "llama", "method": "Full"},
}
SPOILT: dict[str, dict[str, Any]] = {
    "spoilt": {"family": "llama", "lora": {"targetModules": ["q_proj", "down_proj"]}, "spoil": True},
    "spoilt whole layer": {
        "family": "llama",
        "lora": {"targetModules": ["v_proj"], "dora": True, "modulesToSave": ["lm_head"]},
        "spoil": True,
    },
    "spoilt experts": {"family": "qwen3_moe", "lora": {"targetModules": ["o_proj"], "targetParameters": EXPERTS}, "spoil": True},
}
REASONS = {
    "dora": "vLLM 0.32 can't read this adapter: it does not support DoRA; use --for merged (96,136 bytes)",
    "whole layers": "it takes no layers that were trained whole (embed_tokens, lm_head); use --for merged",
    "full": "holds a whole model, no adapter; use --for merged",
}


@pytest.fixture(scope="module")
def results(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("proof")
    return ranks.run_each("prove_variants", 1, READ | REFUSED | SPOILT, folder / "results.json", folder=str(folder))


@pytest.mark.parametrize("variant", READ | REFUSED | SPOILT)
def test_the_merged_model_is_read_as_the_live_model_was(results: Outcomes, variant: str) -> None:
    assert results[variant]["merged"]["equal"] and results[variant]["merged"]["proves"]


@pytest.mark.parametrize("variant", sorted({*READ, *REFUSED, *SPOILT} - {"full"}))
def test_peft_reads_an_export_as_the_live_model_was(results: Outcomes, variant: str) -> None:
    assert results[variant]["peft"]["equal"] and results[variant]["peft"]["proves"]


@pytest.mark.parametrize("variant", READ)
def test_an_export_for_vllm_has_a_factor_for_every_tensor_of_the_bases_files_that_training_changed(results: Outcomes, variant: str) -> None:
    assert results[variant]["vllm"]["difference"] < 1e-6


def test_an_export_for_vllm_has_all_stacks_of_an_expert_where_one_is_trained(results: Outcomes) -> None:
    names = results["half of the experts' stacks"]["vllm"]["names"]
    assert "base_model.model.model.layers.1.mlp.experts.5.down_proj.lora_B.weight" in names


@pytest.mark.parametrize("variant", REFUSED)
def test_what_vllm_cannot_take_is_refused_with_the_reason_and_what_to_use_instead(results: Outcomes, variant: str) -> None:
    assert REASONS[variant] in results[variant]["vllm"]["refused"]


@pytest.mark.parametrize("variant", SPOILT)
def test_no_tensor_of_an_adapter_can_be_lost_swapped_or_scaled_unseen(results: Outcomes, variant: str) -> None:
    assert results[variant]["tensors"] >= 7
    assert results[variant]["uncaught"] == []


def verified(source: Path, output: Path, *options: str) -> int:
    return proof.main([str(source), "--output", str(output), "--verify", *options])


def test_a_run_records_its_end_and_each_evaluation_and_both_prove_their_exports(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run("main", [run_file("live", optimization={"learningRate": "5e-2"})] * 2)
    recordings = sorted(path.name for path in (tmp_path / "live/logprobs").iterdir())
    assert recordings == ["step-4.a1.json", "step-6.a1.json"]
    assert (tmp_path / "live/adapter/logprobs.json").read_bytes() == (tmp_path / "live/logprobs/step-6.a1.json").read_bytes()
    assert verified(tmp_path / "live/checkpoints/step-4.a1", tmp_path / "out") == 0
    assert "equal: PEFT gives the log-probabilities of the model that was trained" in capsys.readouterr().out
    typed = CliRunner().invoke(
        app, ["adapter", "export", str(tmp_path / "live"), "-o", str(tmp_path / "whole"), "--for", "merged", "--verify"]
    )
    assert typed.exit_code == 0 and "equal: transformers gives" in typed.stdout


def test_a_step_without_an_evaluation_has_nothing_to_compare_with(
    reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verified(reference(2) / "checkpoints/step-2.a1", tmp_path / "out") == 78
    assert "step 2 has no logprobs.json to compare with" in capsys.readouterr().err


def test_an_adapter_that_changed_nothing_proves_nothing(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run("main", [run_file("live", optimization={"learningRate": "1e-9", "maxSteps": 1}, evaluation=None)])
    assert verified(tmp_path / "live", tmp_path / "out") == 1
    assert "this proves nothing: PEFT is equal" in capsys.readouterr().out


LIVE: dict[str, dict[str, Any]] = {
    "experts in shards": {
        "family": "glm4_moe", "zeroStage": "Stage3", "lora": {"targetModules": ["q_proj"], "targetParameters": EXPERTS}, "sizes": 3,
    },
    "packed sequences": {"family": "qwen3", "data": {"packing": True}},
    "dora and a whole layer in shards": {
        "family": "llama", "zeroStage": "Stage3", "lora": {"targetModules": ATTENTION, "dora": True, "modulesToSave": ["lm_head"]},
    },
    "packed weights": {"family": "blocks", "model": {"quantization": "NF4"}},
    "full in shards": {"family": "mixtral", "zeroStage": "Stage3", "method": "Full"},
    "BF16": {"family": "llama", "precision": "BF16"},
}  # fmt: skip


@pytest.mark.parametrize("case", [name if name == "experts in shards" else pytest.param(name, marks=pytest.mark.long) for name in LIVE])
def test_the_recording_of_every_way_to_train_is_the_live_models(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    settings = {"lora": {"targetModules": ["q_proj", "v_proj"]}, **LIVE[case]}
    folder = make(ranks, tmp_path / "base", settings.pop("family"))
    size = settings.pop("sizes", 2)
    settings["model"] = {"name": str(folder), **settings.get("model", {})}
    run = run_file("live", optimization={"maxSteps": 3, "learningRate": "5e-2", "warmupSteps": "0"}, evaluation=None, **settings)
    ranks.run("main", [run] * size)
    engine = "merged" if settings.get("method") == "Full" else "peft"
    assert verified(tmp_path / "live", tmp_path / "out", "--for", engine) == 0
    assert "\nequal: " in capsys.readouterr().out


def test_a_failed_recording_is_a_warning_of_one_line(ranks: ForkServer, run_file: RunFile, tmp_path: Path, model: Path) -> None:
    shutil.copytree(model, tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text("{{ raise_exception('no chat today') }}")
    ended = ranks.run("main", [run_file("live", model={"name": str(tmp_path / "base")}, optimization={"maxSteps": 1}, evaluation=None)] * 2)
    warnings = [line for line in ended.output.splitlines() if "log-probabilities" in line]
    assert len(warnings) == 1 and warnings[0].startswith("WARNING: log-probabilities of step 1 are not recorded, ")
    assert "no chat today" in warnings[0]
    assert not (tmp_path / "live/adapter/logprobs.json").exists()


def test_chats_are_among_the_prompts_of_a_run_with_a_template(ranks: ForkServer, run_file: RunFile, tmp_path: Path, model: Path) -> None:
    shutil.copytree(model, tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    ranks.run("main", [run_file("live", model={"name": str(tmp_path / "base")}, optimization={"maxSteps": 1}, evaluation=None)])
    tokenizer = load_tokenizer(tmp_path / "base")
    recorded = json.loads((tmp_path / "live/adapter/logprobs.json").read_text())
    texts = [tokenizer.decode(prompt["tokens"]) for prompt in recorded["prompts"]]
    assert len(texts) == 8 and sum(text.startswith("[user] ") for text in texts) == 3


def test_another_engine_is_read_by_its_program_and_its_words_are_shown(
    reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "reader.py"
    arguments = [str(reference(2)), "--output", str(tmp_path / "out"), "--for", "vllm", "--verify", "--reader", "python3", str(program)]
    program.write_text('print(\'starting\')\nprint(\'{"engine": "vllm", "version": "0.32.0", "refused": "ValueError: head size 24"}\')')
    assert proof.main(arguments) == 78
    assert "vllm 0.32.0 refuses" in (words := capsys.readouterr().err) and "ValueError: head size 24" in words
    program.write_text(
        "import json, sys\n"
        "asked = json.load(open(sys.argv[sys.argv.index('--prompts') + 1]))\n"
        "assert not any('top' in prompt for prompt in asked['prompts'])\n"
        "tops = [{'top': [[[token, -1.0] for token in range(64)]] * 4} for prompt in asked['prompts']]\n"
        "print(json.dumps({'engine': 'vllm', 'version': '0.32.0', 'prompts': tops}))"
    )
    assert proof.main(arguments) == 1
    assert "not equal: vllm 0.32.0 gives other log-probabilities" in capsys.readouterr().out
    program.write_text("raise SystemExit(3)")
    assert proof.main(arguments) == 1
    assert "gave no answer: exit code 3" in capsys.readouterr().err
