"""`lockstep bench scaling`: the jobs that are measured, what their steps say, and what a person reads of it."""

from __future__ import annotations

from typing import Any

import pytest

from golden.plan_cases import job, profile
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.plan.ahead.scaling import (
    RECORDED,
    Measured,
    as_json,
    base_of,
    batch_line,
    closing,
    efficiency,
    heading,
    measure,
    row,
    scaling_job,
    sizes,
)
from lockstep.platforms.kubernetes.shortruns import prepared_to_measure
from lockstep_gang.contract.run import WhenDone, parse_run
from lockstep_spec.choices import Content, StorageMode

TRAINING: dict[str, Any] = {
    "model": {"name": "/workspace/models/x"},
    "data": {"path": "/datasets/x.jsonl"},
    "optimization": {"maxSteps": 5000, "microBatchSize": 2, "warmupSteps": "100", "epochs": 3},
    "evaluation": {"holdout": "0.1"},
    "checkpoint": {"everySteps": 2},
    "reportTo": ["WandB", "MLflow"],
}


def training_job(**more: Any) -> TrainingJob:
    spec = {"nodes": 4, "training": TRAINING, "activeDeadlineSeconds": 60, "restart": {"maxRestarts": 5}} | more
    return TrainingJob.model_validate({"metadata": {"name": "x"}, "spec": spec})


@pytest.mark.parametrize(
    ("stated", "nodes", "numbers"),
    [
        (None, 1, (1,)),
        (None, 3, (1, 2, 3)),
        (None, 4, (1, 2, 3, 4)),
        (None, 8, (1, 2, 4, 8)),
        (None, 12, (1, 2, 4, 8, 12)),
        ("4, 1,2,1", 8, (1, 2, 4)),
    ],
)
def test_numbers_of_nodes_go_up_to_the_job_s_or_are_stated(stated: str | None, nodes: int, numbers: tuple[int, ...]) -> None:
    assert sizes(stated, nodes) == numbers


@pytest.mark.parametrize("stated", ["", "0", "1,,2", "two", "1-4", "2000"])
def test_what_is_no_number_of_nodes_is_refused(stated: str) -> None:
    with pytest.raises(ConfigError, match=r"must be numbers of nodes from 1 to 1024 .* such as 1,2,4"):
        sizes(stated, 4)


def test_a_measured_job_does_steps_alone_with_the_job_s_own_batch() -> None:
    measured = scaling_job(training_job(), 2, 20).spec
    training = measured.training
    assert (measured.nodes, measured.restart.max_restarts, measured.active_deadline_seconds) == (2, 0, None)
    assert (training.optimization.max_steps, training.optimization.micro_batch_size) == (3 + 20 + 1, 2)
    assert training.optimization.epochs > 1000  # so that a small file lasts
    assert (training.evaluation, training.report_to) == (None, [])
    assert (training.checkpoint.resume_from, training.checkpoint.content) == ("None", Content.LITE)
    assert training.checkpoint.every_steps > 1000
    TrainingJob.model_validate(scaling_job(training_job(), 2, 20).model_dump(by_alias=True))  # (each of the API's rules holds)


def test_a_script_has_no_steps_to_measure() -> None:
    with pytest.raises(ConfigError, match="this job runs a script"):
        scaling_job(TrainingJob.model_validate({"metadata": {"name": "x"}, "spec": {"script": {"path": "a.py"}}}), 1, 20)


def records(count: int, **values: float) -> dict[str, dict[str, float]]:
    usual = {"tokens": 1000.0, "stepSeconds": 0.5, "medianRankSeconds": 0.3, "optimizerSeconds": 0.1, "saveWaitSeconds": 0.0}
    return {str(step): {name: (usual | values)[name] for name in RECORDED} for step in range(1, count + 1)}


def test_speed_is_that_of_the_steps_between_the_first_and_the_last() -> None:
    steps = records(3 + 11)
    for step in ("1", "2", "3"):
        steps[step]["stepSeconds"] = 100.0
    measured = measure(steps, 2, 16)
    assert (measured.nodes, measured.ranks, measured.steps) == (2, 16, 10)
    assert measured.tokens_per_second == pytest.approx(2000) and measured.step_seconds == pytest.approx(0.5)
    assert measured.waiting == pytest.approx(0.2)  # 0.5 s less 0.3 of passes and 0.1 of the update


