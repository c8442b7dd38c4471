"""The trainers and launchers whose files become jobs, each by its own keys; and programs whose files don't."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from posixpath import basename
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.plan.discovery.draft import Item
from lockstep.plan.translate import keys
from lockstep.plan.translate.keys import FIELDS
from lockstep.plan.translate.leaves import Leaf, leaves_of
from lockstep.plan.translate.readers import ALL_LINEAR, Beside, OtherTool, To, Values, is_on, warm_up, word

DOUBLE_RANK = "2 × rank"
"""Stands for twice the adapter's rank, as a default."""
SWITCHES = ("use_lora", "use_peft", "use_qlora", "use_peft_lora")
_ADAPTER_KEYS = ("adapter", "peft_config", "load_in_4bit", *(key for key, row in FIELDS.items() if row.field.startswith("lora.")))
"""Keys of which a script without an adapter has none."""


def _is_without_adapter(values: Values) -> bool:
    """Tell by a switch for adapters, or else by their settings."""
    last = {path.rpartition(".")[2]: value for path, value in values.items()}
    if str(last.get("method")).lower() in ("full", "fft", "full_finetune"):
        return True
    switches = [last[key] for key in SWITCHES if key in last]
    return not any(map(is_on, switches or [last.get(key) for key in _ADAPTER_KEYS]))


SCRIPT = OtherTool("the script", "", {}, datasets=("dataset",), lists=("datasets",), is_full=_is_without_adapter,
                   seen=("model_name_or_path", "model_name", "base_model", "name_or_path", "model", "dataset_name"))  # fmt: skip
