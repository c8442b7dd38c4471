"""Loading a model: slices against transformers' own loader, and what is wrong with a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rank_harness import ForkServer, RunFile


@pytest.fixture(scope="module")
def families(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    ranks.run("make_models", [None], arguments={"folder": str(folder)})
    return folder


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_slices_equal_what_transformers_loads_without_a_collective(ranks: ForkServer, families: Path, world_size: int) -> None:
    ranks.run("compare_loads", [None] * world_size, arguments={"folder": str(families)})


@pytest.fixture
def qwen2(families: Path, tmp_path: Path) -> Path:
    """A model of one file, for a test to damage."""
    return Path(shutil.copytree(families / "qwen2", tmp_path / "qwen2"))


@pytest.mark.parametrize(
    ("case", "size"),
    [
        pytest.param("compare_incomplete", 2, id="missing tensors are refused, and found as transformers finds them"),
        pytest.param("refuse_renamed", 1, id="weights under other names are refused in every stage"),
        pytest.param("refuse_wrong_shape", 2, id="weights of another size than the configuration are refused on every rank"),
        pytest.param("fall_back", 2, id="weights that can't be sliced are loaded by transformers, and it says so"),
    ],
)
def test_a_model_that_is_damaged(ranks: ForkServer, qwen2: Path, case: str, size: int) -> None:
    ranks.run(case, [None] * size, arguments={"folder": str(qwen2)})


def test_the_first_forward_is_right_with_a_secondary_shard_on_each_node(ranks: ForkServer, families: Path) -> None:
    ranks.run("compare_logits_with_secondary_shards", [None] * 4, nodes=2, arguments={"folder": str(families)})


def test_a_folder_without_whole_weights_is_refused_by_the_name_of_the_file(ranks: ForkServer, families: Path, tmp_path: Path) -> None:
    shutil.copytree(families / "llama", tmp_path / "llama")
    ranks.run("refuse_folders", [None], arguments={"folder": str(tmp_path)})


def test_a_second_copy_of_the_weights_is_checked_before_it_is_trained_on(ranks: ForkServer, run_file: RunFile) -> None:
    run = run_file(zeroStage="Stage3", hierarchicalPartition="Node")
    ranks.run("compare_a_run_with_secondary_shards", [run] * 4, nodes=2)


def test_a_fault_while_weights_are_read_ends_the_attempt_and_not_the_job(ranks: ForkServer, run_file: RunFile) -> None:
    ended = ranks.run("fault_while_loading", [run_file(zeroStage="Stage3")], codes=1)
    assert "can't be loaded as a causal language model: [Errno 5] Input/output error" in ended.output
    assert "this may pass, and the next attempt tries it again" in ended.output
    assert "Traceback" in ended.output


def test_running_out_of_memory_ends_with_the_plan_and_advice(ranks: ForkServer, run_file: RunFile) -> None:
    ended = ranks.run("out_of_memory", [run_file()], codes=77)
    assert "Memory plan per rank: about" in ended.output
    assert "What would lower it: " in ended.output


def test_a_run_that_cannot_fit_is_refused_before_anything_is_loaded(ranks: ForkServer, run_file: RunFile) -> None:
    ended = ranks.run("in_little_memory", [run_file(), run_file()], codes=78)
    assert "what would fit: " in ended.output


@pytest.mark.parametrize("late", [False, True])
def test_nf4_whose_scales_a_cpu_would_mix_up_is_refused_on_every_rank_before_anything_is_loaded(
    ranks: ForkServer, run_file: RunFile, late: bool
) -> None:
    ended = ranks.run("without_loading", [run_file(model={"quantization": "NF4"})] * 2, arguments={"late": late}, codes=78)
    assert (
        "training.model.quantization is NF4, but model.layers.0.self_attn.q_proj of this model has 62 inputs, and on a CPU NF4 needs a"
        " multiple of 64; leave quantization out, or train on a GPU" in ended.output
    )


def test_what_a_cpu_unpacks_of_nf4_is_what_was_packed(ranks: ForkServer) -> None:
    ranks.run("unpacked_like_packed", [None])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("limit", "node 1 has 1.0 MB of host memory, of which its rank holds "),
        ("pages", "kB of host memory for the copy that saves are written from: CUDA can't pin it (error 2); raise "),
    ],
)
def test_a_node_without_room_for_saves_is_told_before_the_first_step(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, how: str, said: str
) -> None:
    ended = ranks.run("without_room_for_saves", [run_file("small"), run_file("small")], nodes=2, arguments={"how": how}, codes=78)
    assert said in ended.output
    assert not (tmp_path / "small/logs/train_log.jsonl").exists()