def test_a_rank_s_own_time_of_a_step_stands_in_the_next_record() -> None:
    steps = records(3 + 3)
    steps[str(3 + 1)]["medianRankSeconds"] = 99.0  # of the last step of the warm-up
    assert measure(steps, 1, 1).waiting == pytest.approx(0.2)


def test_without_the_ranks_own_time_the_waiting_is_not_known_and_without_steps_nothing_is() -> None:
    steps: dict[str, dict[str, Any]] = {step: {**record, "medianRankSeconds": None} for step, record in records(10).items()}
    assert measure(steps, 1, 1).waiting is None
    assert measure(records(3 + 1), 1, 1).problem and measure({}, 1, 1).problem


ONE, TWO = Measured(1, 8, 20, 1000.0, 0.5, 0.0), Measured(2, 16, 20, 1800.0, 0.55, 0.104)
BROKEN = Measured(4, 32, problem="rank 3 ran out of memory")


def test_efficiency_is_the_speed_of_a_node_against_the_smallest_run_s() -> None:
    assert efficiency(TWO, ONE) == pytest.approx(0.9) and efficiency(BROKEN, ONE) is None
    assert base_of([BROKEN, TWO, ONE]) is ONE and base_of([BROKEN]) is None


def test_the_table_has_a_row_for_each_number_of_nodes_and_says_why_one_has_no_speed() -> None:
    lines = [heading(), *(row(one, ONE) for one in (ONE, TWO, BROKEN))]
    assert [line.split() for line in lines[:3]] == [
        ["NODES", "RANKS", "TOKENS/S", "STEP", "TIME", "EFFICIENCY", "WAITING"],
        ["1", "8", "1000", "0.5", "s", "100%", "0%"],
        ["2", "16", "1800", "0.55", "s", "90%", "10%"],
    ]
    assert len({len(line) for line in lines[:3]}) == 1 and lines[3].endswith("32  rank 3 ran out of memory")


def test_what_stays_the_same_and_what_the_efficiency_is_against_is_said() -> None:
    assert "every rank has 2 samples a step" in batch_line(training_job())
    fixed = training_job(training=TRAINING | {"optimization": {"globalBatchSize": 64}})
    assert "every step has 64 samples on any number of nodes" in batch_line(fixed)
    assert list(closing([ONE, TWO], one_machine=False)) == []
    assert "efficiency is against 2 nodes" in next(iter(closing([BROKEN, TWO], one_machine=False)))
    assert "share its cores" in next(iter(closing([ONE, TWO], one_machine=True)))


def test_json_has_shares_from_0_to_1_and_leaves_out_what_is_not_known() -> None:
    assert as_json([ONE, TWO, BROKEN])["runs"] == [
        {"nodes": 1, "ranks": 8, "steps": 20, "tokensPerSecond": 1000.0, "stepSeconds": 0.5, "efficiency": 1.0, "waiting": 0.0},
        {"nodes": 2, "ranks": 16, "steps": 20, "tokensPerSecond": 1800.0, "stepSeconds": 0.55, "efficiency": 0.9, "waiting": 0.104},
        {"nodes": 4, "ranks": 32, "problem": "rank 3 ran out of memory"},
    ]


@pytest.mark.parametrize(("mode", "name"), [("Shared", "x-scaling"), ("PerPod", "x")])
def test_in_pods_a_measured_run_has_a_folder_that_no_job_has_and_finds_the_job_s_volumes(mode: str, name: str) -> None:
    wanted = scaling_job(training_job(storage={"mode": mode}, gpusPerNode=0), 2, 20)
    run = prepared_to_measure(wanted, profile(), "ns")
    text = parse_run(run.frozen.run)
    assert (run.name, text.run_dir, text.nodes, text.when_done) == (name, "/workspace/runs/.measured-x", 2, WhenDone.WAIT)
    assert text.storage is StorageMode(mode) and job().metadata.name == "x"
