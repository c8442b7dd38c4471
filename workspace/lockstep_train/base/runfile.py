"""The trainer's part of run.json, read strictly.

An unknown key, a missing key or a wrong type is a ConfigError that names the field's path, because a setting that is
silently ignored costs a whole run. Numbers with a fraction are strings ("2e-4"): the API has no floats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep_spec.choices import (
    Content,
    DataFormat,
    HierarchicalPartition,
    Method,
    NonFinitePolicy,
    Offload,
    OnBroken,
    Optimizer,
    Overlong,
    Precision,
    Quantization,
    Schedule,
    StorageMode,
    TrainOn,
    ZeroStage,
)
from lockstep_train.base.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    EvaluationDataConfig,
    LimitsConfig,
    LoraConfig,
    MetricsConfig,
    MLflowConfig,
    ModelConfig,
    OptimizationConfig,
    RunConfig,
    SourceConfig,
    TrainingConfig,
    WandBConfig,
)
from lockstep_train.base.errors import ConfigError, refusal
from lockstep_train.base.strict import (
    boolean,
    decimal,
    enumerated,
    fraction,
    integer,
    items,
    mapping,
    optional,
    positive,
    probability,
    refuse,
    section,
    share,
    string,
    strings,
)

_model = section(ModelConfig, {"name": string, "quantization": enumerated(Quantization), "revision": optional(string)})
_lora = section(
    LoraConfig,
    {
        "rank": positive,
        "alpha": positive,
        "dropout": probability,
        "target_modules": strings,
        "target_parameters": items(string),
        "modules_to_save": items(string),
        "rank_stabilized": boolean,
        "dora": boolean,
        "init_from": optional(string),
    },
)
_SOURCE = {
    "path": optional(string),
    "name": optional(string),
    "config": optional(string),
    "split": string,
    "revision": optional(string),
    "format": enumerated(DataFormat),
}
_data = section(
    DataConfig,
    {
        **_SOURCE,
        "max_length": lambda path, value: integer(path, value, minimum=2),
        "sources": items(section(SourceConfig, {**_SOURCE, "weight": decimal})),
        "overlong": enumerated(Overlong),
        "train_on": enumerated(TrainOn),
        "packing": boolean,
        "on_broken": enumerated(OnBroken),
        "chat_template": optional(string),
        "chat_template_kwargs": optional(mapping),
    },
)
_optimization_fields = section(
    OptimizationConfig,
    {
        "epochs": positive,
        "max_steps": optional(positive),
        "learning_rate": decimal,
        "micro_batch_size": positive,
        "global_batch_size": optional(positive),
        "warmup_steps": integer,
        "warmup_ratio": fraction,
        "schedule": enumerated(Schedule),
        "min_learning_rate_ratio": fraction,
        "optimizer": enumerated(Optimizer),
        "offload": enumerated(Offload),
        "non_finite": enumerated(NonFinitePolicy),
        "gradient_checkpointing": boolean,
        "max_gradient_norm": decimal,
        "weight_decay": decimal,
        "beta1": fraction,
        "beta2": fraction,
        "epsilon": decimal,
    },
)


def _optimization(path: str, value: Any) -> OptimizationConfig:
    optimization = _optimization_fields(path, value)
    if optimization.epsilon == 0:  # an element that has had no gradient would be 0 / 0
        raise refuse(f"{path}.epsilon", value["epsilon"], 'a decimal number > 0 in quotes, such as "1e-8"')
    if optimization.warmup_steps and optimization.warmup_ratio:
        raise ConfigError(
            f"{path}.warmupRatio is {optimization.warmup_ratio} and warmupSteps is {optimization.warmup_steps}, but only one can be set; set the other to 0"
        )
    return optimization


_evaluation = section(
    EvaluationConfig,
    {
        "every_steps": positive,
        "holdout": share,
        "samples": positive,
        "data": optional(section(EvaluationDataConfig, {**_SOURCE, "split": optional(string)})),
    },
)
_checkpoint = section(
    CheckpointConfig,
    {
        "every_steps": positive,
        "keep": positive,
        "resume_from": string,
        "content": enumerated(Content),
        "replicas": positive,
        "export_adapter": boolean,
    },
)
_metrics = section(
    MetricsConfig,
    {
        "tensor_board": boolean,
        "mlflow": optional(section(MLflowConfig, {"tracking_uri": string, "experiment": string})),
        "wandb": optional(section(WandBConfig, {"project": string, "entity": optional(string)})),
    },
)
_limits = section(LimitsConfig, {"collective_timeout_seconds": positive, "step_timeout_seconds": optional(positive)})
_training = section(
    TrainingConfig,
    {
        "model": _model,
        "method": enumerated(Method),
        "lora": _lora,
        "zero_stage": enumerated(ZeroStage),
        "hierarchical_partition": enumerated(HierarchicalPartition),
        "precision": enumerated(Precision),
        "seed": integer,
        "data": _data,
        "optimization": _optimization,
        "evaluation": optional(_evaluation),
        "checkpoint": _checkpoint,
        "metrics": _metrics,
        "limits": _limits,
        "deepspeed": optional(mapping),
    },
)


def parse_training(value: object) -> TrainingConfig:
    """`training` as it stands in run.json. Raises ConfigError naming the first field that is wrong."""
    return _training("training", value)


def parse_run(document: object, source: str) -> RunConfig:
    """The trainer's part of run.json: `job`, `runDir`, `training`. Raises ConfigError."""
    if not isinstance(document, dict):
        raise ConfigError(f"{source} holds no JSON object; it must be a run.json")
    if document.get("training") is None:
        raise ConfigError(f"{source} has no `training` section; this trainer runs only jobs that have one")
    job = document.get("job")
    if not isinstance(job, dict):
        raise refuse(f"{source}: job", job, "an object with `name`")
    return RunConfig(
        job_name=string(f"{source}: job.name", job.get("name")),
        job_uid=optional(string)(f"{source}: job.uid", job.get("uid") or None),
        run_dir=Path(string(f"{source}: runDir", document.get("runDir"))),
        training=parse_training(document["training"]),
        storage=optional(enumerated(StorageMode))(f"{source}: storage", document.get("storage")),
    )


def read_run(path: Path) -> RunConfig:
    """Read run.json. Raises ConfigError when it can't be read or is not valid."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refusal(f"{path} can't be read ({error.strerror}); give the run's file with --run or LOCKSTEP_RUN", error) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    return parse_run(document, str(path))
