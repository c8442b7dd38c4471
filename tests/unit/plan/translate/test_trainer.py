"""A config.yaml becomes a job file, each value with the key it came from, and nothing is dropped silently."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.api.errors import ConfigError
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.files.yamltext import dump_yaml
from lockstep.api.job import TrainingJob
from lockstep.api.training import Training
from lockstep.plan.translate.keys import FIELDS
from lockstep.plan.translate.keys import NO_SETTING as UNKNOWN
from lockstep.plan.translate.leaves import leaves_of
from lockstep.plan.translate.tools import TOOLS
from lockstep.plan.translate.trainer import NO_VALUE, Size, Translation, job_text
from support.checkout import ROOT

CONFIG = """\
model:
  name_or_path: /workspace/models/GLM-4.5-Air

data:
  dataset_path: /datasets/all_data.jsonl
  max_length: 16384  # Production: 16k context

training:
  num_train_epochs: 3
  learning_rate: 2.0e-5
  per_device_train_batch_size: 1
  gradient_accumulation_steps: 2

  # Evaluation
  eval_dataset_type: "subset"
  eval_subset_size: 200
  eval_steps: 50

  # Sharded checkpointing
  checkpoint_mode: "lite"  # Sharded LoRA adapters
  save_steps: 100
  save_total_limit: 10

lora:
  r: 16
  lora_alpha: 32
  target_modules: ["q_proj", "k_proj", "v_proj", "o_proj"]
"""
"""The configuration of docs/how-to/from-config-yaml.md."""
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**7), st.floats(), st.text(max_size=6), st.lists(st.text(max_size=3), max_size=3)
)
KEYS = sorted({*FIELDS, *(key for tool in TOOLS for key in (*tool.keys, *tool.datasets) if "." not in key)})
LEAST = "model_name_or_path: org/model\ntrain_file: /datasets/a.jsonl\n"
CODE_ALONE = {"seed": 42, "optimization.warmupSteps": "150", "evaluation.holdout": "0.02"}
"""What the sample has from a script's code, which no configuration says."""


def translated(text: str, size: Size = Size(16)) -> tuple[Translation, TrainingJob]:  # noqa: B008 (frozen)
    translation = job_text(text, "config.yaml", "x", "lab", size)
    return translation, parse_job_file(translation.text, "x.yaml")


def training(text: str, size: Size = Size(16)) -> Training:  # noqa: B008 (frozen)
    found = translated(text, size)[1].spec.training
    assert found is not None
    return found


def test_the_configuration_of_the_guide_becomes_the_sample() -> None:
    text = (ROOT / "manifests/samples/trainingjob-glm-air.yaml").read_text()
    own = ["training.checkpoint.content=Lite", "training.model.name=/workspace/models/GLM-4.5-Air"]
    sample = parse_job_file(text, "s.yaml", own).spec.training
    expected = sample.to_dict()
    for path, value in CODE_ALONE.items():
        *sections, name = path.split(".")
        place = expected
        for section in sections:
            place = place[section]
        assert place[name] == value
    ours = training(CONFIG).to_dict()
    ours["optimization"] |= {"warmupSteps": "150"}
    assert ours == expected


def test_each_value_has_the_key_it_came_from_beside_it_and_what_is_left_is_listed() -> None:
    translation, _ = translated(CONFIG)
    for leaf in leaves_of(CONFIG, "config.yaml"):
        listed = any(one.line == leaf.line for one in translation.leftovers)
        assert listed or leaf.path in translation.text or leaf.path.endswith("gradient_accumulation_steps"), leaf
    assert "# 1 × 2 accumulated × 16 ranks" in translation.text
    assert [one.what for one in translation.leftovers] == ["training.eval_dataset_type: subset"]


@pytest.mark.parametrize(("size", "samples"), [(Size(1), 6), (Size(3), 18), (Size(8), 48)])
def test_a_step_s_samples_follow_from_those_of_a_rank_and_the_ranks(size: Size, samples: int) -> None:
    text = LEAST + "per_device_train_batch_size: 3\ngradient_accumulation_steps: 2\n"
    assert training(text, size).optimization.global_batch_size == samples


