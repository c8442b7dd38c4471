"""How many points wait for a destination, how many it gets at once, and from which length on a value is a secret."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep_train.report.sinks.sink import MetricsSink, Point, ServiceRun, redact
from lockstep_train.report.sinks.writers import MLflowWriter


def test_two_thousand_points_wait_of_which_a_destination_gets_two_hundred_at_once() -> None:
    sink = MetricsSink("Test", SimpleNamespace, lambda *_, **__: None)
    sink._started = True  # without its thread
    for step in range(2010):
        sink.put(Point(step, 0.0, {}))
    assert sink.dropped == 10
    assert [point.step for point in sink._take()] == list(range(200))


def test_mlflow_gets_a_thousand_metrics_and_a_hundred_parameters_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []
    client = SimpleNamespace(
        get_experiment_by_name=lambda _: SimpleNamespace(experiment_id="1"),
        create_run=lambda *_, **__: SimpleNamespace(info=SimpleNamespace(run_id="2")),
        log_batch=lambda _, **lists: sent.extend((kind, len(listed)) for kind, listed in lists.items()),
    )
    for name, content in (
        ("mlflow", {"MlflowClient": lambda *_, **__: client}),
        ("mlflow.entities", {"Param": lambda *item: item, "Metric": lambda *item: item}),
    ):
        vars(made := ModuleType(name)).update(content)
        monkeypatch.setitem(sys.modules, name, made)
    parameters = {f"p{number}": number for number in range(250)}
    writer = MLflowWriter("x", ServiceRun(tmp_path / "run.json", None, 0), parameters)
    writer.write([Point(step, 0.0, {f"m{number}": 1.0 for number in range(50)}) for step in range(50)])
    assert sent == [("params", 100), ("params", 100), ("params", 50), ("metrics", 1000), ("metrics", 1000), ("metrics", 500)]


def test_a_value_of_six_characters_is_a_secret_and_a_shorter_one_a_word() -> None:
    environ: dict[str, Any] = {"A_TOKEN": "banana", "B_TOKEN": "apple"}
    assert redact("banana and apple", environ) == "*** and apple"
