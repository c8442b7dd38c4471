"""`lockstep adapter merge`: the merged folder is the model that was live."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, Outcomes
from typer.testing import CliRunner

from lockstep.cli.main import app
from support.rounding import forward_roundings, tolerance

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "blocks": False},  # each tensor at once, as the command line does, and so equal to the bit
    "several files": {"family": "llama", "shards": "20KB"},
    "rslora": {"family": "llama", "lora": {"rankStabilized": True}},
    "dora": {"family": "llama", "lora": {"dora": True}},
    "whole layers": {"family": "llama", "lora": {"modulesToSave": ["embed_tokens", "lm_head"]}},
    "tied embedding trained apart": {"family": "tied", "lora": {"modulesToSave": ["embed_tokens"]}, "separate": True},
    "tied head trained apart": {"family": "tied", "lora": {"modulesToSave": ["lm_head"]}, "shards": "20KB", "separate": True},
    "tied and untouched": {"family": "tied"},
    "from a Lite commit": {"family": "llama", "content": "Lite"},
    "glm4_moe experts": {"family": "glm4_moe", "lora": {"targetParameters": EXPERTS}, "shards": "20KB"},
    "qwen3_moe experts": {"family": "qwen3_moe", "lora": {"targetParameters": EXPERTS[:1]}},
    "mixtral experts": {"family": "mixtral", "lora": {"targetParameters": EXPERTS}},
    "gemma3": {"family": "gemma3"},
    "mistral3": {"family": "mistral3"},
    "qwen3_vl": {"family": "qwen3_vl"},
    "full mistral3": {"family": "mistral3", "method": "Full"},
    "full": {"family": "tied", "method": "Full"},
    "full glm4_moe": {"family": "glm4_moe", "method": "Full", "shards": "20KB"},
}
FP32_TOLERANCE = tolerance(forward_roundings(hidden=36, intermediate=44, attention=32, vocabulary=96, sequence=20), results=2 * 20 * 96)
"""Of all logits of the probe."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("merge")


@pytest.fixture(scope="module")
def results(ranks: ForkServer, folder: Path) -> Outcomes:
    return ranks.run_each("merge_variants", 1, VARIANTS, folder / "results.json", folder=str(folder))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_merged_model_gives_the_live_models_logits(results: Outcomes, variant: str) -> None:
    result = results[variant]
    assert (result["missing"], result["unexpected"]) == ([], [])
    assert result["moved"] > 1e-2, "the adapter changes nothing: the test can't fail"
    assert result["difference"] < FP32_TOLERANCE
    assert result.get("peft_difference", 0) < FP32_TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_merged_folder_has_the_bases_files_names_and_dtypes(results: Outcomes, variant: str) -> None:
    assert results[variant]["files"] == sorted([*results[variant]["base_files"], "README.md"])
    assert results[variant]["shapes_kept"]


@pytest.mark.parametrize("variant", [name for name, variant in VARIANTS.items() if variant.get("method") != "Full"])
def test_an_adapters_folder_gives_the_model_that_its_commit_gives(results: Outcomes, variant: str) -> None:
    assert results[variant]["adapters"] == {"exported": True, "saved": True}


@pytest.mark.parametrize("variant", [name for name, variant in VARIANTS.items() if variant["family"] == "tied"])
def test_tied_embeddings_come_apart_only_where_one_of_them_was_trained_alone(results: Outcomes, variant: str) -> None:
    still_tied = variant in ("tied and untouched", "full")
    assert results[variant]["tied"] is still_tied and ("differ now" in results[variant]["said"]) is not still_tied


def test_another_base_model_is_refused(results: Outcomes, folder: Path, tmp_path: Path) -> None:
    assert results["llama"] and results["tied and untouched"]
    commit = folder / "llama/run/checkpoints/step-7.a1"
    merged = CliRunner().invoke(
        app, ["adapter", "merge", str(commit), "--output", str(tmp_path / "out"), "--base", str(folder / "tied-and-untouched/base")]
    )
    assert merged.exit_code == 2
    assert "is not the base model that step 7 was trained on: config.json had SHA-256 " in merged.stderr
    assert not (tmp_path / "out").exists()


def merged(*words: object) -> Any:
    return CliRunner().invoke(app, ["adapter", "merge", *map(str, words)])


def test_an_adapter_that_says_nothing_of_its_base_is_refused_by_its_tensors_shapes(results: Outcomes, folder: Path, tmp_path: Path) -> None:
    assert results["llama"] and results["gemma3"]
    done = merged(folder / "llama/saved", "--output", tmp_path / "out", "--base", folder / "gemma3/base")
    assert done.exit_code == 2
    assert "saved doesn't fit this base model: " in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["run/checkpoints/step-7.a1", "saved"])
def test_a_merge_onto_a_full_disk_leaves_nothing(results: Outcomes, folder: Path, tmp_path: Path, source: str) -> None:
    assert results["several files"]
    case, disk = folder / "several-files", tmp_path / "disk"
    disk.mkdir()
    merge = f"{sys.executable} -m lockstep_train.merge {case / source} --output {disk}/out --base {case}/base"
    script = f"mount -t tmpfs -o size=64k tmpfs {disk} && {{ {merge}; ls -A {disk}; }}"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert f"lockstep: {disk}/out can't be written: No space left on device: the file system {disk} has " in done.stderr
    assert done.stderr.endswith("; nothing of it is left\n")
    assert done.stdout.splitlines()[-1].startswith("writing "), "it was full before, or something is left"


def test_the_command_line_merges_shards_of_two_volumes_with_a_base_that_has_moved(results: Outcomes, folder: Path, tmp_path: Path) -> None:
    assert results["llama"]
    sources = []
    for rank in (0, 1):
        copy = tmp_path / f"volume-{rank}/run/checkpoints/step-7.a1"
        shutil.copytree(folder / "llama/run/checkpoints/step-7.a1", copy)
        (copy / f"shard-r0000{1 - rank}-of-00002.safetensors").unlink()
        sources.append(str(copy))
    shutil.copytree(folder / "llama/base", tmp_path / "moved")
    merged = CliRunner().invoke(app, ["adapter", "merge", *sources, "--output", str(tmp_path / "out"), "--base", str(tmp_path / "moved")])
    assert merged.exit_code == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (folder / "llama/merged/model.safetensors").read_bytes()
