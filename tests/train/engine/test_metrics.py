"""What a run leaves behind for people and tools, after kills, resumes and with servers that don't answer."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from cases_models import configuration
from rank_harness import ForkServer, RunFile

from lockstep_train.report.flops import Attention, attention_layers


def records(folder: Path, log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / f"{log}.jsonl").read_text().splitlines()]


def tensorboard_steps(folder: Path, tag: str) -> list[int]:
    """The steps TensorBoard would show."""
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(str(folder))
    accumulator.Reload()
    return [event.step for event in accumulator.Scalars(tag)]


def mlflow_runs(folder: Path) -> list[Path]:
    return [path.parent for path in folder.glob("*/*/meta.yaml")]


def test_a_killed_and_resumed_run_is_one_run_without_a_step_twice_everywhere(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    """Committed at step 2, killed after step 3: step 3 is measured by both attempts."""
    file = run_file("run", reportTo=["TensorBoard", "MLflow", "WandB"], uid="uid-1", optimization={"microBatchSize": 7})
    offline = {
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlflow",
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": "not-to-be-written",
        "WANDB_PROJECT": "lockstep-test",
    }
    folder = tmp_path / "run"
    first = ranks.run("die_after", [file] * 2, arguments={"step": 3}, codes=None, kill_rest_after_first=True, **offline)
    assert first.codes[0] == -9, first.output
    assert [record["step"] for record in records(folder, "train_log")] == [1, 2, 3]
    with (folder / "logs/train_log.jsonl").open("a") as file_:
        file_.write('{"schema": 1, "step": 4, "lo')
    wandb_id = json.loads((folder / "logs/wandb-run.json").read_text())["id"]

    second = ranks.run("main", [file] * 2, **offline)
    train = records(folder, "train_log")
    assert [(record["step"], record["attempt"]) for record in train] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2)]
    assert [record["step"] for record in records(folder, "eval_log")] == [0, 4, 6]
    assert [record["slowestRank"] is None for record in train] == [True, False, True, False, False, False]  # first steps of attempts
    parts = ("dataSeconds", "forwardSeconds", "backwardSeconds", "waitSeconds", "saveWaitSeconds", "optimizerSeconds")
    assert all(0 < sum(record[part] for part in parts) <= record["stepSeconds"] for record in train)
    assert all(record["tokens"] > 0 and record["mfu"] is None and 1e8 < record["peakMemoryBytes"] < 1e11 for record in train)
    speed, _ = [event for event in records(folder, "events") if event["kind"] == "speed"]
    assert speed["noMfuBecause"] == "FP32 uses no tensor cores, so there is no MFU"
    commits = [(event["step"], "undone" in event) for event in records(folder, "events") if event["kind"] == "checkpoint"]
    assert commits == [(2, False), (4, False), (6, False)]

    assert tensorboard_steps(folder / "logs/tensorboard", "train/loss") == [1, 2, 3, 4, 5, 6]
    (mlflow_run,) = mlflow_runs(tmp_path / "mlflow")
    history = (mlflow_run / "metrics/train/loss").read_text().splitlines()
    assert [int(line.split()[2]) for line in history] == [1, 2, 3, 4, 5, 6]
    assert "status: 3" in (mlflow_run / "meta.yaml").read_text()  # finished
    offline_runs = sorted(path.name for path in (folder / "logs/wandb").glob("offline-run-*"))
    assert len(offline_runs) == 2
    assert {name.rpartition("-")[2] for name in offline_runs} == {wandb_id}
    assert "sinkFailed" not in (folder / "logs/events.jsonl").read_text()
    assert "not-to-be-written" not in second.output


@pytest.mark.parametrize("answer", ["hang", "fail"])
def test_a_server_that_does_not_answer_changes_nothing_of_the_run(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, answer: str
) -> None:
    file = run_file("run", optimization={"maxSteps": 2, "microBatchSize": 7})
    ended = ranks.run("train_against_server", [None] * 2, arguments={"answer": answer, "document": str(file)})
    assert [record["step"] for record in records(tmp_path / "run", "train_log")] == [1, 2]
    assert "MLflow is missing some metrics" in ended.outputs[0]
    assert "hunter2" not in ended.output + (tmp_path / "run/logs/events.jsonl").read_text()


def test_a_destination_without_its_package_is_refused_before_anything_is_loaded(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path
) -> None:
    file = run_file("run", reportTo=["MLflow"], model={"name": "/nowhere"})
    ended = ranks.run("main", [file], MLFLOW_TRACKING_URI="sqlite:///mlflow.db", codes=78)
    assert "MLFLOW_TRACKING_URI is 'sqlite:///mlflow.db'" in ended.output
    assert "/nowhere" not in ended.output
    assert not (tmp_path / "run").exists()


def test_operations_are_counted_as_torch_counts_them(ranks: ForkServer, tmp_path: Path) -> None:
    """Dense, tied and three mixtures of experts. torch's counter differs in two known ways: it counts the masked half of attention,
    and it sees that nothing below the first layer's adapters is trained, so that their inputs need no gradient."""
    output = tmp_path / "operations.json"
    ranks.run("count_operations", [None], arguments={"output": str(output)})
    found = json.loads(output.read_text())
    assert sorted(found) == ["gemma3", "glm4-moe", "llama", "llama-tied", "mixtral", "qwen3-moe"]
    tokens, hidden, heads, key_heads, head_size, rank = 24, 32, 4, 2, 16, 4
    first_inputs = 2 * tokens * hidden * ((heads + 2 * key_heads) * head_size + 3 * rank)
    for name, operations in found.items():
        masked = 6 * operations["width"] * tokens**2
        assert operations["done"] == operations["needed"] + masked - first_inputs, name


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {Attention(2 * 32)}),
        ("mistral", {Attention(2 * 64, 8)}),
        ("gemma3_text", {Attention(5 * 64, 8), Attention(64)}),
        ("llama4_text", {Attention(3 * 64, 8, chunked=True), Attention(64)}),
        ("qwen3_next", {Attention(64)}),
        ("granitemoehybrid", {Attention(64)}),
        ("nemotron_h", {Attention(64)}),
    ],
)
def test_each_layer_counts_its_own_attention(family: str, expected: set[Attention]) -> None:
    assert set(attention_layers(configuration(family).get_text_config())) == expected
