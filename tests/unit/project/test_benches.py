"""Benches start: a file beside them must not hide a module of the standard library. The GPU's one keeps to its seconds, and goes on where it ended."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench"))

from gpu_rows import DEFAULT, LIGER, PEFT, ROWS, UNPACKED, Lengths, tiny

import gpu

BENCHES = ROOT / "tests" / "bench"
LARGE = argparse.Namespace(device="cuda", shape="large", json=False)


def test_no_bench_has_the_name_of_a_standard_module() -> None:
    names = {path.stem for path in BENCHES.glob("*.py")}
    assert names and not names & sys.stdlib_module_names


def saving(name: str) -> dict[str, Any]:
    return {"name": name, "state_bytes": 1, "tokens_lost_share": 0.0, "ways": {}, "failed": {}}


def test_rows_that_have_a_result_are_not_measured_again(tmp_path: Path) -> None:
    begun: list[str] = []

    def run(name: str, limit: float) -> dict[str, Any]:
        begun.append(name)
        return {"name": name, "error": "exit code 1", "log": ""} if begun == ["profile", "8b-packed"] else saving(name)

    names = ["profile", "8b-packed"]
    for _ in range(3):
        results, missing = gpu.measure_rows(names, tmp_path, 500, run, LARGE)
        assert ([result["name"] for result in results], missing) == (names, {})
    assert begun == ["profile", "8b-packed", "8b-packed"], "a row that failed is measured again"
    elsewhere = argparse.Namespace(device="cpu", shape="tiny", json=False)
    gpu.measure_rows(names[:1], tmp_path, 500, run, elsewhere)
    assert begun[3:] == ["profile"], "what was measured elsewhere is no result"
    assert json.loads((tmp_path / "profile.json").read_text())["device"] == "cpu"


def test_no_row_begins_that_the_seconds_left_are_too_few_for(tmp_path: Path) -> None:
    begun: dict[str, float] = {}

    def run(name: str, limit: float) -> dict[str, Any]:
        begun[name] = limit
        if name == "checkpoint":
            raise subprocess.TimeoutExpired([], limit)
        return saving(name)

    seconds = ROWS["checkpoint"].seconds + 5
    results, missing = gpu.measure_rows(["qwen3-30b-a3b", "checkpoint", "8b-lora-4k"], tmp_path, seconds, run, LARGE)
    assert [result["name"] for result in results] == ["8b-lora-4k"]
    assert set(missing) == {"qwen3-30b-a3b", "checkpoint"}
    assert "takes about 130 s" in missing["qwen3-30b-a3b"]
    assert "was ended" in missing["checkpoint"]
    assert list(begun) == ["checkpoint", "8b-lora-4k"]
    assert all(limit <= seconds for limit in begun.values())
    assert not (tmp_path / "checkpoint.json").exists()


def test_a_row_that_runs_too_long_is_ended(tmp_path: Path) -> None:
    options = argparse.Namespace(device="cpu", shape="tiny")
    with pytest.raises(subprocess.TimeoutExpired):
        gpu.run_row("profile", 0.1, tmp_path, options)


def test_the_first_rows_fit_into_one_call_and_each_other_one_into_a_second() -> None:
    assert list(ROWS)[:4] == ["profile", "8b-all-linear-4k", "qwen3-8b-packed-2k", "8b-ragged"]
    assert sum(row.seconds for row in list(ROWS.values())[:5]) <= 530
    assert all(row.seconds <= 230 for row in ROWS.values())


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
    assert [row.packs(trainer) for trainer in (UNPACKED, DEFAULT, PEFT, LIGER)] == [False, True, False, False]
    assert (row.sizes(DEFAULT), row.sizes(PEFT)) == ((4096, 2), (1024, 8))
