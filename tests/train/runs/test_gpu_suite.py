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
    "two_ranks_train_as_one_process",
    "a_snapshot_beside_the_next_step_is_bitwise_that_of_its_step",
    "a_stop_saves_and_the_next_start_goes_on",
    "memory_that_is_exhausted_ends_with_its_exit_code_and_advice",
]
PARTS = ["8b-lora-4k", "glm-air-4-layers-16k", "qwen3-30b-a3b", "8b-longest"]
TRAINERS = {"lockstep", "hugging-face-peft", "hugging-face-peft-deepspeed"}
PLAIN_IMAGE = {"torch", "numpy", "packaging", "tqdm", "ninja"}
"""What DeepSpeed needs and a machine with torch and transformers has, or what it imports only to compile."""


def printed(program: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / program), "--device", "cpu", "--json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


@pytest.fixture(scope="module")
def checked() -> dict[str, Any]:
    return {result["check"]: result for result in printed("gpu/run.py")["results"]}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    document = printed("bench/gpu.py", "--shape", "tiny", "--rounds", "1", "--block", "1")
    return {result["name"]: result for result in document["results"]}


@pytest.mark.parametrize("check", HOLDING)
def test_a_check_of_a_gpu_holds_on_a_cpu(checked: dict[str, Any], check: str) -> None:
    assert checked[check]["outcome"] == "holds", checked[check]["message"]


def test_what_needs_nccl_says_so(checked: dict[str, Any]) -> None:
    [other] = set(checked) - set(HOLDING)
    assert (checked[other]["outcome"], checked[other]["message"]) == ("not here", "NCCL needs a GPU")


@pytest.mark.parametrize("part", PARTS)
def test_every_shape_is_measured_beside_hugging_face_with_equal_losses(measured: dict[str, Any], part: str) -> None:
    result = measured[part]
    assert set(result["trainers"]) == TRAINERS
    assert result["losses_equal"], result
    assert result["last_losses"]["lockstep"] == pytest.approx(result["last_losses"]["hugging-face-peft"], rel=1e-3)
    assert all(row["tokens_per_second"] > 0 and row["tflops"] > 0 for row in result["trainers"].values())
    assert result["plan_over_peak"] > 0


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
