"""What is trained is what was named, and as many elements as the plan, the log and a commit's manifest state, whatever the family."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_models import OTHERS, SEEING, configuration, make_family, settings
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING
from rank_harness import Ended, ForkServer, RunFile
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

from lockstep.api.errors import ConfigError as WrongFile
from lockstep.api.files.jobfile import parse_job_file
from lockstep.cli.main import app
from lockstep.plan.render.run import trainer_config
from lockstep_spec.families import FAMILIES, MOVED, MOVED_NAMES
from lockstep_spec.memory import trained_elements, trained_parts
from lockstep_spec.settings import size_settings
from lockstep_spec.training import LoraConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.checkpoint.format.manifest import decode, shapes
from lockstep_train.memory.agree import read_shape
from lockstep_train.model.load import empty_model
from lockstep_train.model.trained import adapter_parts, add_lora, difference, make_trainable, model_weights, refuse_moved
from support.checkout import ROOT
from train.models.test_model_runs import make

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which peft asks for
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SEVEN = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
ATTENTIONS = {"deepseek_v3": LATENT, "glm4_moe_lite": LATENT, "lfm2_moe": [*ATTENTION[:3], "out_proj"], "phi3": ["qkv_proj", "o_proj"]}
"""Names of attention's layers, where they are others than most families'."""
EVERY = sorted({*FAMILIES, *OTHERS, *SEEING})
FEW = ["glm4_moe", "mistral3", "qwen3"]
SAMPLES = ROOT / "manifests/samples"
SHAPES = json.loads((SAMPLES / "models/shapes.json").read_text())


def of_all(name: str) -> Any:
    return pytest.param(name, marks=[] if name in FEW else [pytest.mark.long])


def trained(ranks: ForkServer, run_file: RunFile, tmp_path: Path, family: str, targets: list[str], **lora: Any) -> tuple[Path, Ended]:
    """The model's folder, and how a run of one step ended, in tmp_path/run."""
    folder = make(ranks, tmp_path / family, family)
    run = run_file(
        model={"name": str(folder)},
        lora={"targetModules": targets, **lora},
        optimization={"maxSteps": 1, "globalBatchSize": 2},
        evaluation=None,
        checkpoint={"everySteps": 1},
    )
    return folder, ranks.run("main", [run], codes=None)


def numbers_of(tmp_path: Path, folder: Path, ended: Ended, targets: list[str]) -> dict[str, int]:
    """Trained elements, by who states them."""
    logged = re.search(r"^([\d,]+) trained elements$", ended.output, re.MULTILINE)
    assert logged is not None, ended.output
    manifest = decode((tmp_path / "run/checkpoints/step-1.a1/manifest.json").read_text())
    settings = size_settings(trainer_config(parse_job_file(job_text(folder, targets), "job.yaml").spec.training))  # type: ignore[arg-type]
    return {
        "trainer's plan": trained_elements(read_shape(folder), settings),
        "log": int(logged[1].replace(",", "")),
        "manifest": manifest.adapter["elements"],
        "shards": sum(map(math.prod, shapes(manifest.shards).values())),
    }


def job_text(folder: Path, targets: list[str]) -> str:
    return f"""\
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {{name: family}}
spec:
  cluster: local
  training:
    model: {{name: {folder}}}
    lora: {{rank: 5, alpha: 10, targetModules: [{", ".join(targets)}]}}
    zeroStage: Stage2
    data: {{path: /datasets/demo.jsonl, maxLength: 64}}
    optimization: {{maxSteps: 1, learningRate: 1e-4, microBatchSize: 2}}
    checkpoint: {{everySteps: 1}}
"""


def typed(tmp_path: Path, folder: Path, targets: list[str], *command: str) -> Any:
    (tmp_path / "job.yaml").write_text(job_text(folder, targets))
    return CliRunner().invoke(app, [*command, "-f", str(tmp_path / "job.yaml")])