def test_a_step_s_samples_are_left_to_the_reader_where_the_number_of_ranks_is_not_known() -> None:
    text = LEAST + "per_device_train_batch_size: 3\ngradient_accumulation_steps: 2\n"
    translation, job = translated(text, Size(None))
    assert job.spec.training is not None and job.spec.training.optimization.global_batch_size is None
    assert "# globalBatchSize: 6  # 3 × 2 accumulated × the ranks, whose number is not known" in translation.text
    assert [one.reason for one in translation.leftovers] == [
        "the number of ranks is not known: state optimization.globalBatchSize as 3 × 2 × the ranks"
    ]
    assert translated(LEAST + "per_device_train_batch_size: 3\n", Size(None))[0].leftovers == (), "one micro-batch a rank is the default"


def test_the_size_stands_in_the_job_where_it_was_asked_for() -> None:
    _, job = translated(LEAST, Size(12, 3, 4))
    assert (job.spec.nodes, job.spec.gpus_per_node, job.spec.cluster) == (3, 4, "lab")
    assert translated(LEAST)[1].spec.nodes is None


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("lr_scheduler_type: linear", "optimization.schedule", "Linear"),
        ("warmup_ratio: 0.03", "optimization.warmupSteps", "0.03"),
        ("weight_decay: 0.1", "optimization.weightDecay", "0.1"),
        ("max_steps: 500", "optimization.maxSteps", 500),
        ("adam_epsilon: 1e-8", "optimization.epsilon", "1e-8"),
        ("fp16: true", "precision", "FP16"),
        ("cutoff_len: 4096", "data.maxLength", 4096),
        ("sample_packing: true", "data.packing", True),
        ("lora_r: 64", "lora.rank", 64),
        ("lora_target: q_proj,v_proj", "lora.targetModules", ["q_proj", "v_proj"]),
        ("lora_target: '.*mlp[.](gate|down)_proj'", "lora.targetModules", ["gate_proj", "down_proj"]),
        ("num_train_epochs: 2.5", "optimization.epochs", 3),
        ("report_to: [wandb, comet_ml]", "reportTo", ["WandB"]),
        ("report_to: none", "reportTo", []),
        ("max_steps: 5", "optimization.epochs", 10000),
        ("fsdp_config: {fsdp_offload_params: true}", "optimization.offload", "CPU"),
        ("lora_dropout: 0.05", "lora.dropout", "0.05"),
        ("ddp_timeout: 1800", "hangTimeouts.collectiveSeconds", 1800),
        ("resume_from_checkpoint: /workspace/runs/a/checkpoints/checkpoint-5", "checkpoint.resumeFrom",
            "/workspace/runs/a/checkpoints/checkpoint-5"),
        ("gradient_checkpointing: true", "optimization.recompute", "Auto"),
        ("gradient_checkpointing: false", "optimization.recompute", "None"),
    ],
)  # fmt: skip
def test_names_of_other_trainers_reach_their_field(line: str, field: str, value: object) -> None:
    translation, job = translated(LEAST + line + "\n")
    spec = job.to_dict()["spec"]
    place: object = spec | spec["training"]
    for part in field.split("."):
        assert isinstance(place, dict)
        place = place[part]
    assert (place, translation.leftovers) == (value, ())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("max_steps: -1", "not set: optimization.epochs counts"),
        ("save_total_limit: 1", "the newest two checkpoints always stay"),
        ("eval_steps: 0.1", "must be a whole number here"),
        ("optim: adafactor", "the result may differ: the optimizer is torch's AdamW"),
        ("optim: adamw_torch", "the optimizer is torch's AdamW"),
        ("lora_target: '.*'", ".* is a pattern, and a job lists names of layers: state lora.targetModules"),
        ("bf16: false", "precision says the number format: BF16 by default"),
        ("deepspeed: ds.json", "zeroStage says how to cut the model, and deepspeed takes single settings"),
        ("gradient_accumulation_steps: 0", "must be 1 or more"),
        ("gradient_accumulation_steps: 4\nlate: {gradient_accumulation_steps: 8}", "optimization.globalBatchSize counts the one before it"),
        ("finetuning_type: full", "method is LoRA by default; Full trains every weight"),
        ("neftune_noise_alpha: 5", "the result may differ: nothing like it is in the loss"),
        ("nefertiti: 5", UNKNOWN),
        ("resume_from_checkpoint: true", "checkpoint.resumeFrom is Auto by default: a job goes on from its newest checkpoint"),
        ("learning_rate: fast", "must be a number"),
        ("learning_rate: 'inf'", "must be a number"),
        ("weight_decay: true", "must be a number"),
        ("fsdp_config: {fsdp_backward_prefetch: BACKWARD_PRE}", "zeroStage: Stage3 is the same cut, by DeepSpeed"),
        ("num_epochs: 3\nnum_train_epochs: 4", "optimization.epochs has its value from num_epochs"),
        ("dataset_config_name: null", NO_VALUE),
        ("dataset_path:", NO_VALUE),
        ("base_model: ~", NO_VALUE),
        ("report_to: null", NO_VALUE),
        ("val_dataset: ''", "must be one name or path"),
        ("report_to: comet_ml", "reportTo lists the trackers: TensorBoard by default"),
        ("warmup_steps: 10\nwarmup_ratio: 0.1", "optimization.warmupSteps has its value from warmup_steps"),
    ],
)
def test_what_has_no_counterpart_is_listed_with_the_reason(line: str, reason: str) -> None:
    translation, _ = translated(LEAST + line + "\n")
    assert [one.reason for one in translation.leftovers] == [reason]


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=12))
@example({"val_dataset": "", "model_id_or_path": None})  # (ms-swift's, whose list of data sets is empty)
def test_any_values_become_a_job_file_or_leftovers(config: dict[str, object]) -> None:
    text = dump_yaml({"name_or_path": "org/m", "dataset_path": "/datasets/a.jsonl"} | config)
    try:
        translation = job_text(text, "f", "x", "lab", Size(16))
    except ConfigError as error:
        assert all(str(line).startswith("f") for line in error.args)
        return
    for leaf in leaves_of(text, "f"):
        listed = any(one.line == leaf.line for one in translation.leftovers)
        assert listed or leaf.path in translation.text or leaf.path == "gradient_accumulation_steps"


