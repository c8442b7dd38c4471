"""Schedules, and the export command."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import TrainingArguments

from lockstep.cli.shared.trainer import trainer_command
from lockstep_spec.choices import Schedule
from lockstep_spec.length import warmup_steps
from lockstep_spec.training import OptimizationConfig
from lockstep_train.engine.optimizer import learning_rate

OPTIMIZATION = OptimizationConfig(epochs=1, learning_rate=1.0, micro_batch_size=1, warmup_steps=4, schedule=Schedule.LINEAR)


def rates(schedule: Schedule, total: int = 14) -> list[float]:
    return [learning_rate(replace(OPTIMIZATION, schedule=schedule), step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", list(Schedule))
def test_the_warm_up_rises_linearly_to_the_full_rate(schedule: Schedule) -> None:
    assert rates(schedule)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_linear_and_the_cosine_schedule_fall_to_nearly_zero() -> None:
    for schedule in (Schedule.LINEAR, Schedule.COSINE):
        after = rates(schedule)[4:]
        assert after == sorted(after, reverse=True)
        assert 0 < after[-1] < 0.15
    assert rates(Schedule.LINEAR)[9] == 0.5
    assert rates(Schedule.COSINE)[9] == pytest.approx(0.5)


def test_the_constant_schedule_stays() -> None:
    assert set(rates(Schedule.CONSTANT)[4:]) == {1.0}


def test_the_linear_and_the_cosine_schedule_fall_to_the_stated_part_of_the_full_rate() -> None:
    for schedule in (Schedule.LINEAR, Schedule.COSINE):
        ending = replace(OPTIMIZATION, schedule=schedule, min_learning_rate_ratio=0.25)
        after = [learning_rate(ending, step, 14) for step in range(5, 16)]
        assert after == sorted(after, reverse=True)
        assert after[0] == 1.0
        assert after[-1] == pytest.approx(0.25, abs=1e-12), "the step after the last one, where the schedule ends"
        assert after[5] == pytest.approx(0.625)
    constant = replace(OPTIMIZATION, schedule=Schedule.CONSTANT, min_learning_rate_ratio=0.25)
    assert learning_rate(constant, 14, 14) == 1.0


@pytest.mark.parametrize(("ratio", "total", "steps"), [(0.1, 40, 4), (0.1, 41, 5), (0.03, 10, 1), (0.0, 10, 0)])
def test_a_warm_up_that_is_a_part_of_all_steps_is_rounded_up_as_in_transformers(ratio: float, total: int, steps: int) -> None:
    stated = replace(OPTIMIZATION, warmup_steps=ratio)
    assert warmup_steps(ratio, total) == steps
    assert TrainingArguments(warmup_steps=ratio, use_cpu=True).get_warmup_steps(total) == steps
    assert learning_rate(stated, max(1, steps), total) == 1.0
    if steps > 1:
        assert learning_rate(stated, 1, total) == 1 / steps


def test_a_run_shorter_than_its_warm_up_is_legal() -> None:
    assert rates(Schedule.COSINE, total=2) == [0.25, 0.5]


def test_the_exporter_runs_as_a_process_of_its_own() -> None:
    command = trainer_command("proof", [Path("runs/x"), "--output", Path("out")])
    assert command == [sys.executable, "-m", "lockstep_train.proof", "runs/x", "--output", "out"]
