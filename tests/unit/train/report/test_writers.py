"""Libraries that send metrics: what they are asked for, how long they may take, how much they get at once; and what is a secret."""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep_train.report.sinks.sink import MetricsSink, Point, ServiceRun, redact
from lockstep_train.report.sinks.writers import MLflowWriter, WandBWriter
from unit.virtual_time import VirtualClock

CLOCK_STARTS = 1000.0


def module(name: str, monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    made = ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


def mlflow(monkeypatch: pytest.MonkeyPatch, folder: Path, parameters: dict[str, Any]) -> tuple[list[tuple[str, list[Any]]], MLflowWriter]:
    """What an MLflow server gets, and the writer that sends it."""
    sent: list[tuple[str, list[Any]]] = []
    client = SimpleNamespace(
        get_experiment_by_name=lambda _: SimpleNamespace(experiment_id="1"),
        create_run=lambda *_, **__: SimpleNamespace(info=SimpleNamespace(run_id="2")),
        log_batch=lambda _, **lists: sent.extend(lists.items()),
    )
    module("mlflow", monkeypatch, MlflowClient=lambda *_, **__: client)
    module("mlflow.entities", monkeypatch, Param=lambda *item: item, Metric=lambda *item: item)
    return sent, MLflowWriter("x", ServiceRun(folder / "run.json", None, 0), parameters)


def test_a_value_in_mlflow_has_five_hundred_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, _ = mlflow(monkeypatch, tmp_path, {"a": "y" * 600, "b": 1})
    assert sent == [("params", [("a", "y" * 500), ("b", "1")])]


def test_mlflow_gets_a_thousand_metrics_and_a_hundred_parameters_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, writer = mlflow(monkeypatch, tmp_path, {f"p{number}": number for number in range(250)})
    writer.write([Point(step, 0.0, {f"m{number}": 1.0 for number in range(50)}) for step in range(50)])
    parts = [("params", 100), ("params", 100), ("params", 50), ("metrics", 1000), ("metrics", 1000), ("metrics", 500)]
    assert [(kind, len(listed)) for kind, listed in sent] == parts


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


def test_two_thousand_points_wait_of_which_a_destination_gets_two_hundred_at_once() -> None:
    sink = MetricsSink("Test", SimpleNamespace, lambda *_, **__: None)
    sink._started = True  # without its thread
    for step in range(2010):
        sink.put(Point(step, 0.0, {}))
    assert sink.dropped == 10
    assert [point.step for point in sink._take()] == list(range(200))


def test_a_value_of_six_characters_is_a_secret_and_a_shorter_one_a_word() -> None:
    assert redact("banana and apple", {"A_TOKEN": "banana", "B_TOKEN": "apple"}) == "*** and apple"
