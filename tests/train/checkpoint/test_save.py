"""A save costs training nothing it could notice, in every mode, whatever its volume does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, Outcomes, RunFile

from lockstep_train.checkpoint.format.manifest import decode
from lockstep_train.checkpoint.format.volume import commit_names, read_chain, shard_problem

OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
NONE_PERSISTS = {"stage3_param_persistence_threshold": 0}
HPZ = {"zero_hpz_partition_size": 2}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "Stage1": {"stage": 1},
    "Stage2 groups": {"stage": 2, "groups": 3},
    "Stage2 full tied": {"stage": 2, "full": True},
    "Stage2 FP16": {"stage": 2, "precision": "FP16"},
    "Stage2 offload": {"stage": 2, "zero": OFFLOAD},
    "Stage3 all persist": {"stage": 3},
    "Stage3 groups": {"stage": 3, "zero": NONE_PERSISTS, "groups": 3},
    "Stage3 full tied": {"stage": 3, "zero": {"stage3_param_persistence_threshold": 1000}, "full": True},
    "Stage3 FP16": {"stage": 3, "zero": NONE_PERSISTS, "precision": "FP16"},
    "Stage3 offload": {"stage": 3, "zero": {**OFFLOAD, **NONE_PERSISTS}},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "Stage2": {"stage": 2, "precision": "FP32"},
    "Stage3 none persists": {"stage": 3, "zero": NONE_PERSISTS, "precision": "FP32"},
    "Stage3 hpZ": {"stage": 3, "zero": {**HPZ, **NONE_PERSISTS}},
    "Stage3 hpZ all persist": {"stage": 3, "zero": HPZ},
}


@pytest.fixture(scope="module")
def modes(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcomes]:
    """Ranks → mode → what came out of it: two ranks on one node, and four on two."""
    folders = {size: tmp_path_factory.mktemp(f"{size}-ranks") for size in (2, 4)}
    return {
        size: ranks.run_each("every_mode", size, variants, folders[size] / "results.json", nodes=size // 2, folder=str(folders[size]))
        for size, variants in ((2, TWO_RANKS), (4, FOUR_RANKS))
    }


@pytest.mark.parametrize(("size", "mode"), [*((2, mode) for mode in TWO_RANKS), *((4, mode) for mode in FOUR_RANKS)])
def test_every_mode_saves_without_a_collective_and_loads_what_it_saved(modes: dict[int, Outcomes], size: int, mode: str) -> None:
    assert math.isfinite(modes[size][mode]["loss"])


def test_the_copy_beside_the_next_step_is_of_the_step_that_was_saved(ranks: ForkServer, run_file: RunFile) -> None:
    ranks.run("copy_beside_a_step", [run_file("beside")] * 2)


def test_a_rank_writes_its_shard_while_all_others_stand_still(ranks: ForkServer, run_file: RunFile) -> None:
    ranks.run("save_while_others_are_stopped", [run_file("stopped", zeroStage="Stage3")] * 3)


def test_waiting_for_a_commit_leaves_the_store_free_for_training(ranks: ForkServer) -> None:
    ranks.run("wait_beside_the_training", [None])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_volume_that_is_too_slow_costs_saves_on_all_ranks_alike_and_no_step(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    """Rank 0 writes step 1 while steps 2 and 3 are computed and step 3 is evaluated; rank 1 has long finished."""
    settings = {"optimization": {"maxSteps": 5}, "evaluation": {"everySteps": 3}, "checkpoint": {"everySteps": 1, "keep": 9}}
    ended = ranks.run("slow_volume", [run_file("slow", **settings)] * 2, arguments={"rank": 0, "step": 1, "until": 4})
    assert "CHECKPOINT step 2 SKIPPED: step 1 is still being written" in ended.outputs[0]
    checkpoints = tmp_path / "slow/checkpoints"
    assert not (checkpoints / "step-2.a1").exists()
    assert {name.step for name in commit_names(checkpoints)} >= {1, 5}
    events = [record for record in records(tmp_path / "slow/logs/events.jsonl") if record["kind"] == "saveSkipped"]
    assert [event["step"] for event in events][:2] == [2, 3]
    assert records(tmp_path / "slow/logs/train_log.jsonl")[-1]["savesSkipped"] == len(events)


def test_a_defect_in_the_background_ends_the_run_and_is_told(ranks: ForkServer, run_file: RunFile) -> None:
    ended = ranks.run(
        "fail_unexpectedly", [run_file("broken")] * 2, arguments={"step": 2, "rank": 1}, codes=None, kill_rest_after_first=True
    )
    assert ended.codes[1] == 1
    assert "RuntimeError: a defect of the writer" in ended.outputs[1]


@pytest.mark.parametrize(
    ("point", "rank", "newest"),
    [
        ("before the shard", 1, 2),
        ("in the shard", 0, 2),
        ("after the shard", 1, 2),
        ("before the manifest", 0, 2),
        ("in the manifest", 0, 2),
        ("after the manifest", 0, 4),
        ("before rotation", 0, 4),
    ],
)
def test_a_rank_killed_at_any_point_of_a_save_leaves_a_whole_commit(
    ranks: ForkServer, tmp_path: Path, point: str, rank: int, newest: int
) -> None:
    arguments = {"folder": str(tmp_path), "point": point, "rank": rank}
    ended = ranks.run("die_saving", [None] * 2, arguments=arguments, codes=None, kill_rest_after_first=True)
    assert ended.codes[rank] == -9, ended.output
    chain = read_chain(tmp_path)
    assert chain[0].step == newest
    for name in chain:
        manifest = decode((tmp_path / str(name) / "manifest.json").read_bytes())
        assert [shard_problem(tmp_path / str(name), shard) for shard in manifest.shards] == [None, None]


def test_what_a_failed_save_left_is_removed_as_soon_as_no_rank_writes_there(ranks: ForkServer, tmp_path: Path) -> None:
    ranks.run("fail_and_save_again", [None] * 2, arguments={"folder": str(tmp_path)})
