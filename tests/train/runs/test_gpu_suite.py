"""What runs first wherever there is a GPU runs here on CPUs: the same checks and the same benchmark, with tiny shapes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from support.checkout import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from gpu_carry import COMPILED, COPIED

pytestmark = pytest.mark.long
HOLDING = [
    "the_self_test_of_preflight_finds_every_device_right",
    "one_rank_trains_as_one_process_on_a_cpu",
    "one_rank_trains_in_bf16_as_one_process_on_a_cpu",
    "two_ranks_train_as_one_process",
    "two_ranks_train_in_bf16_as_one_process",
    "a_snapshot_beside_the_next_step_is_bitwise_that_of_its_step",
    "a_stop_saves_and_the_next_start_goes_on",
    "memory_that_is_exhausted_ends_with_its_exit_code_and_advice",
]
NEEDING = {
    "nccl_says_what_it_uses_and_its_collectives_are_recorded": "NCCL needs a GPU",
    "joined_documents_are_computed_as_each_by_itself": "gpt_oss: attention to each by itself; refused: {}",
}
ALONE = ["8b-longest", "checkpoint"]
BESIDE = ["8b-all-linear-4k", "qwen3-8b-packed-2k", "8b-ragged", "glm-air-4-layers-16k", "qwen3-30b-a3b", "8b-lora-4k", "8b-packed"]
TRAINERS = {"lockstep-plain", "lockstep", "hugging-face-peft"}
BY_ROWS = {"lockstep-by-rows", "lockstep", "hugging-face-peft"}
NO_LIGER = {"hugging-face-peft-liger": "Liger's kernels need a GPU"}
PLAIN_IMAGE = {"torch", "numpy", "packaging", "tqdm", "ninja"}
"""What DeepSpeed needs and a machine with torch and transformers has, or what it imports only to compile."""


def printed(program: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / program), "--device", "cpu", "--json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def checked() -> dict[str, Any]:
    return {result["check"]: result for result in printed("gpu/run.py")["results"]}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("results")
    document = printed("bench/gpu.py", "--shape", "tiny", "--seconds", "3000", "--results", str(folder))
    assert not document["missing"]
    assert sorted(path.stem for path in folder.glob("*.json")) == sorted([*BESIDE, *ALONE])
    return {result["name"]: result for result in document["results"]}


@pytest.mark.parametrize("check", HOLDING)
def test_a_check_of_a_gpu_holds_on_a_cpu(checked: dict[str, Any], check: str) -> None:
    assert checked[check]["outcome"] == "holds", checked[check]["message"]


def test_what_needs_a_gpu_says_so(checked: dict[str, Any]) -> None:
    assert set(checked) - set(HOLDING) == set(NEEDING)
    for check, reason in NEEDING.items():
        assert checked[check]["outcome"] == "not here", checked[check]["message"]
        assert reason in checked[check]["message"]


@pytest.mark.parametrize("row", BESIDE)
def test_every_row_is_measured_beside_hugging_face_with_equal_losses(measured: dict[str, Any], row: str) -> None:
    result = measured[row]
    assert set(result["trainers"]) == (BY_ROWS if row in ("8b-packed", "8b-ragged") else TRAINERS)
    assert result["absent"] == ({} if row == "8b-ragged" else NO_LIGER)
    assert result["losses_equal"], result
    probed = "without dropout" in result["equality"]
    assert probed == (row == "8b-all-linear-4k")
    if not probed:
        assert result["last_losses"]["lockstep"] == pytest.approx(result["last_losses"]["hugging-face-peft"], rel=1e-3)
    assert all(each["tokens_per_second"] > 0 and each["tflops"] > 0 for each in result["trainers"].values())
    assert (result["plan_over_peak"] is None) == (row == "8b-ragged")


def test_the_longest_is_measured_alone(measured: dict[str, Any]) -> None:
    result = measured["8b-longest"]
    assert set(result["trainers"]) == {"lockstep"}
    assert len(result["trainers"]["lockstep"]["turn_seconds"]) == 1
    assert not {"ratio_to_best_other", "losses_equal"} & set(result)


def test_a_profile_names_what_took_the_time(measured: dict[str, Any]) -> None:
    profiles = measured["8b-lora-4k"]["profiles"]
    assert set(profiles) == TRAINERS
    for profile in profiles.values():
        assert 0 <= profile["idle_share"] < 1
        assert 0 < sum(each["share"] for each in profile["top"]) <= 1.001


def test_a_checkpoint_is_measured_beside_other_savers(measured: dict[str, Any]) -> None:
    result = measured["checkpoint"]
    assert set(result["ways"]) == {"lockstep", "deepspeed", "dcp-sync", "dcp-async"}
    assert result["state_bytes"] > 0
    assert all(row["commit_seconds"] > 0 for row in result["ways"].values())


def test_what_is_carried_to_a_gpu_machine_is_all_that_deepspeed_imports() -> None:
    carried, waiting = {*COPIED, *COMPILED}, ["deepspeed"]
    while waiting:
        for requirement in importlib.metadata.requires(waiting.pop()) or []:
            name = re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0].lower().replace("_", "-")
            if "extra ==" not in requirement and name not in PLAIN_IMAGE:
                assert name in carried, requirement
                waiting.append(name)
