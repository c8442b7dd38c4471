"""DeepSpeed's configuration: ours, and raw settings laid over it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep_spec.deepspeed import IDLE_ZERO, NEVER_STAGE3, ONLY_STAGE3, SECTIONS
from lockstep_spec.shape import ModelShape, Weight, shape_of
from lockstep_spec.training import TrainingConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.runfile import parse_training
from lockstep_train.engine.settings import deepspeed_settings
from lockstep_train.zero.start import refuse_invalid


def training(optimization: dict[str, Any] | None = None, **change: Any) -> TrainingConfig:
    settings = {
        "model": {"name": "/models/tiny"},
        "lora": {"rank": 4, "alpha": 8, "dropout": "0", "targetModules": ["q_proj"]},
        "zeroStage": "Stage3",
        "precision": "BF16",
        "seed": 1,
        "data": {"path": "/data.jsonl", "maxLength": 64},
        "optimization": {"epochs": 1, "learningRate": "1e-4", "microBatchSize": 2, **(optimization or {})},
        "evaluation": None,
        "checkpoint": {"everySteps": 2, "keep": 2, "resumeFrom": "Auto"},
    }
    return parse_training({**settings, **change})


def test_raw_settings_are_laid_over_ours_section_by_section() -> None:
    settings = deepspeed_settings(
        training(deepspeed={"zero_optimization": {"overlap_comm": False, "reduce_bucket_size": 1000}, "wall_clock_breakdown": True}), 3
    )
    assert settings["zero_optimization"]["overlap_comm"] is False
    assert settings["zero_optimization"]["reduce_bucket_size"] == 1000
    assert settings["zero_optimization"]["stage"] == 3
    assert settings["wall_clock_breakdown"] is True
    assert settings["gradient_accumulation_steps"] == 3


def test_what_is_auto_reads_as_left_out() -> None:
    raw = {
        "train_batch_size": "auto",
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"reduce_bucket_size": "auto", "overlap_comm": False},
    }
    settings = deepspeed_settings(training(deepspeed=raw), 1)
    assert "train_batch_size" not in settings and settings["fp16"] == {"enabled": False}
    assert settings["zero_optimization"]["overlap_comm"] is False and "reduce_bucket_size" not in settings["zero_optimization"]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"train_batch_size": 8}, "training.deepspeed.train_batch_size contradicts training.optimization.globalBatchSize"),
        ({"train_micro_batch_size_per_gpu": 8}, "contradicts training.optimization.microBatchSize"),
        ({"gradient_accumulation_steps": 2}, "contradicts training.optimization.globalBatchSize"),
        ({"gradient_clipping": 2}, "contradicts training.optimization.maxGradientNorm"),
        ({"optimizer": {"type": "Adam"}}, "contradicts training.optimization, which decides it"),
        ({"scheduler": {"type": "WarmupLR"}}, "contradicts training.optimization.schedule"),
        ({"bf16": {"enabled": False}}, "training.deepspeed.bf16 contradicts training.precision"),
        ({"fp16": {"enabled": True}}, "training.deepspeed.fp16.enabled contradicts training.precision"),
        ({"zero_optimization": {"stage": 2}}, "training.deepspeed.zero_optimization.stage contradicts training.zeroStage"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "contradicts training.optimization.offload"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "contradicts training.hierarchicalPartition"),
        ({"fp16": {"initial_scale_power": 8}}, "is only read with training.precision FP16, which is BF16"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "which with training.precision BF16 is bf16 or fp32"),
        ({"data_types": {"grad_accum_dtyp": "bf16"}}, "must be an object with grad_accum_dtype alone"),
        ({"data_types": "bf16"}, "must be an object with grad_accum_dtype alone"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "activation_checkpointing would do nothing here: only a model that calls",
        ),
        ({"compile": {"deepcompile": True}}, "training.deepspeed.compile would do nothing here: DeepSpeed compiles where engine.compile()"),
        ({"disable_allgather": True}, "disable_allgather would do nothing here: DeepSpeed never reads it; leave it out"),
        ({"sparse_gradients": True}, "sparse_gradients would do nothing here: ZeRO reduces all gradients dense"),
        ({"comms_logger": {"enabled": True}}, "comms_logger would do nothing here: its summary is never printed"),
        ({"aio": {"thread_count": 2}}, "aio would do nothing here: nothing is offloaded to NVMe"),
        (
            {"aio": {"thread_count": 2}, "zero_optimization": {"offload_param": {"device": "cpu"}}},
            "aio would do nothing here: nothing is offloaded to NVMe",
        ),
        *(
            ({"zero_optimization": {name: True}}, f"zero_optimization.{name} would do nothing here: ")
            for name in (
                "allgather_partitions",
                "load_from_fp32_weights",
                "elastic_checkpoint",
                "pipeline_loading_checkpoint",
                "legacy_stage1",
                "stage3_gather_16bit_weights_on_model_save",
                "stage3_gather_fp16_weights_on_model_save",
                "cpu_offload_use_pin_memory",
                "save_muon_momentum_buffer_in_memory",
            )
        ),
        (
            {"zero_optimization": {"round_robin_gradients": True}},
            "round_robin_gradients would do nothing here: it acts in Stage1 and Stage2 only, and training.zeroStage is Stage3",
        ),
        (
            {"steps_per_print": 10},
            "steps_per_print would do nothing here: DeepSpeed prints it at log_level info or debug only; leave it out",
        ),
        (
            {"dump_state": True, "log_level": "warning"},
            "dump_state would do nothing here: DeepSpeed prints it at log_level info or debug only",
        ),
        ({"flops_profiler": {"profile_step": 2}}, "flops_profiler would do nothing here: it lacks enabled: true"),
        (
            {"flops_profiler": {"enabled": True, "profile_steps": 2}},
            (
                "training.deepspeed.flops_profiler.profile_steps is not a DeepSpeed setting (did you mean profile_step?); valid here:"
                " enabled, "
            ),
        ),
        (
            {"aio": {"thread_count": 2}, "zero_optimization": {"offload_param": {"device": "nvme"}}},
            "training.deepspeed.aio.thread_count is not a DeepSpeed setting; valid here: block_size, ",
        ),
        ({"zero_optimization": None}, "training.deepspeed.zero_optimization is null, but must be an object"),
        ({"zero_optimization": 5}, "training.deepspeed.zero_optimization is 5, but must be an object"),
        ({"flops_profiler": True}, "training.deepspeed.flops_profiler is true, but must be an object"),
        ({"data_types": None}, "must be an object with grad_accum_dtype alone"),
        ({"communication_data_type": "fp99"}, 'communication_data_type is "fp99", but must be one of fp32, fp16, bf16, or null'),
        ({"log_level": "loud"}, 'log_level is "loud", but must be one of debug, info, '),
        ({"steps_per_print": 0, "log_level": "info"}, "steps_per_print is 0, but must be a whole number from 1 on"),
        ({"wall_clock_breakdown": "true"}, 'wall_clock_breakdown is "true", but must be true or false'),
        ({"gradient_predivide_factor": "2"}, 'gradient_predivide_factor is "2", but must be a number above 0'),
        ({"gradient_predivide_factor": 2}, "gradient_predivide_factor can't be used with training.zeroStage Stage3, where"),
        ({"prescale_gradients": True}, "prescale_gradients can't be used with training.zeroStage Stage3, where"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow would replace"),
        (
            {"zero_optimization": {"max_live_parameters": 7, "stage3_max_live_parameters": 7}},
            "zero_optimization.max_live_parameters and stage3_max_live_parameters are one setting; keep one of them",
        ),
        ({"wall_clock_brakedown": True}, "not a DeepSpeed setting that can be used here (did you mean wall_clock_breakdown?)"),
        (
            {"curriculum_learning": {"enabled": True}},
            "training.deepspeed.curriculum_learning is not a DeepSpeed setting that can be used here",
        ),
    ],
)
def test_a_raw_setting_that_contradicts_ours_or_would_be_ignored_is_refused_by_name(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        deepspeed_settings(training(deepspeed=raw), 1)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["stage3_max_live_parameters", "prefetch_bucket_size", "zero_quantized_weights", "offload_param"])
@pytest.mark.parametrize("stage", ["Stage1", "Stage2"])
def test_what_acts_in_stage3_only_is_refused_in_others(stage: str, name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{name} would do nothing here: it acts in Stage3 only, and training.zeroStage is {stage}; leave"
    ):
        deepspeed_settings(training(zeroStage=stage, deepspeed={"zero_optimization": {name: 1}}), 1)


@pytest.mark.parametrize(
    ("stage", "raw"),
    [
        ("Stage1", {"prescale_gradients": True, "gradient_predivide_factor": 2.0}),
        ("Stage2", {"prescale_gradients": True, "zero_optimization": {"reduce_scatter": False}}),
        ("Stage3", {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "communication_data_type": None}),
        ("Stage3", {"steps_per_print": 10, "dump_state": True, "log_level": "INFO"}),
        ("Stage3", {"flops_profiler": {"enabled": False, "profile_step": 2}, "dump_state": False}),
    ],
)
def test_raw_settings_that_work_are_passed_on(stage: str, raw: dict[str, Any]) -> None:
    settings = deepspeed_settings(training(zeroStage=stage, deepspeed=raw), 1)
    assert {key: settings[key] for key in raw if key != "zero_optimization"} == {
        key: value for key, value in raw.items() if key != "zero_optimization"
    }


@pytest.mark.parametrize("prefix", ["", "stage3_"])
def test_a_setting_of_stage3_may_be_stated_with_its_prefix_or_without(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    from deepspeed.runtime.zero.config import get_zero_config

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    raw = {f"{prefix}max_live_parameters": 77, f"{prefix}prefetch_bucket_size": 7}
    settings = deepspeed_settings(training(deepspeed={"zero_optimization": raw}), 1, shape=shape({"mlp.weight": (8, 8)}))
    refuse_invalid(settings)
    read = get_zero_config(settings)
    assert (read.max_live_parameters, read.prefetch_bucket_size) == (77, 7)


def test_sections_that_deepspeed_reads_by_name_have_the_names_that_it_reads() -> None:
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    assert set(SECTIONS["flops_profiler"]) == set(vars(DeepSpeedFlopsProfilerConfig({})))
    assert set(SECTIONS["aio"]) == set(AIO_DEFAULT_DICT)


def test_asynchronous_reads_are_passed_on_where_weights_are_offloaded_to_nvme() -> None:
    raw = {"aio": {"queue_depth": 2}, "zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/scratch"}}}
    assert deepspeed_settings(training(deepspeed=raw), 1)["aio"] == raw["aio"]


def test_every_setting_that_is_refused_is_one_that_deepspeed_has() -> None:
    """A name that DeepSpeed doesn't know would be refused by DeepSpeed, in its own words."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    names = {*fields, *(field.alias for field in fields.values() if field.alias)}
    assert names >= {*IDLE_ZERO, *ONLY_STAGE3, *NEVER_STAGE3}


