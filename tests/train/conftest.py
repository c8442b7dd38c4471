"""Fixtures of the trainer's tests: a server of real ranks, a tiny model, a small data set, and run files."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "ranks"))

from rank_harness import ForkServer, RunFile
from references import Reference, References

from support.side_by_side import Parts, file_of, longest_first

LONGEST = (
    "test_corpus_processes", "test_data", "test_models", "test_families", "test_quickstart_local", "test_shares", "test_resume",
        "test_run_local", "test_own_scripts", "test_freeze",
    "test_preflight", "test_save", "test_engine", "test_memory_plan", "test_fetch", "test_volumes", "test_training", "test_stop",
        "test_checkpoint", "test_model_runs",
    "test_instruction_sets", "test_hugging_face_script", "test_data_by_name", "test_optimizer", "test_ends", "test_demo",
)  # fmt: skip
WORDS = [
    "the", "rank", "of", "a", "shard", "is", "never", "less", "than", "one", "and", "every", "gang", "runs", "in", "lockstep",
    "over", "many", "small", "steps", "of", "the", "data",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items, LONGEST)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Parts:
    return Parts(config, log, file_of)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A server of this worker's ranks; the workers of a run share the process that has everything imported."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    server = ForkServer(tmp_path_factory.mktemp("ranks"), shared / "ranks.sock")
    yield server
    server.close()


@pytest.fixture(scope="session")
def references() -> Iterator[References]:
    store = References()
    yield store
    store.close()


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest, references: References) -> Path:
    def make(folder: Path) -> None:
        ended = request.getfixturevalue("ranks").run("make_model", [None], arguments={"folder": str(folder)})
        assert ended.codes == [0], ended.output

    return references.get("model", {}, make)


@pytest.fixture(scope="session")
def data(references: References) -> Path:
    """45 samples of very uneven lengths, a third of them with a prompt."""

    def make(folder: Path) -> None:
        draw = random.Random(1)  # noqa: S311 (sample text)
        with (folder / "data.jsonl").open("w") as file:
            for index in range(45):
                text = " ".join(draw.choices(WORDS, k=draw.randint(2, 14)))
                record = {"prompt": text[:30], "completion": " yes" * draw.randint(1, 6)} if index % 3 == 0 else {"text": text}
                file.write(json.dumps(record) + "\n")

    return references.get("data", {}, make) / "data.jsonl"


NOTHING_RESIDENT = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0}
"""Else Stage3 would never let go of weights as small as these: no test would see one gathered. rank_cases.py checks that each run lets go.
"""


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` with `change` laid over it, section by section."""
    return base | {
        key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in change.items()
    }


@pytest.fixture
def reference(ranks: ForkServer, references: References, run_file: RunFile, usual: dict[str, Any]) -> Reference:
    """Return the folder of a run that is only compared with or started from: `reference(2, zeroStage="Stage3")` of two ranks. Copy it to
    change it.
    """

    def of(size: int, *, nodes: int = 1, target: str = "main", **training: Any) -> Path:
        def make(folder: Path) -> None:
            ended = ranks.run(target, [run_file("reference", folder=str(folder), **training)] * size, nodes=nodes)
            (folder / "output.txt").write_text(ended.outputs[0])

        return references.get("run", [size, nodes, target, usual, training], make)

    return of


@pytest.fixture
def usual() -> dict[str, Any]:
    """Settings of all runs of a folder of tests, laid over those of all tests; a folder's conftest says which."""
    return {}


@pytest.fixture
def run_file(model: Path, data: Path, tmp_path: Path, usual: dict[str, Any]) -> RunFile:
    """Make a run.json: `run_file("name", zeroStage="Stage3", optimization={"maxSteps": 4})`; the run's folder is tmp_path/name."""

    def make(
        name: str = "run",
        folder: str | None = None,
        uid: str | None = None,
        storage: str | None = None,
        micro_batches: Sequence[int] = (),
        timeouts: Mapping[str, int] = {},
        **training: Any,
    ) -> Path:
        settings = {
            "model": {"name": str(model)},
            "lora": {"rank": 5, "alpha": 10, "dropout": "0", "targetModules": ["q_proj", "v_proj", "down_proj"]},
            "zeroStage": "Stage2",
            "precision": "FP32",
            "seed": 42,
            "data": {"path": str(data), "maxLength": 64},
            "optimization": {
                "epochs": 2,
                "maxSteps": 6,
                "learningRate": "5e-3",
                "microBatchSize": 2,
                "globalBatchSize": 14,
                "warmupSteps": "3",
                "schedule": "Cosine",
                "maxGradientNorm": "0.5",
                "weightDecay": "0.01",
            },
            "evaluation": {"everySteps": 4, "holdout": "0.15", "samples": 7},
            "checkpoint": {"everySteps": 2, "keep": 5, "resumeFrom": "Auto"},
        }
        document = {
            "format": "lockstep-run/1",
            "job": {"name": name, "namespace": "test", "uid": uid},
            "runDir": str(tmp_path / (folder or name)),
            "storage": storage,
            "nodeMicroBatches": list(micro_batches),
            "timeouts": dict(timeouts),
        }
        path = tmp_path / f"{name}.json"
        whole = merged(merged(settings, usual), training)
        if whole["zeroStage"] == "Stage3":
            whole["deepspeed"] = merged({"zero_optimization": NOTHING_RESIDENT}, whole.get("deepspeed") or {})
        path.write_text(json.dumps({**document, "training": whole}))
        return path

    return make
