"""Destinations of metrics: what they do to a run (nothing), whatever happens to them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep_spec.choices import Tracker
from lockstep_train.base.errors import ConfigError
from lockstep_train.report import reporter as reporter_module
from lockstep_train.report.reporter import Reporter
from lockstep_train.report.sinks import choose
from lockstep_train.report.sinks import sink as sink_module
from lockstep_train.report.sinks.sink import MetricsSink, Point, ServiceRun, redact
from lockstep_train.report.sinks.writers import flat

FOREVER_SECONDS = 60.0


class Server:
    """A writer that records; `hang` holds it, `refuse` makes its next calls fail."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.outcome: str | None = None
        self.refuse = 0
        self.running = threading.Event()
        self.running.set()
        self.arrived = threading.Event()

    def connect(self) -> Server:
        return self

    def write(self, points: list[Point]) -> None:
        self.arrived.set()
        assert self.running.wait(FOREVER_SECONDS)
        if self.refuse:
            self.refuse -= 1
            raise ConnectionError("503 for https://anna:hunter2@metrics.example\nretry later")
        self.points += points

    def close(self, outcome: str) -> None:
        self.outcome = outcome


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.running.set()


@pytest.fixture
def told() -> list[dict[str, Any]]:
    return []


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "RETRY_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(sink_module, "POLL_SECONDS", 0.01)


def make(connect: Callable[[], Any], told: list[dict[str, Any]]) -> MetricsSink:
    return MetricsSink("Test", connect, lambda kind, **fields: told.append({"kind": kind, **fields}))


def point(step: int) -> Point:
    return Point(step, 1e9 + step, {"train/loss": 1.0})


def test_points_arrive_in_order_and_the_end_is_told(server: Server, told: list[dict[str, Any]]) -> None:
    sink = make(server.connect, told)
    for step in range(500):
        sink.put(point(step))
    sink.close("Done")
    assert sink.drained(FOREVER_SECONDS)
    assert [arrived.step for arrived in server.points] == list(range(500))
    assert (server.outcome, sink.dropped, told) == ("Done", 0, [])


def test_a_server_that_hangs_costs_points_and_no_time(server: Server, told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "QUEUE_POINTS", 10)
    server.running.clear()
    sink = make(server.connect, told)
    sink.put(point(0))
    assert server.arrived.wait(FOREVER_SECONDS)
    for step in range(1, 101):
        sink.put(point(step))  # would wait for ever if it waited
    sink.close("Done")
    assert not sink.drained(0.05)
    assert sink.dropped == 100  # ten of them in the queue


def test_a_server_that_is_away_for_a_while_gets_everything(server: Server, told: list[dict[str, Any]]) -> None:
    server.refuse = 2
    sink = make(server.connect, told)
    for step in range(5):
        sink.put(point(step))
    while not server.points:
        time.sleep(0.001)
    sink.close("Done")
    assert sink.drained(FOREVER_SECONDS)
    assert sorted(arrived.step for arrived in server.points) == [0, 1, 2, 3, 4]
    assert sink.dropped == 0


def test_a_server_that_refuses_everything_is_told_once_and_without_its_password(server: Server, told: list[dict[str, Any]]) -> None:
    server.refuse = 1_000_000
    sink = make(server.connect, told)
    for step in range(20):
        sink.put(point(step))
        time.sleep(0.005)
    sink.close("Done")
    assert sink.drained(FOREVER_SECONDS)
    assert sink.dropped == 20
    (event,) = told
    assert event["kind"] == "sinkFailed"
    assert "Test received no metrics (ConnectionError: 503 for https://***@metrics.example retry later)" in event["line"]
    assert "hunter2" not in str(event)


def test_a_client_library_that_exits_the_process_ends_only_its_try(told: list[dict[str, Any]]) -> None:
    def connect() -> Server:
        sys.exit("bad key")

    sink = make(connect, told)
    sink.put(point(1))
    sink.close("Done")
    assert sink.drained(FOREVER_SECONDS)
    assert (sink.dropped, told[0]["kind"]) == (1, "sinkFailed")


def test_nothing_is_imported_or_connected_before_the_first_point(told: list[dict[str, Any]]) -> None:
    called: list[bool] = []

    def connect() -> Server:
        called.append(True)
        return Server()

    sink = make(connect, told)
    sink.close("Done")
    assert sink.drained(0)
    assert called == []


