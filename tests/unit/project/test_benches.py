"""Benches start: a file beside them must not hide a module of the standard library. The GPU's one keeps to its seconds, and goes on where
it ended.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench"))

from gpu_rows import BY_ROWS, DEFAULT, LIGER, PEFT, ROWS, Lengths, tiny

import gpu

BENCHES = ROOT / "tests" / "bench"
LARGE = argparse.Namespace(device="cuda", shape="large", json=False)


def test_no_bench_has_the_name_of_a_standard_module() -> None:
    names = {path.stem for path in BENCHES.glob("*.py")}
    assert names and not names & sys.stdlib_module_names


def saving(name: str) -> dict[str, Any]:
    return {"name": name, "state_bytes": 1, "tokens_lost_share": 0.0, "ways": {}, "failed": {}}


def test_rows_that_have_a_result_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def run(name: str, limit: float) -> dict[str, Any]:
        begun.append(name)
        return {"name": name, "error": "exit code 1", "log": ""} if begun == ["8b-lora-4k", "8b-packed"] else saving(name)

    names = ["8b-lora-4k", "8b-packed"]
    here = {"device": "NVIDIA H200, 580.159", "torch": "2.11.0", "code": "abc"}
    monkeypatch.setattr(gpu, "machine", lambda device: here)
    for _ in range(3):
        results, missing = gpu.measure_rows(names, tmp_path, 500, run, LARGE)
        assert ([result["name"] for result in results], missing) == (names, {})
    assert begun == ["8b-lora-4k", "8b-packed", "8b-packed"], "a row that failed is measured again"
    for key in here:
        monkeypatch.setattr(gpu, "machine", lambda device, key=key: {**here, key: "another"})
        gpu.measure_rows(names[:1], tmp_path, 500, run, LARGE)
    gpu.measure_rows(names[:1], tmp_path, 500, run, argparse.Namespace(device="cuda", shape="tiny", json=False))
    assert begun[3:] == ["8b-lora-4k"] * 4, "what another card, torch or code gave is no result"


def test_no_row_begins_that_the_seconds_left_are_too_few_for(tmp_path: Path) -> None:
    begun: dict[str, float] = {}

    def run(name: str, limit: float) -> dict[str, Any]:
        begun[name] = limit
        if name == "checkpoint":
            raise subprocess.TimeoutExpired([], limit)
        return saving(name)

    seconds = ROWS["checkpoint"].seconds + 5
    results, missing = gpu.measure_rows(["qwen3-30b-a3b", "checkpoint", "8b-packed"], tmp_path, seconds, run, LARGE)
    assert [result["name"] for result in results] == ["8b-packed"]
    assert set(missing) == {"qwen3-30b-a3b", "checkpoint"}
    assert "takes about 105 s" in missing["qwen3-30b-a3b"]
    assert "was ended" in missing["checkpoint"]
    assert list(begun) == ["checkpoint", "8b-packed"]
    assert all(limit <= seconds for limit in begun.values())
    assert not (tmp_path / "checkpoint.json").exists()


def test_a_row_that_runs_too_long_is_ended_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, program = tmp_path / "pipe", tmp_path / "row.py"
    os.mkfifo(pipe)
    program.write_text(f"import os\nos.system('(echo begun; exec sleep 60) > {pipe}')")
    monkeypatch.setattr(gpu, "__file__", str(program))
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(subprocess.TimeoutExpired):
        gpu.run_row("8b-packed", 5, tmp_path, argparse.Namespace(device="cpu", shape="tiny"))
    assert os.read(reading, 99) == b"begun\n"
    assert select.select([reading], [], [], 10)[0], "a process of the row still has the pipe"
    os.close(reading)


def test_two_calls_reach_all_rows() -> None:
    seconds = [row.seconds for row in ROWS.values()]
    assert list(ROWS)[:4] == ["8b-lora-4k", "8b-all-linear-4k", "qwen3-8b-packed-2k", "8b-ragged"]
    assert sum(seconds[:6]) <= 530
    assert sum(seconds[6:]) <= 230


def test_kernels_of_liger_are_there_in_its_own_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_model
    import torch
    from transformers.models.llama import modeling_llama

    known = {"llama": lambda model: setattr(modeling_llama, "apply_rotary_pos_emb", "Liger's")}
    stub = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN=known)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", stub)
    start = gpu_model.Trainer.__init__
    monkeypatch.setattr(gpu_model.HuggingFace, "__init__", lambda self, *given: start(self, LIGER, given[1], torch.device("cpu")))
    own, seen = modeling_llama.apply_rotary_pos_emb, []
    monkeypatch.setattr(gpu_model.HuggingFace, "step", lambda *_: seen.append(modeling_llama.apply_rotary_pos_emb))
    row = tiny(ROWS["8b-lora-4k"])
    model = gpu_model.random_model(row.config, "FP32", torch.device("cpu"))
    trainer = gpu_model.Liger(LIGER, row, "BF16", model, torch.device("cuda"))
    assert modeling_llama.apply_rotary_pos_emb is own
    trainer.steps(1, 1)
    assert (seen, modeling_llama.apply_rotary_pos_emb) == (["Liger's"], own)


@pytest.mark.parametrize("name", ROWS)
def test_samples_of_a_row_follow_from_the_step_and_fit(name: str) -> None:
    for row in (ROWS[name], tiny(ROWS[name])):
        samples = row.documents(3)
        assert samples == row.documents(3)
        assert len(samples) == (row.samples or row.micro)
        whole = row.lengths is not Lengths.RAGGED
        assert all(min(sample) > 0 and (sum(sample) == row.sequence if whole else sum(sample) <= row.sequence) for sample in samples)
        assert row.full == whole
        if whole:
            assert not sum(map(sum, samples)) % (row.micro * row.sequence)


def test_packed_documents_are_single_samples_for_the_others() -> None:
    row = ROWS["8b-packed"]
    assert [row.packs(trainer) for trainer in (BY_ROWS, DEFAULT, PEFT, LIGER)] == [False, True, False, False]
    assert (row.sizes(DEFAULT), row.sizes(PEFT)) == ((4096, 2), (1024, 8))