_HUGGING_FACE = {"optimization.epochs": 3, "optimization.schedule": "Linear", "optimization.microBatchSize": 8}
TRL = OtherTool(
    "TRL",
    "use_peft dataset_train_split dataset_test_split dataset_mixer dataset_mixture dataset_splits dataset_config dataset_text_field"
    " assistant_only_loss completion_only_loss max_seq_length packing_strategy dataset_kwargs model_revision attn_implementation"
    " dataset_num_proc eos_token beta max_prompt_length num_generations reward_funcs lora_target_modules dataset_name torch_dtype"
    " dataset_mixer_list gradient_checkpointing_kwargs datasets.path trl_version loss_type",
    {"dataset_mixture.seed": "seed is that of the data, too"},
    ((keys.PREFERENCES, "beta max_prompt_length loss_type precompute_ref_log_probs desirable_weight simpo_gamma cpo_alpha rpo_alpha"),
     ("", "loss_type=nll loss_type=chunked_nll"), (keys.OTHER_LOSS, "loss_type=dft")),
    {**_HUGGING_FACE, "optimization.learningRate": "2e-5", "data.maxLength": 1024, "data.trainOn": "All", "lora.dropout": "0.05",
     "lora.targetModules": [Item("q_proj"), Item("v_proj")]},
    is_full=_is_without_adapter, seen=("model_name_or_path", "dataset_name"), lists=("datasets", "dataset_mixture.datasets"),
)  # fmt: skip
LLAMA_FACTORY = OtherTool(
    "LLaMA-Factory",
    "stage finetuning_type cutoff_len template lora_target plot_loss val_size overwrite_cache"
    " quantization_bit pref_beta pref_loss additional_target neat_packing adapter_name_or_path export_dir infer_backend",
    {"model_max_length": "data.maxLength is cutoff_len"},
    ((keys.NO_TRAINING, "export_dir infer_backend do_predict=true"), ("training of another kind", "stage finetuning_type"),
     ("", "stage=sft stage=pt finetuning_type=lora finetuning_type=full")),
    {**_HUGGING_FACE, "optimization.learningRate": "5e-5", "lora.rank": 8, "lora.alpha": DOUBLE_RANK, "lora.targetModules": ALL_LINEAR},
    datasets=("dataset", "eval_dataset"), seen=("model_name_or_path", "template"),
    is_full=lambda values: values.get("finetuning_type") == "full",
)  # fmt: skip
AXOLOTL = OtherTool(
    "Axolotl",
    "base_model sequence_len micro_batch_size num_epochs datasets.type adapter lora_r val_set_size sample_packing lora_target_linear"
    " dataset_prepared_path evals_per_epoch saves_per_epoch pad_to_sequence_len flash_attention lora_model_dir pretraining_dataset"
    " base_model_config wandb_log_model special_tokens lr_scheduler rl load_in_8bit test_datasets tokenizer_type",
    {
        "warmup_steps": To("optimization.warmupSteps", lambda value: "2" if value == 1 else warm_up(value)),
        "batch_size": "optimization.globalBatchSize counts it",
    },
    (("reinforcement learning", "rl"), (keys.OTHER_ADAPTER, "adapter"), ("", "adapter=lora adapter=qlora")),
    {"optimization.warmupSteps": "0.03", "data.maxLength": 512, "data.overlong": "Drop"},
    is_full=lambda values: not is_on(values.get("adapter")),
    datasets=("pretraining_dataset",), lists=("datasets", "pretraining_dataset", "test_datasets"), needs="base_model",
)  # fmt: skip
_TUNERS = ("tuner_type", "train_type", "sft_type")
SWIFT = OtherTool(
    "ms-swift",
    "tuner_type train_type sft_type split_dataset_ratio rlhf_type model_author loss_scale val_dataset truncation_strategy"
    " model_id_or_path torch_dtype use_hf agent_template tuner_backend load_from_cache_file freeze_vit cached_dataset swift"
    " external_plugins attn_impl use_ray device_groups teacher_model vllm_mode",
    {
        "torch_dtype": To("precision", keys.DTYPE),
        "dtype": To("precision", keys.DTYPE),
        "batch_size": FIELDS["micro_batch_size"],
        "model_name": "samples of self-cognition come with placeholders: write the name into the data",
        "eval_dataset": "evaluation measures the loss of held-out samples",
        "model_author": "samples of self-cognition come with placeholders: write the name into the data",
        "loss_scale": To("data.trainOn", word({"default": "Assistant", "last_round": "LastTurn", "all": "All"},
                                              "data.trainOn is Assistant, LastTurn or All")),
    },
    (
        (keys.NO_TRAINING, "infer_backend sampler_type to_cached_dataset=true"),
        ("training on tokens that ms-swift has made before", "cached_dataset"),
        (keys.MEGATRON, "megatron recompute_granularity megatron_extra_kwargs train_iters"),
        (keys.OTHER_ADAPTER, " ".join(_TUNERS)),
        ("", " ".join(f"{key}={tuner}" for key in _TUNERS for tuner in ("lora", "full", "qlora"))),
        ("training of another kind (embedding, reranker)", "task_type mrl_dims problem_type"),
        ("", "task_type=causal_lm"),
        (keys.OTHER_LOSS, "loss_type"),
    ),
    {"optimization.learningRate": {"LoRA": "1e-4", "Full": "1e-5"}, "optimization.epochs": 3, "optimization.weightDecay": "0.1",
     "optimization.beta2": "0.95", "data.overlong": "Drop", "lora.rank": 8, "lora.dropout": "0.05", "lora.targetModules": ALL_LINEAR,
     "checkpoint.everySteps": 500},
    {"max_length": "isn't set: ms-swift takes the model's longest then, and data.maxLength is 2048 tokens"},
    is_full=lambda values: "full" in [values.get(key) for key in _TUNERS],
    seen=("model", "model_id_or_path", "model_type", "template", "template_type", "dataset"),
    datasets=("dataset", "val_dataset"), least=16,
)  # fmt: skip
TOOLS = (LLAMA_FACTORY, AXOLOTL, SWIFT, TRL)
PROGRAMS = (
    (("compute_environment", "distributed_type", "deepspeed_config.zero_stage", "num_machines", "num_processes", "main_training_function",
      "machine_rank", "same_network", "rdzv_backend", "downcast_bf16", "fp8_config", "fsdp_config.fsdp_sharding_strategy"),
     "accelerate, which starts a training: give the training's own file"),
    (("zero_optimization", "zero_optimization.stage", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping",
      "bf16.enabled", "fp16.enabled", "wall_clock_breakdown", "steps_per_print"),
     "DeepSpeed, which cuts the model: give the training's own file"),
    (("model_class", "peft_config.name", "dist_config.name", "kernel_config.name", "batching_strategy"), "LLaMA-Factory's version 1"),
    (("actor_rollout_ref",), "verl, which trains from rewards"),
    (("model.partial_pretrain",), "verl's trainer of answers"),
    (("tokenizer._component_", "model._component_", "recipe._component_"), "torchtune"),
    (("trainer.devices", "exp_manager", "exp_manager.name", "recipe", "step_scheduler.global_batch_size", "model._target_"), "NeMo"),
    (("checkpoint_dir", "data.class_path", "train.global_batch_size"), "LitGPT"),
    (("checkpoints.checkpoint_interval", "data_stages", "parallelism.dp"), "nanotron"),
    (("job.config_file", "training.local_batch_size", "model.flavor"), "torchtitan"),
    (("merge_method", "slices", "models.model"), "mergekit, which merges models"),
    (("peft_type", "base_model_name_or_path"), "an adapter (adapter_config.json), which lora.initFrom names by its folder"),
    (("architectures", "hidden_size", "vocab_size"), "a model (config.json), which model.name names by its folder"),
    (("channels", "dependencies"), "conda, an environment"),
    (("apiVersion", "kind"), "Kubernetes (kubectl apply -f FILE, or lockstep run -f FILE for a TrainingJob)"),
)  # fmt: skip
"""Keys, of which a file has two (or the only one) → program whose file it is."""


def zero_of(leaves: Sequence[Leaf], source: str) -> Iterator[tuple[str, Any, str]]:
    """Yield field, value and place of what DeepSpeed's settings, or accelerate's, say about the cut of the model."""
    for leaf in leaves:
        row = FIELDS.get(leaf.path)
        if row is not None and row.field in ("zeroStage", "optimization.offload", "optimization.schedule"):
            try:
                value = row.read(leaf.value)
                yield row.field, getattr(value, "value", value), f"{source}:{leaf.line}, {leaf.path}"
            except ValueError as error:
                raise ConfigError(f"{source}:{leaf.line}: {leaf.path}: {leaf.value}: {error}") from None


def zero_beside(value: str, beside: Beside) -> Iterator[tuple[str, Any, str]]:
    """Yield what a DeepSpeed file says: its text, or its name where the file isn't there."""
    name, text = basename(value), beside(value)
    if text or value.lstrip().startswith("{"):
        source = name if text else "deepspeed"
        yield from zero_of(leaves_of(text or value, source), source)
    elif stage := re.search(r"(?:z|zero|stage)[_-]?([0-3])(?!\d)", name.lower()):
        why = f"by its name, since {name} isn't there to be read"
        yield "zeroStage", FIELDS["zero_optimization.stage"].read(stage[1]), why
        if "offload" in name.lower():
            yield "optimization.offload", "CPU", why
