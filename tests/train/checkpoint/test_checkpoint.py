"""A commit is whole or it isn't one; saving uses no collective."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, RunFile
from references import Reference

EACH_STEP: dict[str, Any] = {"checkpoint": {"everySteps": 1}, "evaluation": None}
FIVE_STEPS: dict[str, Any] = {"optimization": {"maxSteps": 5}, "evaluation": {"everySteps": 2}, "checkpoint": {"everySteps": 1, "keep": 9}}
"""Of a reference run that many tests start from: each step is a commit."""


@pytest.mark.parametrize(("file", "rank"), [("shard", 1), ("manifest", 0)])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_previous_commit(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, file: str, rank: int
) -> None:
    path = run_file("killed", optimization={"maxSteps": 2}, **EACH_STEP)
    died = ranks.run("die_writing", [path] * 2, arguments={"file": file, "step": 2, "rank": rank}, codes=None, kill_rest_after_first=True)
    assert died.codes[rank] == -9, died.output
    assert (tmp_path / "killed/checkpoints/step-2.a1").exists()
    ended = ranks.run("main", [path] * 2)
    assert f"Resuming from {tmp_path / 'killed/checkpoints/step-1.a1'} (step 1)" in ended.output
    assert not (tmp_path / "killed/checkpoints/step-2.a1").exists()


def test_damaged_newest_commits_are_named_and_the_one_before_them_is_used(
    ranks: ForkServer, run_file: RunFile, reference: Reference, tmp_path: Path
) -> None:
    """A bit flipped, an end cut off, a shard gone, half a manifest: one of them in each of the newest four."""
    checkpoints = shutil.copytree(reference(2, **FIVE_STEPS) / "checkpoints", tmp_path / "damaged/checkpoints")
    flipped, cut, gone = (checkpoints / f"step-{step}.a1/shard-r00001-of-00002.safetensors" for step in (5, 4, 3))
    content = bytearray(flipped.read_bytes())
    content[-100] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-10])
    gone.unlink()
    (checkpoints / "step-2.a1/manifest.json").write_text('{"format": "lockstep-checkpoint/1"')
    ended = ranks.run("main", [run_file("damaged", optimization={"maxSteps": 2})] * 2)
    for step in (5, 4, 3, 2):
        assert f"step-{step}.a1 can't be used (" in ended.outputs[0]
    assert f"Resuming from {checkpoints / 'step-1.a1'}" in ended.outputs[0]


def start_of(source: Path, target: Path, keep: str) -> Path:
    """Make a folder as the run at `source` had left it when `keep` was its newest commit; return that commit."""
    (target / "checkpoints").mkdir(parents=True)
    shutil.copytree(source / "checkpoints" / "chain", target / "checkpoints" / "chain")
    return Path(shutil.copytree(source / "checkpoints" / keep, target / "checkpoints" / keep))


def test_a_run_whose_every_commit_is_damaged_stops_instead_of_starting_again(
    ranks: ForkServer, run_file: RunFile, reference: Reference, tmp_path: Path
) -> None:
    (start_of(reference(2, **FIVE_STEPS), tmp_path / "lost", "step-2.a1") / "shard-r00000-of-00002.safetensors").write_bytes(b"")
    ended = ranks.run("main", [run_file("lost")], codes=78)
    assert "none of the 1 commits" in ended.output


def test_a_late_commit_of_an_older_attempt_is_never_chosen(
    ranks: ForkServer, run_file: RunFile, reference: Reference, tmp_path: Path
) -> None:
    whole = reference(2, **FIVE_STEPS)
    start_of(whole, tmp_path / "late", "step-2.a1")
    checkpoints, path = tmp_path / "late/checkpoints", run_file("late", optimization={"maxSteps": 3})
    ranks.run("main", [path])  # attempt 2, from step 2
    shutil.copytree(whole / "checkpoints/step-3.a1", checkpoints / "step-3.a1")
    shutil.rmtree(checkpoints / "step-3.a2")
    ended = ranks.run("main", [path])
    assert f"Resuming from {checkpoints / 'step-2.a1'}" in ended.output


@pytest.mark.parametrize("stage", ["Stage2", "Stage3"])
def test_a_save_runs_no_collective(ranks: ForkServer, run_file: RunFile, stage: str) -> None:
    ranks.run("count_collectives_of_a_save", [run_file("quiet", zeroStage=stage)] * 2)


def test_padding_never_reaches_a_shard(ranks: ForkServer, run_file: RunFile) -> None:
    ranks.run("poisoned_padding", [run_file("padded", zeroStage="Stage3")] * 2)


def test_rotation_keeps_as_many_commits_as_asked(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimization": {"maxSteps": 4}, "checkpoint": {"everySteps": 1, "keep": 3}, "evaluation": None}
    ranks.run("main", [run_file("rotated", **settings)] * 2)
    assert sorted(path.name for path in (tmp_path / "rotated/checkpoints").iterdir()) == ["chain", "step-2.a1", "step-3.a1", "step-4.a1"]


def test_a_full_disk_costs_a_commit_and_not_the_run(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    """But the commit of the last step: without it the run would end as if it were saved."""
    path = run_file("full", optimization={"maxSteps": 3}, **EACH_STEP)
    ended = ranks.run("fail_writing", [path] * 2, arguments={"steps": [1, 3], "rank": 1}, codes=1)
    assert all("TrainerError: step 3 could not be saved: rank 1 on node 0: " in output for output in ended.outputs), ended.output
    assert not (tmp_path / "full/adapter").exists()
    assert "CHECKPOINT step 1 FAILED: rank 1 on node 0: " in ended.outputs[0]
    assert "No space left on device" in ended.outputs[0]
    assert not (tmp_path / "full/checkpoints/step-1.a1/manifest.json").exists()
    assert (tmp_path / "full/checkpoints/step-2.a1/manifest.json").exists()


def test_an_unknown_deepspeed_is_noticed_before_anything_is_saved(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    ended = ranks.run("broken_layout", [run_file("unknown")], codes=1)
    assert "install the pinned deepspeed" in ended.output
    assert not (tmp_path / "unknown/checkpoints").exists()
