"""Built-in sizes of models: their parameters are those that publishers state, and a config.json on this machine counts first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden.plan_cases import TRAINING, job, profile
from lockstep.api.errors import ConfigError
from lockstep.assets import asset
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.platforms.jobs.planfacts import known_facts
from lockstep_spec.families import shape_from_config

SHAPES = json.loads(asset("manifests/samples/models/shapes.json").read_text(encoding="utf-8"))
BILLIONS = {
    "meta-llama/Llama-2-7b-hf": 6.74, "meta-llama/Llama-2-13b-hf": 13.0, "meta-llama/Llama-2-70b-hf": 69.0, "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.6, "meta-llama/Llama-3.1-405B": 406, "meta-llama/Llama-3.2-1B": 1.24, "meta-llama/Llama-3.2-3B": 3.21,
    "Qwen/Qwen2.5-0.5B": 0.49, "Qwen/Qwen2.5-1.5B": 1.54, "Qwen/Qwen2.5-3B": 3.09, "Qwen/Qwen2.5-7B": 7.61, "Qwen/Qwen2.5-14B": 14.7,
    "Qwen/Qwen2.5-32B": 32.5, "Qwen/Qwen2.5-72B": 72.7, "Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen3-1.7B": 1.72, "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19, "Qwen/Qwen3-14B": 14.8, "Qwen/Qwen3-32B": 32.8, "Qwen/Qwen3-30B-A3B": 30.5, "Qwen/Qwen3-235B-A22B": 235,
    "mistralai/Mistral-7B-v0.1": 7.24, "mistralai/Mistral-7B-v0.3": 7.25, "mistralai/Ministral-8B-Instruct-2410": 8.02,
    "mistralai/Mistral-Nemo-Base-2407": 12.2, "mistralai/Mistral-Small-24B-Base-2501": 23.6, "mistralai/Mistral-Large-Instruct-2407": 123,
    "mistralai/Mixtral-8x7B-v0.1": 46.7, "mistralai/Mixtral-8x22B-v0.1": 141, "google/gemma-2-2b": 2.61, "google/gemma-2-9b": 9.24,
    "google/gemma-2-27b": 27.2, "google/gemma-3-270m": 0.27, "google/gemma-3-1b-pt": 1.0, "microsoft/Phi-3-mini-4k-instruct": 3.82,
    "microsoft/Phi-3-medium-4k-instruct": 14.0, "microsoft/phi-4": 14.7, "microsoft/Phi-4-mini-instruct": 3.84,
        "zai-org/GLM-4-9B-0414": 9.4,
    "zai-org/GLM-4-32B-0414": 32.6, "zai-org/GLM-4.5-Air": 106, "zai-org/GLM-4.5": 355, "HuggingFaceTB/SmolLM2-135M": 0.135,
    "HuggingFaceTB/SmolLM2-360M": 0.362, "HuggingFaceTB/SmolLM2-1.7B": 1.71, "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.1,
    "allenai/OLMo-2-1124-7B": 7.3, "allenai/OLMo-2-1124-13B": 13.7, "allenai/OLMo-2-0325-32B": 32.2,
}  # fmt: skip
"""Parameters as the models' publishers state them. GLM-4.5 is stated with a layer for prediction that is no part of training."""


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no way to the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def resolved(model: str, **more: object) -> Resolved:
    stated = job(training={**TRAINING, "model": {"name": model, **more}})
    return resolve(stated, profile(image="trainer:1"), PlatformDefaults(namespace="team"))


@pytest.mark.parametrize("model", SHAPES)
def test_the_parameters_are_as_many_as_the_publisher_states(model: str) -> None:
    assert shape_from_config(SHAPES[model]).numel / 1e9 == pytest.approx(BILLIONS[model], rel=0.01)


def test_every_model_has_a_published_number_and_no_name_stands_for_two() -> None:
    names = [name.lower() for model, config in SHAPES.items() for name in (model, *config.get("also", ()))]
    assert (set(BILLIONS), len(set(names))) == (set(SHAPES), len(names))
    for model, config in SHAPES.items():
        for name in (model, *config.get("also", ())):
            facts = known_facts(resolved(name))
            assert (facts.shape, facts.shape_source) == (shape_from_config(config), f"built-in sizes of {model}"), name


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("qwen/qwen3-8b-base", "Qwen/Qwen3-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("google/gemma-3-1b-it", "google/gemma-3-1b-pt"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen/Qwen3-30B-A3B"),
    ],
)
def test_a_tuned_form_has_its_bases_shape(name: str, of: str) -> None:
    assert known_facts(resolved(name)).shape_source == f"built-in sizes of {of}"


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "mine/Llama-3.1-8B", "Qwen/Qwen3-80B"])
def test_another_name_has_none(name: str) -> None:
    assert known_facts(resolved(name)).shape is None


def test_a_config_in_the_hubs_cache_counts_before_the_built_in_sizes(no_hub: Path) -> None:
    assert known_facts(resolved("Qwen/Qwen3-8B")).shape_source == "built-in sizes of Qwen/Qwen3-8B"
    folder = no_hub / "models--Qwen--Qwen3-8B"
    (folder / "snapshots" / "c0ffee").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c0ffee")
    config = folder / "snapshots" / "c0ffee" / "config.json"
    config.write_text(json.dumps(SHAPES["Qwen/Qwen3-4B"]))
    for facts in (known_facts(resolved("Qwen/Qwen3-8B")), known_facts(resolved("Qwen/Qwen3-8B", revision="c0ffee"))):
        assert (facts.shape_source, facts.shape) == (str(config), shape_from_config(SHAPES["Qwen/Qwen3-4B"]))


def test_a_folder_that_is_not_here_is_not_guessed_from_its_name_and_the_model_to_name_is_said() -> None:
    facts = known_facts(resolved("/workspace/models/Qwen3-8B"))
    assert facts.shape is None
    assert facts.shape_source.endswith(", or --model-config Qwen/Qwen3-8B takes the sizes of that model")
    named = known_facts(resolved("/workspace/models/Qwen3-8B"), Path("Qwen/Qwen3-8B"))
    assert named.shape_source == "built-in sizes of Qwen/Qwen3-8B"


def test_a_model_config_that_is_neither_a_file_nor_built_in_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--model-config Qwen/none: there is no such file; .* built in"):
        known_facts(resolved("Qwen/Qwen3-8B"), Path("Qwen/none"))