@pytest.mark.parametrize("name", ["zero_quantized_weights", "zero_quantized_nontrainable_weights"])
def test_weights_quantized_in_bf16_are_refused_where_deepspeed_takes_their_bits_for_fp16(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    settings = deepspeed_settings(training(deepspeed={"zero_optimization": {name: True}}), 1)
    refuse_invalid(settings)
    monkeypatch.setattr(CUDAQuantizer, "dequantize", lambda self, quantized, scale: quantized)
    with pytest.raises(ConfigError, match=f"{name} with training.precision BF16 computes with wrong values in DeepSpeed"):
        refuse_invalid(settings)
    refuse_invalid(deepspeed_settings(training(precision="FP32", deepspeed={"zero_optimization": {name: True}}), 1))


def test_in_fp16_the_loss_scaler_can_be_set_raw() -> None:
    settings = deepspeed_settings(training(precision="FP16", deepspeed={"fp16": {"initial_scale_power": 8}}), 1)
    assert settings["fp16"] == {"enabled": True, "initial_scale_power": 8}
    assert settings["bf16"]["enabled"] is False


@pytest.mark.parametrize("precision", ["BF16", "FP16", "FP32"])
def test_gradients_are_summed_in_fp32_or_as_chosen_in_their_own_format(precision: str) -> None:
    assert deepspeed_settings(training(precision=precision), 4)["data_types"] == {"grad_accum_dtype": "fp32"}
    raw = {"data_types": {"grad_accum_dtype": precision.lower()}}
    assert deepspeed_settings(training(precision=precision, deepspeed=raw), 4)["data_types"] == raw["data_types"]


def shape(layer: dict[str, tuple[int, ...]], layers: int = 3) -> ModelShape:
    """A model of these weights a layer, between an embedding and a head of 4,096 x 1,000 elements."""
    ends = [Weight("model.embed_tokens.weight", (4096, 1000)), Weight("lm_head.weight", (4096, 1000), linear=True)]
    weights = [Weight(f"model.layers.{index}.{name}", size) for index in range(layers) for name, size in layer.items()]
    return shape_of(SimpleNamespace(hidden_size=4096, num_hidden_layers=layers), (*ends, *weights))


EXPERTS = {
    "self_attn.q_proj.weight": (12288, 4096),
    "mlp.experts.gate_up_proj": (128, 2816, 4096),
    "mlp.experts.down_proj": (128, 4096, 1408),
}
GATE_UP, DOWN, QUERY = 128 * 2816 * 4096, 128 * 4096 * 1408, 12288 * 4096


def test_stage3_fetches_the_next_layer_ahead_though_the_experts_of_one_are_more_than_deepspeeds_limit() -> None:
    zero = deepspeed_settings(training(), 1, shape=shape(EXPERTS))["zero_optimization"]
    layer = GATE_UP + DOWN + QUERY
    assert zero["stage3_prefetch_bucket_size"] == layer
    assert zero["stage3_max_live_parameters"] == 2 * layer - GATE_UP
    # DeepSpeed goes on to fetch while fewer elements are gathered: beside a whole layer, and never more than two.
    assert layer < zero["stage3_max_live_parameters"]
    assert zero["stage3_max_live_parameters"] + GATE_UP == 2 * layer


@pytest.mark.parametrize(("size", "ahead"), [((64, 64), 50_000_000), ((14336, 4096), 14336 * 4096)])
def test_a_smaller_model_stays_gathered_as_long_as_deepspeed_has_it(size: tuple[int, ...], ahead: int) -> None:
    zero = deepspeed_settings(training(), 1, shape=shape({"mlp.up_proj.weight": size}))["zero_optimization"]
    assert zero["stage3_max_live_parameters"] == 1_000_000_000
    assert zero["stage3_prefetch_bucket_size"] == ahead


def test_limits_of_what_is_gathered_are_stage3s_and_raw_ones_go_before_them() -> None:
    assert not [
        key for key in deepspeed_settings(training(zeroStage="Stage2"), 1, shape=shape(EXPERTS))["zero_optimization"] if "live" in key
    ]
    raw = {"zero_optimization": {"stage3_max_live_parameters": 5}}
    assert deepspeed_settings(training(deepspeed=raw), 1, shape=shape(EXPERTS))["zero_optimization"]["stage3_max_live_parameters"] == 5


@pytest.mark.parametrize(
    ("stage", "method", "overlapped"),
    [("Stage3", "LoRA", True), ("Stage2", "LoRA", False), ("Stage1", "LoRA", False), ("Stage2", "Full", True)],
)
def test_communication_runs_beside_computing_where_there_is_much_of_it(stage: str, method: str, overlapped: bool) -> None:
    settings = deepspeed_settings(training(zeroStage=stage, method=method), 1)
    assert settings["zero_optimization"]["overlap_comm"] is overlapped


def test_offload_puts_the_optimizer_on_the_cpu_without_deepspeeds_compiled_one() -> None:
    settings = deepspeed_settings(training({"offload": "CPU"}), 1)
    assert settings["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert settings["zero_force_ds_cpu_optimizer"] is False
    assert "offload_optimizer" not in deepspeed_settings(training(), 1)["zero_optimization"]


def test_gradients_are_clipped_to_the_norm_that_is_asked_for() -> None:
    assert deepspeed_settings(training({"maxGradientNorm": "0.25"}), 1)["gradient_clipping"] == 0.25


def test_gradients_are_looked_at_before_they_are_applied_in_bf16_too() -> None:
    assert deepspeed_settings(training(), 1)["bf16"] == {"enabled": True, "check_grad_overflow": True}
