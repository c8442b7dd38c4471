"""The adapter that comes out is the adapter that was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rank_harness import ForkServer, RunFile
from references import Reference

from lockstep_train.proof import __main__ as proof
from train.checkpoint.test_checkpoint import FIVE_STEPS


@pytest.mark.parametrize(("stage", "precision", "dtype"), [("Stage2", "FP32", "float32"), ("Stage3", "BF16", "bfloat16")])
def test_the_exported_adapter_gives_the_live_models_logits_in_peft(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, model: Path, stage: str, precision: str, dtype: str
) -> None:
    path = run_file("live", zeroStage=stage, precision=precision, optimization={"maxSteps": 2}, evaluation=None)
    logits = str(tmp_path / "logits.safetensors")
    ranks.run("live_logits", [path] * 2, arguments={"output": logits})
    assert proof.main([str(tmp_path / "live"), "--output", str(tmp_path / "exported")]) == 0
    adapters = [str(tmp_path / folder) for folder in ("live/adapter", "exported")]
    arguments = {"model": str(model), "adapters": adapters, "logits": logits, "dtype": dtype}
    ranks.run("compare_adapters", [None], arguments=arguments)
    files = [(tmp_path / folder / "adapter_model.safetensors").read_bytes() for folder in ("live/adapter", "exported")]
    assert files[0] == files[1]
    assert json.loads((tmp_path / "exported/adapter_config.json").read_text())["r"] == 5
    whole = [{path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} for folder in ("live/adapter", "exported")]
    assert whole[0] == whole[1]
    assert whole[0].keys() >= {"tokenizer.json", "tokenizer_config.json", "README.md", "base_files.json"}
    assert b"| steps | 2 |" in whole[0]["README.md"]


def test_a_damaged_commit_is_not_exported(reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(reference(2, **FIVE_STEPS), tmp_path / "torn")
    shard = tmp_path / "torn/checkpoints/step-1.a1/shard-r00000-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert proof.main([str(shard.parent), "--output", str(tmp_path / "out")]) == 78
    assert "bytes, not" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
