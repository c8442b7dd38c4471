"""A commit is whole or it isn't one; saving uses no collective."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rank_harness import ForkServer, RunFile


@pytest.mark.parametrize(("file", "rank"), [("shard", 1), ("manifest", 0)])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_previous_commit(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, file: str, rank: int
) -> None:
    path = run_file("killed")
    died = ranks.run("die_writing", [path] * 2, arguments={"file": file, "step": 4, "rank": rank}, kill_rest_after_first=True)
    assert died.codes[rank] == -9, died.output
    assert (tmp_path / "killed/checkpoints/step-4.a1").exists()
    ended = ranks.run("main", [path] * 2)
    assert ended.codes == [0, 0], ended.output
    assert f"Resuming from {tmp_path / 'killed/checkpoints/step-2.a1'} (step 2)" in ended.output
    assert not (tmp_path / "killed/checkpoints/step-4.a1").exists()


@pytest.fixture(scope="module")
def finished() -> dict[str, Path]:
    """The checkpoints of a run of four steps; made by the first test that needs them."""
    return {}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_newest_commit_is_named_and_the_one_before_it_is_used(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, finished: dict[str, Path], damage: str
) -> None:
    if not finished:
        assert ranks.run("main", [run_file("whole", optimization={"maxSteps": 4})] * 2).codes == [0, 0]
        finished["checkpoints"] = tmp_path / "whole" / "checkpoints"
    shutil.copytree(finished["checkpoints"], tmp_path / "damaged" / "checkpoints")
    path = run_file("damaged", optimization={"maxSteps": 4})
    commit = tmp_path / "damaged/checkpoints/step-4.a1"
    shard = commit / "shard-r00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    if damage == "flip":
        content[-100] ^= 1
        shard.write_bytes(content)
    elif damage == "truncate":
        shard.write_bytes(content[:-10])
    elif damage == "remove":
        shard.unlink()
    else:
        (commit / "manifest.json").write_text('{"format": "lockstep-checkpoint/1"')
    ended = ranks.run("main", [path] * 2)
    assert ended.codes == [0, 0], ended.output
    assert "step-4.a1 can't be used (" in ended.outputs[0]
    assert f"Resuming from {tmp_path / 'damaged/checkpoints/step-2.a1'}" in ended.outputs[0]


def test_a_run_whose_every_commit_is_damaged_stops_instead_of_starting_again(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    path = run_file("lost", optimization={"maxSteps": 2})
    assert ranks.run("main", [path]).codes == [0]
    (tmp_path / "lost/checkpoints/step-2.a1/shard-r00000-of-00001.safetensors").write_bytes(b"")
    ended = ranks.run("main", [path])
    assert ended.codes == [78]
    assert "none of the 1 commits" in ended.output


def test_a_late_commit_of_an_older_attempt_is_never_chosen(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    path = run_file("late", optimization={"maxSteps": 4})
    checkpoints = tmp_path / "late/checkpoints"
    assert ranks.run("main", [path]).codes == [0]
    shutil.move(checkpoints / "step-4.a1", tmp_path / "kept-back")
    assert ranks.run("main", [path]).codes == [0]  # attempt 2, from step 2
    shutil.move(tmp_path / "kept-back", checkpoints / "step-4.a1")
    shutil.rmtree(checkpoints / "step-4.a2")
    ended = ranks.run("main", [path])
    assert f"Resuming from {checkpoints / 'step-2.a1'}" in ended.output


@pytest.mark.parametrize("stage", ["Stage2", "Stage3"])
def test_a_save_runs_no_collective(ranks: ForkServer, run_file: RunFile, stage: str) -> None:
    ended = ranks.run("count_collectives_of_a_save", [run_file("quiet", zeroStage=stage)] * 2)
    assert ended.codes == [0, 0], ended.output


def test_padding_never_reaches_a_shard(ranks: ForkServer, run_file: RunFile) -> None:
    ended = ranks.run("poisoned_padding", [run_file("padded", zeroStage="Stage3")] * 2)
    assert ended.codes == [0, 0], ended.output


def test_rotation_keeps_as_many_commits_as_asked(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    settings = {"optimization": {"maxSteps": 5}, "checkpoint": {"everySteps": 1, "keep": 3}}
    assert ranks.run("main", [run_file("rotated", **settings)] * 2).codes == [0, 0]
    assert sorted(path.name for path in (tmp_path / "rotated/checkpoints").iterdir()) == ["chain", "step-3.a1", "step-4.a1", "step-5.a1"]


def test_the_newest_two_commits_are_never_rotated_away(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    settings = {"optimization": {"maxSteps": 3}, "checkpoint": {"everySteps": 1, "keep": 1}}
    assert ranks.run("main", [run_file("two", **settings)]).codes == [0]
    assert sorted(path.name for path in (tmp_path / "two/checkpoints").iterdir()) == ["chain", "step-2.a1", "step-3.a1"]


def test_a_full_disk_costs_a_commit_and_not_the_run(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    """But the commit of the last step: without it the run would end as if it were saved."""
    ended = ranks.run("fail_writing", [run_file("full")] * 2, arguments={"steps": [2, 6], "rank": 1})
    assert ended.codes == [1, 1], ended.output
    assert all("TrainerError: step 6 could not be saved: rank 1 on node 0: " in output for output in ended.outputs), ended.output
    assert not (tmp_path / "full/adapter").exists()
    assert "CHECKPOINT step 2 FAILED: rank 1 on node 0: " in ended.outputs[0]
    assert "No space left on device" in ended.outputs[0]
    assert not (tmp_path / "full/checkpoints/step-2.a1/manifest.json").exists()
    assert (tmp_path / "full/checkpoints/step-4.a1/manifest.json").exists()


def test_an_unknown_deepspeed_is_noticed_before_anything_is_saved(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    ended = ranks.run("broken_layout", [run_file("unknown")])
    assert ended.codes == [1]
    assert "install the pinned deepspeed" in ended.output
    assert not (tmp_path / "unknown/checkpoints").exists()
