"""run.json is read strictly: what is wrong is named, and nothing is ignored."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep_spec.choices import Precision, Schedule, StorageMode, ZeroStage
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.runfile import parse_run, parse_training, rank_environment, read_run

TRAINING: dict[str, Any] = {
    "model": {"name": "/workspace/models/tiny"},
    "lora": {"rank": 16, "alpha": 32, "dropout": "0", "targetModules": ["q_proj", "v_proj"]},
    "zeroStage": "Stage3",
    "precision": "BF16",
    "seed": 42,
    "data": {"path": "/datasets/x.jsonl", "maxLength": 512},
    "optimization": {
        "epochs": 1,
        "maxSteps": None,
        "learningRate": "2e-4",
        "microBatchSize": 4,
        "globalBatchSize": None,
        "warmupSteps": "0",
        "schedule": "Linear",
        "maxGradientNorm": "1.0",
        "weightDecay": "0",
    },
    "evaluation": {"everySteps": 50, "holdout": "0.05", "samples": 200},
    "checkpoint": {"everySteps": 50, "keep": 3, "resumeFrom": "Auto"},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(TRAINING)
    *sections, key = path.split(".")
    section = document
    for name in sections:
        section = section[name]
    section[key] = value
    return document


def test_a_whole_section_is_read() -> None:
    training = parse_training(TRAINING)
    assert training.zero_stage is ZeroStage.STAGE3
    assert training.zero_stage.number == 3
    assert training.precision is Precision.BF16
    assert training.optimization.schedule is Schedule.LINEAR
    assert training.optimization.learning_rate == 2e-4
    assert training.lora.target_modules == ("q_proj", "v_proj")
    assert training.evaluation.holdout == 0.05


def test_evaluation_may_be_null() -> None:
    assert parse_training(changed("evaluation", None)).evaluation is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("lora.rnak", 16, "training.lora.rnak is not a setting; valid here: rank, alpha, dropout, targetModules"),
        ("extra", {}, "training.extra is not a setting"),
        ("lora.rank", "16", 'training.lora.rank is "16", but must be a whole number ≥ 1'),
        ("lora.rank", True, "training.lora.rank is true, but must be a whole number ≥ 1"),
        ("lora.rank", 0, "training.lora.rank is 0, but must be"),
        ("lora.dropout", "1", "training.lora.dropout is"),
        ("lora.targetModules", [], "training.lora.targetModules is [], but must be a non-empty list of strings"),
        ("lora.targetModules", ["q", 3], "training.lora.targetModules[1] is 3"),
        ("optimization.learningRate", 0.1, "training.optimization.learningRate is 0.1, but must be a decimal number"),
        ("optimization.learningRate", "nan", "training.optimization.learningRate is"),
        ("optimization.learningRate", "-1", "training.optimization.learningRate is"),
        ("optimization.beta2", "1", 'training.optimization.beta2 is "1", but must be a number ≥ 0 and < 1'),
        ("optimization.warmupSteps", "-1", "training.optimization.warmupSteps is"),
        ("optimization.epsilon", "0", 'training.optimization.epsilon is "0", but must be a decimal number > 0'),
        ("evaluation.holdout", "1.5", "training.evaluation.holdout is"),
        ("precision", "FP8", 'training.precision is "FP8", but must be one of BF16, FP16, FP32'),
        ("data", [], "training.data is [], but must be an object"),
        ("data.maxLength", 1, "training.data.maxLength is 1, but must be a whole number ≥ 2"),
        ("data.onBroken", "Skip", 'training.data.onBroken is "Skip", but must be one of Fail, Drop'),
        ("data.chatTemplate", "", "training.data.chatTemplate is"),
        ("data.chatTemplateKwargs", [], "training.data.chatTemplateKwargs is [], but must be an object"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_valid(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_training(changed(path, value))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_setting_is_named() -> None:
    document = copy.deepcopy(TRAINING)
    del document["lora"]["alpha"]
    with pytest.raises(ConfigError, match=r"training\.lora\.alpha is missing"):
        parse_training(document)


def test_the_rest_of_the_run_file_is_the_agents() -> None:
    run = parse_run(
        {"format": "lockstep-run/1", "nodes": 2, "job": {"name": "x", "uid": ""}, "runDir": "/w/runs/x", "training": TRAINING}, "run.json"
    )
    assert (run.job_name, run.job_uid, run.run_dir) == ("x", None, Path("/w/runs/x"))


@pytest.mark.parametrize(("stated", "storage"), [("Shared", StorageMode.SHARED), ("PerPod", StorageMode.PER_POD), (None, None)])
def test_the_run_file_says_what_the_nodes_see_at_its_folder(stated: str | None, storage: StorageMode | None) -> None:
    document = {"job": {"name": "x"}, "runDir": "/r", "training": TRAINING, "storage": stated}
    assert parse_run(document, "run.json").storage is storage
    newer = parse_run({**document, "storage": "Local"}, "run.json").storage
    assert newer is not None and not newer.is_known, "of another version: the ranks find out who shares the folder"


def test_the_run_file_may_state_the_micro_batch_of_each_node() -> None:
    document = {"job": {"name": "x"}, "runDir": "/r", "training": TRAINING}
    assert parse_run(document, "run.json").node_micro_batches == ()
    assert parse_run({**document, "nodeMicroBatches": [6, 0, 2]}, "run.json").node_micro_batches == (6, 0, 2)
    with pytest.raises(ConfigError, match=r"run\.json\.nodeMicroBatches\[1\] is -1, but must be a whole number ≥ 0"):
        parse_run({**document, "nodeMicroBatches": [6, -1]}, "run.json")


def test_a_script_job_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no `training` section"):
        parse_run({"training": None}, "run.json")


@pytest.mark.parametrize("content", [None, "not json", "[]"])
def test_an_unreadable_run_file_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "run.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=str(path)):
        read_run(path)


def test_a_run_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"job": {"name": "x"}, "runDir": "/r", "training": TRAINING}))
    assert read_run(path).training == parse_training(TRAINING)


def test_a_lone_process_is_rank_0_of_1_with_no_attempt_number() -> None:
    environment = rank_environment({})
    assert (environment.rank, environment.world_size, environment.attempt, environment.report_socket) == (0, 1, None, None)


def test_torchruns_and_the_agents_variables_are_read() -> None:
    variables = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    environment = rank_environment(
        {**variables, "MASTER_ADDR": "x-0", "MASTER_PORT": "29500", "LOCKSTEP_ATTEMPT": "7", "LOCKSTEP_REPORT_SOCKET": "/s"}
    )
    assert (environment.rank, environment.local_rank, environment.node, environment.nodes) == (3, 1, 1, 2)
    assert (environment.master_address, environment.master_port, environment.attempt, environment.report_socket) == ("x-0", 29500, 7, "/s")


def test_a_node_keeps_its_number_when_its_ranks_are_ordered_otherwise() -> None:
    """Volumes of their own belong to nodes, not to ranks."""
    environment = rank_environment({"RANK": "2", "GROUP_RANK": "1", "LOCKSTEP_NODE": "2", "GROUP_WORLD_SIZE": "3", "WORLD_SIZE": "6"})
    assert (environment.rank, environment.node, environment.nodes) == (2, 2, 3)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="RANK is 'one'"):
        rank_environment({"RANK": "one"})
