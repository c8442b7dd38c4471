"""What the backward pass computes again follows from the memory that a rank has, and changes neither a loss nor a gradient, of no layer and
in no stage.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_harness import ForkServer, Outcomes, RunFile

from lockstep_spec.fit import COPY_SHARE, choose_recomputed, plan_memory
from lockstep_spec.memory import Place
from lockstep_spec.settings import Level, Recomputed, size_settings
from lockstep_train.base.runfile import read_run
from lockstep_train.memory.agree import read_shape
from train.engine.test_engine import records
from train.models.test_model_runs import make

MEMORY = {
    "none": Recomputed(Level.NONE),
    "norms in one layer": Recomputed(Level.NORMS, 1),
    "but attention in one layer": Recomputed(Level.ATTENTION, 1),
    "all in one layer": Recomputed(Level.ALL, 1),
    "all": Recomputed(Level.ALL),
}
"""Choice that the stated memory leads to. The last of two layers needs everything at once, so that nothing is gained by computing it again
but where the loss needs most.
"""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Stage2", {"lora": {"dropout": "0.1"}, "optimization": {"batches": "Rows"}}),
    "dense, all weights": ("Stage2", {"method": "Full", "optimization": {"learningRate": "1e-3"}}),
    "dense, sharded": ("Stage3", {"lora": {"dropout": "0.1"}}),
    "biased, sharded": ("Stage3", {"precision": "BF16"}),
    "experts": ("Stage2", {"lora": {"targetModules": ["q_proj", "o_proj"], "dropout": "0.1"}}),
    "experts, sharded": (
        "Stage3",
        {"lora": {"targetModules": ["q_proj", "o_proj"], "dropout": "0.1"}, "optimization": {"batches": "Rows"}},
    ),
    "adapters of experts, sharded": (
        "Stage3",
        {"lora": {"targetModules": ["q_proj"], "targetParameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}},
    ),
}
STEPS, MICRO_BATCHES, LAYERS = 2, 2, 2
USUAL = {"maxSteps": STEPS, "globalBatchSize": 2 * 2 * MICRO_BATCHES, "warmupSteps": "0", "maxGradientNorm": "1000"}
LONG = {"maxLength": 1024}
"""Longer than any sample, so that activations are most of the plan."""
PAIRS = [(model, memory) for model in MODELS for memory in MEMORY]
FEW = {
    ("dense", "norms in one layer"),
    ("dense, sharded", "but attention in one layer"),
    ("experts, sharded", "norms in one layer"),
    ("experts, sharded", "all in one layer"),
}
"""Pairs of `make test`; its other levels are in the same groups of ranks in `make test-long`."""


@dataclass(frozen=True)
class Trained:
    folder: Path
    ends: Outcomes

    def log(self, name: str) -> list[tuple[float, float]]:
        """Each step's loss and gradient norm."""
        assert self.ends[name]["error"] is None
        return [(record["loss"], record["gradientNorm"]) for record in records(self.folder / name, "train_log")]


def memory_for(run: Path, wanted: Recomputed) -> int:
    """Bytes with which Auto makes the wanted choice: a little more than it needs, and for All a little less than what comes before."""
    training = read_run(run).training
    shape, settings, place = read_shape(Path(training.model.name), torch.device("cpu")), size_settings(training), Place(2, 2, gpu=False)
    fitting = wanted if wanted.layers or wanted.level is Level.NONE else MEMORY["all in one layer"]
    total = plan_memory(shape, replace(settings, chosen=fitting), place, 1).total_bytes
    size = int(total / COPY_SHARE) + (2 if fitting == wanted else -2)
    chosen, _ = choose_recomputed(shape, settings, place, [(settings.micro_batch_size, size)])
    assert chosen.recomputed == wanted
    return size


def by_rows(kind: str) -> bool:
    """Joined, a step's samples are one micro-batch."""
    return "batches" in MODELS[kind][1].get("optimization", {})


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, bool], Trained]:
    """Filled by the first test that needs it: by the model, and whether all of its memories are tried."""
    return {}


