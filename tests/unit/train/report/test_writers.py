"""Libraries that send metrics: what they are asked for, and how long they may take."""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep_train.report.sinks.sink import MetricsSink, Point, ServiceRun
from lockstep_train.report.sinks.writers import MLflowWriter, WandBWriter
from unit.virtual_time import VirtualClock

CLOCK_STARTS = 1000.0


def module(name: str, monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    made = ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


def test_a_value_in_mlflow_has_five_hundred_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str]] = []
    client = SimpleNamespace(
        get_experiment_by_name=lambda _: SimpleNamespace(experiment_id="1"),
        create_run=lambda *_, **__: SimpleNamespace(info=SimpleNamespace(run_id="2")),
        log_batch=lambda _, params: sent.extend(params),
    )
    module("mlflow", monkeypatch, MlflowClient=lambda *_, **__: client)
    module("mlflow.entities", monkeypatch, Param=lambda name, value: (name, value))
    MLflowWriter("x", ServiceRun(tmp_path / "run.json", None, 0), {"a": "y" * 600, "b": 1})
    assert sent == [("a", "y" * 500), ("b", "1")]


def test_wandb_is_given_up_for_this_time_after_thirty_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock(CLOCK_STARTS)

    def init(settings: SimpleNamespace, **_: Any) -> None:
        clock.sleep(settings.init_timeout)
        raise TimeoutError("no answer")

    module("wandb", monkeypatch, init=init, Settings=SimpleNamespace)
    with pytest.raises(TimeoutError):
        WandBWriter("x", tmp_path, ServiceRun(tmp_path / "run.json", None, 0), {})
    assert clock.now == CLOCK_STARTS + 30


class Empty(queue.Queue[Point]):
    """A queue into which nothing comes, on a clock of its own."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def get(self, block: bool = True, timeout: float | None = None) -> Point:
        assert timeout is not None
        self._clock.sleep(timeout)
        raise queue.Empty


def test_a_destination_without_points_notices_the_end_of_the_run_within_a_fifth_of_a_second() -> None:
    clock = VirtualClock(CLOCK_STARTS)
    sink = MetricsSink("Test", SimpleNamespace, lambda *_, **__: None)
    sink._points = Empty(clock)
    ends = [True, False]
    sink._closing.is_set = ends.pop  # type: ignore[method-assign]
    sink._work()
    assert clock.now == CLOCK_STARTS + 0.2