@pytest.mark.parametrize("family", list(map(of_all, EVERY)))
def test_adapters_on_attention_have_the_elements_that_everything_states(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, family: str
) -> None:
    targets = ATTENTIONS.get(family, ATTENTION)
    folder, ended = trained(ranks, run_file, tmp_path, family, targets)
    assert ended.codes == [0], ended.output
    numbers = numbers_of(tmp_path, folder, ended, targets)
    if family in FAMILIES:
        planned = typed(tmp_path, folder, targets, "plan", "--offline", "-o", "json")
        numbers["plan"] = json.loads(planned.stdout)["figures"]["trainedParameters"]
    assert len(set(numbers.values())) == 1, numbers


@pytest.mark.parametrize("family", list(map(of_all, EVERY)))
def test_adapters_on_all_seven_layers_have_the_elements_that_everything_states_or_are_refused(
    ranks: ForkServer, run_file: RunFile, tmp_path: Path, family: str
) -> None:
    folder, ended = trained(ranks, run_file, tmp_path, family, SEVEN)
    planned = typed(tmp_path, folder, SEVEN, "plan", "--offline", "-o", "json")
    if family in MOVED:
        assert ended.codes == [78], ended.output
        words = f"with a model of type {family}, peft puts the adapter of gate_proj, up_proj, down_proj on all routed experts"
        assert words in ended.output
        assert (planned.exit_code, words in planned.stdout) == (1, True), planned.output
        validated = typed(tmp_path, folder, SEVEN, "validate")
        assert isinstance(validated.exception, WrongFile) and words in str(validated.exception), validated.output
    elif ended.codes == [78]:
        missing = re.search(r"targetModules: no module named ([\w, ]+) in this model", ended.output)
        assert missing is not None, ended.output
        names = [weight.module for weight in model_weights(empty_model(folder)) if weight.linear]
        assert not [name for name in names if name.endswith(tuple(f".{target}" for target in missing[1].split(", ")))]
    else:
        assert ended.codes == [0], ended.output
        numbers = numbers_of(tmp_path, folder, ended, SEVEN)
        if family in FAMILIES:
            numbers["plan"] = json.loads(planned.stdout)["figures"]["trainedParameters"]
        assert len(set(numbers.values())) == 1, numbers


def test_the_families_whose_layers_peft_moves_are_those_of_its_own_table() -> None:
    moved = {
        family
        for family, pattern in _MODEL_TO_CONVERSION_PATTERN.items()
        if "gate_proj" in _MOE_TARGET_MODULE_MAPPING.get(pattern, {}) and get_checkpoint_conversion_mapping(family) is not None
    }
    assert {family for family in moved if family in CONFIG_MAPPING} == MOVED
    assert set(_MOE_TARGET_MODULE_MAPPING["qwen2_moe"]) == set(MOVED_NAMES)