@pytest.fixture
def runs(
    request: pytest.FixtureRequest,
    kind: str,
    ranks: ForkServer,
    run_file: RunFile,
    tmp_path_factory: pytest.TempPathFactory,
    trained: dict[tuple[str, bool], Trained],
) -> Trained:
    every = request.node.get_closest_marker("long") is not None
    if (kind, every) not in trained:
        folder = tmp_path_factory.mktemp("runs")
        stage, change = MODELS[kind]
        family = {"experts": "qwen3_moe", "adapters of experts": "qwen3_moe", "biased": "qwen2"}.get(kind.removesuffix(", sharded"))
        base = {} if family is None else {"model": {"name": str(make(ranks, folder / family, family))}}
        variants: dict[str, Any] = {}
        for memory in [None, *(memory for of, memory in PAIRS if of == kind and (every or (of, memory) in FEW))]:
            name = f"{kind}, {memory or 'asked for none'}"
            optimization = {**USUAL, **change.get("optimization", {}), **({} if memory else {"recompute": "None"})}
            fixed = {"zeroStage": stage, "evaluation": None, "checkpoint": {"everySteps": 50}, "data": LONG}
            run = run_file(name, folder=str(folder / name), **{**base, **change, **fixed, "optimization": optimization})
            variants[name] = {"run": str(run)} | ({"memory": memory_for(run, MEMORY[memory])} if memory else {})
        trained[kind, every] = Trained(folder, ranks.run_each("train_each", 2, variants, folder / "ended.json"))
    return trained[kind, every]


@pytest.mark.parametrize(("kind", "memory"), [pytest.param(*pair, marks=[] if pair in FEW else [pytest.mark.long]) for pair in PAIRS])
def test_each_choice_is_made_by_the_memory_and_gives_the_same_losses_gradients_and_weights(runs: Trained, kind: str, memory: str) -> None:
    kept, name, chosen = f"{kind}, asked for none", f"{kind}, {memory}", MEMORY[memory]
    assert len(runs.log(kept)) == STEPS and runs.ends[kept]["moved"]
    assert runs.log(name) == runs.log(kept)
    assert runs.ends[name]["masters"] == runs.ends[kept]["masters"]
    assert runs.ends[name]["recomputed"] == [chosen.level.name, chosen.layers]
    [plan] = [event for event in records(runs.folder / name, "events") if event["kind"] == "memoryPlan"]
    assert any(f"recomputing {chosen.words(LAYERS)}" in item for item in plan["items"]), json.dumps(plan)


@pytest.mark.parametrize(("kind", "memory"), [pytest.param(*pair, marks=[] if pair in FEW else [pytest.mark.long]) for pair in PAIRS])
def test_a_layer_and_its_attention_compute_a_second_time_only_where_they_are_not_kept(runs: Trained, kind: str, memory: str) -> None:
    kept, end, chosen = runs.ends[f"{kind}, asked for none"], runs.ends[f"{kind}, {memory}"], MEMORY[memory]
    assert kept["layer"] == STEPS * (MICRO_BATCHES if by_rows(kind) else 1)
    assert kept["attention"] >= kept["layer"] * LAYERS
    assert end["layer"] == kept["layer"] * (1 if chosen.of(0) is Level.NONE else 2)
    assert end["attention"] == kept["attention"] * (1 + chosen.share(Level.ALL, LAYERS))


@pytest.mark.parametrize(("kind", "memory"), [pytest.param(*pair, marks=[] if pair in FEW else [pytest.mark.long]) for pair in PAIRS])
def test_no_frozen_weight_stays_gathered_after_a_backward_pass(runs: Trained, kind: str, memory: str) -> None:
    """DeepSpeed 0.19.3 begins to gather frozen weights for what is computed again by other rules (its change 8148)."""
    gathered = runs.ends[f"{kind}, {memory}"]["gathered"]
    assert gathered == [0] * STEPS * (MICRO_BATCHES if by_rows(kind) else 1)