def test_files_elsewhere_are_to_be_brought() -> None:
    translation, job = translated("base_model: /home/ada/models/Qwen3-8B/\ndataset_path: ./data/all.jsonl\n")
    found = job.spec.training
    assert found is not None and (found.model.name, found.data.path) == ("/workspace/models/Qwen3-8B", "/datasets/all.jsonl")
    assert (
        "base_model: /home/ada/models/Qwen3-8B/, which only /workspace and /datasets can hold: lockstep cp brings it"
        in translation.text.replace("\n      # ", " ")
    )


def test_quantized_weights_are_not_cut_into_shards() -> None:
    assert training(LEAST + "load_in_4bit: true\n").zero_stage == "Stage2"
    assert training(LEAST).zero_stage == "Stage3"


def test_a_configuration_without_model_or_data_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        job_text("seed: 1\n", "c.yaml", "x", "lab", Size(1))
    assert [line.partition(":")[2].split(":")[0] for line in map(str, refused.value.args)] == [" names no model", " names no data"]
    with pytest.raises(ConfigError, match="must be one YAML mapping"):
        job_text("- a\n", "c.yaml", "x", "lab", Size(1))


def test_every_key_of_the_guide_s_tables_is_taken_over_or_has_a_reason() -> None:
    page = (ROOT / "docs/how-to/from-config-yaml.md").read_text()
    tables = page[page.index("## Key by key") : page.index("What a script has")] + page[page.index("## Names you know") :]
    cells = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| `")]
    keys = [key for cell in cells for key in re.findall(r"`([a-z_0-9.]+)(?=[:`])", cell)]
    keys = [key for key in keys if key not in ("config.yaml", "cosine_with_min_lr")]  # (a heading, and a value)
    assert len(keys) > 50
    values = {
        "lr_scheduler_kwargs": "{min_lr_rate: 0.1}",
        "learning_rate": "1e-4",
        "target_modules": "[q_proj]",
        "modules_to_save": "[lm_head]",
        "target_parameters": "[w]",
        "adam_beta1": "0.9",
        "adam_beta2": "0.9",
        "min_lr_rate": "0.1",
        "lora_dropout": "0.1",
    }
    unknown = []
    for key in keys:
        name = key.rpartition(".")[2]
        text = f"{name}: {values.get(name, 2)}\n"
        text += "".join(line + "\n" for line in LEAST.splitlines() if not line.startswith(f"{name}:"))
        unknown += [key for one in job_text(text, "c", "x", "lab", Size(1)).leftovers if one.reason == UNKNOWN]
    assert unknown == []