def test_what_peft_itself_refuses_is_a_setting_to_change(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    _, ended = trained(ranks, run_file, tmp_path, "nemotron_h", ["q_proj", "out_proj"])
    assert ended.codes == [78], ended.output
    assert "training.lora: peft can't give this model such an adapter: " in ended.output


def test_layers_that_peft_moves_without_our_knowing_are_refused_by_name_and_a_run_with_commits_goes_on(tmp_path: Path) -> None:
    """As with a later peft, whose table has another family: only the start looks at ours, before it loads anything."""
    make_family(tmp_path, "glm4_moe")
    training = settings(tmp_path, "Stage2", {"lora": {"targetModules": ["q_proj", "down_proj"]}})
    words = (
        "peft trains model.layers.*.mlp.experts.down_proj (1,008 elements) and should train by these names, but doesn't,"
        " model.layers.*.mlp.down_proj (240 elements), model.layers.*.mlp.shared_experts.down_proj (168 elements)"
    )
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_trainable(empty_model(tmp_path), training, fresh=True)
    said: list[str] = []
    wrapped = make_trainable(empty_model(tmp_path), training, fresh=False, say=said.append)
    assert len(said) == 1 and said[0].startswith("WARNING: ") and words in said[0]
    assert any("experts.lora_A" in name for name, parameter in wrapped.named_parameters() if parameter.requires_grad)


def test_a_run_whose_checkpoints_were_trained_so_goes_on_with_a_warning(ranks: ForkServer, run_file: RunFile, tmp_path: Path) -> None:
    settled: dict[str, Any] = {
        "model": {"name": str(make(ranks, tmp_path / "glm4_moe", "glm4_moe"))},
        "lora": {"targetModules": ["q_proj", "down_proj"]},
        "evaluation": None,
        "checkpoint": {"everySteps": 1},
    }
    ranks.run("train_unaware", [run_file(optimization={"maxSteps": 1}, **settled)])
    after = ranks.run("main", [run_file(optimization={"maxSteps": 2}, **settled)])
    assert "WARNING: training.lora: with this model, peft trains model.layers.*.mlp.experts.down_proj (1,680 elements)" in after.output
    ranks.run("main", [run_file("anew", optimization={"maxSteps": 2}, **settled)], codes=78)


def test_a_difference_names_layers_and_elements_of_both_sides() -> None:
    named = {"model.layers.0.q_proj": 10, "model.layers.0.down_proj": 2000, "model.layers.1.down_proj": 2000}
    made = {"model.layers.0.q_proj": 10, "model.layers.0.experts.down_proj": 70000}
    assert difference(named, named) == ""
    assert (
        difference(named, made)
        == "training.lora: with this model, peft trains model.layers.*.experts.down_proj (70,000 elements) and should train by these names,"
        " but doesn't, model.layers.*.down_proj (4,000 elements)"
    )


def differs(model: Any, lora: LoraConfig) -> str:
    """Difference between what is named and what peft trains of a model without memory."""
    planned = trained_parts(list(model_weights(model)), lora)
    with torch.device("meta"):
        return difference(planned, adapter_parts(add_lora(model.requires_grad_(False), lora, seed=1)))


@pytest.mark.parametrize(
    "path", [path for path in sorted(SAMPLES.glob("*.yaml")) if "targetModules" in path.read_text()], ids=lambda path: path.stem
)
def test_a_sample_names_layers_that_its_model_has_and_peft_trains(tmp_path: Path, path: Path) -> None:
    training = parse_job_file(path.read_text(), path.name).spec.training
    title = Path(training.model.name).name
    built_in = next((shape for name, shape in SHAPES.items() if name.endswith(f"/{title}")), None)
    if built_in is None:
        assert title == "tiny-base"
        configuration("tied").save_pretrained(tmp_path)
    else:
        (tmp_path / "config.json").write_text(json.dumps(built_in))
    assert differs(empty_model(tmp_path), trainer_config(training).lora) == ""


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "zai-org/GLM-4.5-Air", "Qwen/Qwen3-8B"])
def test_the_default_layers_are_there_in_usual_models(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    training = parse_job_file(
        job_text(tmp_path, ATTENTION).replace(f", targetModules: [{', '.join(ATTENTION)}]", ""), "job.yaml"
    ).spec.training
    assert training is not None
    assert differs(empty_model(tmp_path), trainer_config(training).lora) == ""


@pytest.mark.parametrize("family", SEEING)
def test_no_part_that_text_never_passes_is_trained(tmp_path: Path, family: str) -> None:
    make_family(tmp_path, family)
    model = empty_model(tmp_path)
    seeing = {weight.module for weight in model_weights(model) if weight.tower}
    assert seeing and not any("language_model" in name or name == "lm_head" for name in seeing)
    lora = LoraConfig(rank=2, alpha=2, dropout=0.0, target_modules=tuple(SEVEN), modules_to_save=("norm",))
    assert differs(model, lora) == ""
    full = make_trainable(empty_model(tmp_path), settings(tmp_path, "Stage2", {"method": "Full"}), fresh=True)
    assert {name for name, parameter in full.named_parameters() if not parameter.requires_grad}
    assert {name.rpartition(".")[0] for name, parameter in full.named_parameters() if not parameter.requires_grad} == seeing


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": ["glm4_moe"]}'])
def test_a_config_json_that_is_damaged_is_left_to_the_load_which_says_what_is_wrong(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "glm4_moe"}')
    with pytest.raises(ConfigError):
        refuse_moved(tmp_path, MOVED_NAMES)
    (tmp_path / "config.json").write_text(text)
    refuse_moved(tmp_path, MOVED_NAMES)