def test_the_end_of_a_run_waits_for_a_hanging_server_only_so_long_and_says_what_is_missing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(reporter_module.DRAIN_SECONDS, "Done", 0.05)
    server.running.clear()
    reporter = Reporter(None, 0)
    reporter.open_logs(tmp_path, 0)
    reporter._sinks = [MetricsSink("MLflow", server.connect, reporter.event)]
    reporter.step(1, 2, 0.5, None, {"loss": 1.0})
    assert server.arrived.wait(FOREVER_SECONDS)
    reporter.step(2, 2, 1.0, None, {"loss": 1.0})
    reporter.close()
    assert "MLflow is missing some metrics (1 points dropped)" in capsys.readouterr().out
    assert "sinkIncomplete" in (tmp_path / "events.jsonl").read_text()


def test_measurements_are_named_by_their_group(server: Server, tmp_path: Path) -> None:
    reporter = Reporter(None, 0)
    reporter.open_logs(tmp_path, 0)
    reporter._sinks = [MetricsSink("Test", server.connect, reporter.event)]
    reporter.evaluation(0, 0.0)
    reporter.step(1, 2, 0.5, 9.0, {"loss": 1.5, "mfu": None, "gradientNorm": float("inf")})
    reporter.checkpoint(1, Path("/x"), 10, 0.5)
    reporter.experts(1, {"0": [1, 3], "1": [2, 2]})
    reporter.close()
    assert [(arrived.step, arrived.values) for arrived in server.points] == [
        (0, {"eval/loss": 0.0, "eval/perplexity": 1.0}),
        (1, {"train/loss": 1.5, "train/epoch": 0.5}),
        (1, {"checkpoint/bytes": 10.0, "checkpoint/seconds": 0.5}),
        (1, {"experts/highestLoad": 1.5}),
    ]


def test_a_resumed_run_keeps_its_id_and_a_new_one_in_an_old_folder_gets_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mlflow-run.json"
    assert ServiceRun(path, "uid-1", 0).recall() is None
    ServiceRun(path, "uid-1", 0).keep("abc")
    assert ServiceRun(path, "uid-1", 0).recall() == "abc"  # killed before its first commit
    assert ServiceRun(path, "uid-2", 8).recall() == "abc"  # a job made again under its old name goes on
    assert ServiceRun(path, "uid-2", 0).recall() is None
    assert ServiceRun(path, None, 0).recall() is None
    path.write_text("{ torn")
    assert ServiceRun(path, "uid-1", 8).recall() is None


@pytest.mark.parametrize(("tracker", "package"), [("TensorBoard", "tensorboard"), ("MLflow", "mlflow-skinny"), ("WandB", "wandb")])
def test_a_missing_package_is_told_by_name(monkeypatch: pytest.MonkeyPatch, tracker: str, package: str) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"the package {package} is not installed; install it in the image, or leave {tracker} out"):
        choose.refuse_unusable_trackers([Tracker(tracker)], {"WANDB_API_KEY": "x"})


def test_a_folder_that_a_tool_left_behind_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leftover_of_a_tool").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="not installed"):
        choose._need("X", "leftover_of_a_tool", "x")


@pytest.mark.parametrize("environ", [{}, {"MLFLOW_TRACKING_URI": "postgresql://anna:hunter2@db/mlflow"}])
def test_mlflow_without_an_address_or_with_a_databases_is_refused_without_its_password(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="begins with one of http:, https:, file:, databricks:") as refused:
        choose.refuse_unusable_trackers([Tracker.MLFLOW], environ)
    assert "hunter2" not in str(refused.value)


def test_wandb_without_a_key_is_refused_and_offline_needs_none(tmp_path: Path) -> None:
    nowhere = {"NETRC": str(tmp_path / "netrc")}
    with pytest.raises(ConfigError, match=r"set WANDB_API_KEY in spec\.env from a Secret"):
        choose.refuse_unusable_trackers([Tracker.WANDB], nowhere)
    choose.refuse_unusable_trackers([Tracker.WANDB], {**nowhere, "WANDB_MODE": "offline"})
    choose.refuse_unusable_trackers([Tracker.WANDB], {**nowhere, "WANDB_API_KEY": "key"})
    (tmp_path / "netrc").write_text("machine wandb.corp.example login user password key\n")
    choose.refuse_unusable_trackers([Tracker.WANDB], {**nowhere, "WANDB_BASE_URL": "https://wandb.corp.example"})


def test_secrets_are_blacked_out_by_the_names_of_their_variables() -> None:
    environ = {"HF_TOKEN": "hf_abcdef", "WANDB_API_KEY": "0123456789", "HOME": "/home/anna", "SHORT_TOKEN": "a"}
    assert redact("login hf_abcdef/0123456789 in /home/anna", environ) == "login ***/*** in /home/anna"
    assert redact("http://u:p@host/x and http://host/y", {}) == "http://***@host/x and http://host/y"


def test_settings_become_names_with_dots() -> None:
    assert dict(flat({"lora": {"rank": 8, "dora": None}, "seed": 1})) == {"lora.rank": 8, "seed": 1}
