"""Ranks that hang, fail, or are asked to stop at any moment end together, with the code that says why."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from rank_harness import ForkServer, RunFile


def test_a_rank_that_hangs_is_named_and_all_end_with_76(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    path = run_file("hang", evaluation=None, timeouts={"stepSeconds": 5})
    ended = ranks.run("hang", [path] * 2, arguments={"step": 2, "rank": 1}, codes=76)
    for output in ended.outputs:
        assert "rank 1 has not finished it, last seen in Step 2, forward of micro-batch 1 of 3" in output
    assert "fall_asleep" in (tmp_path / "hang/logs/hang-attempt-1-rank-1.txt").read_text()


def test_a_rank_that_fails_ends_the_others_even_where_they_wait_for_nothing(ranks: ForkServer, run_file: RunFile) -> None:
    ended = ranks.run("fail_while_another_works", [run_file("broken", evaluation=None)] * 2, arguments={"step": 2}, codes=1)
    assert "rank 0: rank 1 has failed (ValueError: this rank is broken); this rank can't go on without it" in ended.outputs[0]


def test_a_rank_that_is_killed_ends_the_others_at_once(ranks: ForkServer, run_file: RunFile) -> None:
    ranks.run("die", [run_file("killed", evaluation=None)] * 2, arguments={"step": 2}, codes=[1, -signal.SIGKILL])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_while_one_rank_loads_ends_all_with_75_and_writes_nothing(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, rank: int
) -> None:
    ended = ranks.run("terminate_while_loading", [run_file("loading")] * 2, arguments={"rank": rank}, codes=75)
    assert "asked to stop before the first step: the state is the one it started from" in ended.outputs[1]
    assert not (tmp_path / "loading/checkpoints").exists()


@pytest.mark.parametrize(("stage", "rank"), [("Stage2", 0), ("Stage3", 1)])
def test_a_stop_within_an_evaluation_leaves_it_and_saves_its_step(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, stage: str, rank: int
) -> None:
    path = run_file(
        "evaluating", zeroStage=stage, evaluation={"everySteps": 3}, checkpoint={"everySteps": 50}, optimization={"microBatchSize": 7}
    )
    ended = ranks.run("terminate_in_evaluation", [path] * 2, arguments={"step": 3, "rank": rank}, codes=75)
    assert "The evaluation at step 3 ends early: the run was asked to stop" in ended.outputs[0]
    assert (tmp_path / "evaluating/checkpoints/step-3.a1/manifest.json").exists()


def test_all_ranks_leave_an_evaluation_before_the_same_batch_though_one_node_need_not_wait_for_the_other(
    ranks: ForkServer, run_file: RunFile
) -> None:
    path = run_file(
        "ahead", zeroStage="Stage3", hierarchicalPartition="Node", evaluation={"everySteps": 3, "holdout": "0.8", "samples": 40},
        optimization={"microBatchSize": 1}, timeouts={"collectiveSeconds": 60},
    )  # fmt: skip
    ended = ranks.run("terminate_in_evaluation_of_a_node_ahead", [path] * 4, nodes=2, codes=75)
    left = [line for output in ended.outputs for line in output.splitlines() if line.startswith("left before turn")]
    assert len(left) == 4
    assert len(set(left)) == 1, left


def test_a_stop_before_the_first_step_has_nothing_to_save(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    ranks.run("terminate_in_evaluation", [run_file("early")] * 2, arguments={"step": 0, "rank": 1}, codes=75)
    assert not list((tmp_path / "early/checkpoints").glob("step-*"))


@pytest.mark.parametrize("steps", [[1, 1], [2, 3]])
def test_several_signals_at_different_steps_are_one_stop_at_the_first_of_them(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, steps: list[int]
) -> None:
    """Step 1 is in the warm-up."""
    path = run_file("twice", evaluation=None, checkpoint={"everySteps": 50})
    ranks.run("terminate_twice", [path] * 2, arguments={"steps": steps}, codes=75)
    assert (tmp_path / f"twice/checkpoints/step-{min(steps)}.a1/manifest.json").exists()


def test_a_start_says_what_has_no_effect_which_threads_ranks_have_and_that_one_has_no_samples(ranks: ForkServer, run_file: RunFile) -> None:
    path = run_file("timeout", evaluation=None, optimization={"maxSteps": 1, "globalBatchSize": 1})
    ended = ranks.run("main", [path] * 2, NCCL_TIMEOUT="3600")
    assert "NCCL_TIMEOUT=3600 has no effect" in ended.output
    assert "Threads of a rank: 1, as OMP_NUM_THREADS states" in ended.output
    assert "Warning: a step's 1 samples are not enough for all ranks: 1 of 2 have nothing to do in any step." in ended.output
