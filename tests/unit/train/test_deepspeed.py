"""DeepSpeed's internals that lockstep_train/zero uses: each with the feature that breaks where another version of DeepSpeed does without
it, checked on real engines.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep_train.base.errors import ConfigError, NonFinite
from lockstep_train.zero.parameters import full_shape, gather_as_one, is_plain, is_sharded, own_values, set_values, sharding_empty, shards
from lockstep_train.zero.secondary import _gathered
from lockstep_train.zero.self_test import self_test
from lockstep_train.zero.start import import_engine, initialize, prepare_deepspeed, refuse_invalid
from lockstep_train.zero.zero_access import (
    apply_gradients,
    create_optimizer_state,
    fragments,
    gather_masters,
    loss_scale,
    loss_scaler_state,
    optimizer_step,
    restore_loss_scaler,
    seeks_loss_scale,
    set_counters,
    set_learning_rate,
)
from support.checkout import ROOT

ROOM = ROOT / "workspace" / "lockstep_train" / "zero"
SHAPES = {"frozen": (3, 5), "trained": (2, 3)}


class Engines:
    """Engines of one rank over a frozen and a trained matrix, made when a check asks for them."""

    def __init__(self, deepspeed: ModuleType) -> None:
        self.deepspeed = deepspeed

    def _start(self, stage: int, model: Any = None, **settings: Any) -> Any:
        torch.manual_seed(stage)
        model = model or tiny_model()
        optimizer = torch.optim.AdamW([model.trained], lr=0.1)
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        chosen = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
            "zero_optimization": zero,
        }
        return initialize(model, [model.trained], optimizer, chosen | settings)

    @cached_property
    def stage1(self) -> Any:
        return self._start(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})

    @cached_property
    def stage2(self) -> Any:
        return self._start(2)

    @cached_property
    def stage3(self) -> Any:
        return self._start(3, model=self.sharded_model())

    @cached_property
    def fp16(self) -> Any:
        return self._start(2, fp16={"enabled": True, "initial_scale_power": 1, "hysteresis": 1})

    def sharded_model(self) -> Any:
        with (
            sharding_empty(),
            self.deepspeed.zero.Init(config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}),
        ):
            model = tiny_model()
        for name, shape in SHAPES.items():
            getattr(model, name).ds_tensor.copy_(values(shape).flatten())
        return model


def values(shape: tuple[int, ...]) -> Any:
    return torch.arange(float(math.prod(shape))).view(shape) / 8


def tiny_model() -> Any:
    class Tiny(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.Parameter(values(SHAPES["frozen"]), requires_grad=False)
            self.trained = torch.nn.Parameter(values(SHAPES["trained"]))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return (rows.to(self.trained.dtype) @ self.frozen.T @ self.trained.T).float().sum()

    return Tiny()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    deepspeed = import_engine()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        patch.setattr(deepspeed.comm.comm, "cdb", None)
        # DeepSpeed's check of the CPU is older than torch's support.
        patch.setattr(deepspeed.accelerator.get_accelerator(), "is_fp16_supported", lambda: True, raising=False)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield Engines(prepare_deepspeed())
        finally:
            dist.destroy_process_group()


def train(engine: Any) -> float:
    engine.backward(engine(torch.ones(1, 5)), scale_wrt_gas=False)
    return apply_gradients(engine, 1)


def muon_is_not_compiled(engines: Engines) -> bool:
    from deepspeed.runtime import compiler

    muon = sys.modules["deepspeed.runtime.zero.muon.original_muon"]
    return "compile" in vars(compiler) and not hasattr(muon.zeropower_via_newtonschulz5, "_torchdynamo_orig_callable")


def no_operator_is_built(engines: Engines) -> bool:
    from deepspeed.comm.torch import build_shm_op

    return engines.deepspeed.ops.__compatible_ops__ == {} and build_shm_op() is None


def wrong_settings_are_refused(engines: Engines) -> bool:
    settings: dict[str, Any] = {"bf16": {"enabled": False}, "fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    refuse_invalid(settings)
    for section in ("zero_optimization", "fp16"):
        with pytest.raises(ConfigError, match="DeepSpeed refuses it"):
            refuse_invalid({**settings, section: {**settings[section], "stage": "x", "loss_scale_window": "x"}})
    return True


def quantizer_takes_a_format(engines: Engines) -> bool:
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    return "dtype" in inspect.signature(CUDAQuantizer.dequantize).parameters


def fp16_depends_on_the_device(engines: Engines) -> bool:
    from deepspeed.accelerator import get_accelerator

    return type(get_accelerator()).is_fp16_supported(get_accelerator()) in (True, False, None)  # None: a CPU without it


def stage1_has_zeros_optimizer(engines: Engines) -> bool:
    from deepspeed.runtime.engine import BFLOAT16, DeepSpeedEngine

    real = DeepSpeedEngine._do_optimizer_sanity_check(engines.stage1, engines.stage1.optimizer.optimizer)
    return real == BFLOAT16 and type(engines.stage1.optimizer) is type(engines.stage2.optimizer)


def sharding_sends_nothing(engines: Engines) -> bool:
    import deepspeed.runtime.zero.partition_parameters as partitioning

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("zero.Init broadcasts")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioning.dist, "broadcast", refuse)
        model = engines.sharded_model()
    return all(getattr(model, name).numel() == 0 for name in SHAPES)


def shards_are_flat_parts(engines: Engines) -> bool:
    for name, shape in SHAPES.items():
        parameter = getattr(engines.sharded_model(), name)
        assert is_sharded(parameter) and full_shape(parameter) == shape and is_plain(parameter.ds_tensor)
        assert parameter.ds_numel == math.prod(shape) and parameter.ds_secondary_tensor is None and parameter.ds_zero_partition_rank == 0
        ((shard, start, numel),) = shards(parameter)
        assert (start, numel) == (0, math.prod(shape)) and shard is own_values(parameter) and shard.ds_numel == numel
        assert torch.equal(shard, values(shape).flatten())
    return True


def marks_of_other_shards(engines: Engines) -> bool:
    from deepspeed.runtime.zero.partition_parameters import Init

    source = inspect.getsource(Init)
    return all(
        f"ds_tensor.{mark} = " in source or f"partitioned_tensor.{mark} = " in source for mark in ("final_location", "ds_quant_scale")
    )


def node_rank_is_asked_without_arguments(engines: Engines) -> bool:
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    asked = groups._get_zero_param_intra_parallel_rank_in_mygroup
    return not inspect.signature(asked).parameters and "ds_secondary_tensor" in inspect.getsource(Init)


def rank_0s_values_are_kept(engines: Engines) -> bool:
    parameter = engines.sharded_model().trained
    set_values(parameter, values(SHAPES["trained"]) + 1)
    return torch.equal(parameter.ds_tensor, values(SHAPES["trained"]).flatten() + 1)


def a_module_is_gathered_as_one(engines: Engines) -> bool:
    from deepspeed.utils import get_z3_leaf_modules

    model = tiny_model()
    before = get_z3_leaf_modules(model)
    gather_as_one(model)
    return before == [] and get_z3_leaf_modules(model) == [model]


def a_module_is_gathered_by_hand(engines: Engines) -> bool:
    parameter = engines.stage3.module.frozen
    (whole,) = [value.clone() for _, value in _gathered([parameter])]
    return torch.equal(whole, values(SHAPES["frozen"])) and parameter.numel() == 0


def own_state_is_readable(engines: Engines) -> bool:
    for engine in (engines.stage1, engines.stage2, engines.stage3):
        self_test(engine)
    return True


def stage3_state_is_in_flat_groups(engines: Engines) -> bool:
    optimizer, parameter = engines.stage3.optimizer, engines.stage3.module.trained
    (fragment,) = fragments(engines.stage3)
    flat = optimizer.fp32_partitioned_groups_flat[0]
    moment = optimizer._get_fp32_opt_state_partition(parameter, True, optim_state_key="exp_avg")[0]
    same = moment.data_ptr() == optimizer.optimizer.state[flat]["exp_avg"].data_ptr()
    return same and fragment.tensors["fp32"].data_ptr() == flat.data_ptr()


def stage2_state_is_in_flat_groups(engines: Engines) -> bool:
    optimizer, parameter = engines.stage2.optimizer, engines.stage2.module.trained
    (fragment,) = fragments(engines.stage2)
    address = parameter._hp_mapping.lp_fragment_address
    flat = optimizer.single_partition_of_fp32_groups[0]
    assert (address.start, address.numel) == (0, 6) and fragment.tensors["fp32"].data_ptr() == flat.data_ptr()
    return fragment.tensors["exp_avg"].data_ptr() == optimizer.optimizer.state[flat]["exp_avg"].data_ptr()


def moments_are_linked_anew(engines: Engines) -> bool:
    engine = engines.stage1
    create_optimizer_state(engine)
    (before,) = fragments(engine)
    engine.optimizer.optimizer.state.clear()
    create_optimizer_state(engine)
    (after,) = fragments(engine)
    assert engine.optimizer._hp_optimizer_states_linked is True
    return (
        after.tensors["exp_avg"].data_ptr()
        == next(iter(engine.optimizer.optimizer.state.values()))["exp_avg"].data_ptr()
        != before.tensors["exp_avg"].data_ptr()
    )


def gradients_are_applied(engines: Engines) -> bool:
    for engine in (engines.stage1, engines.stage2, engines.stage3):
        steps, before = optimizer_step(engine), dict(gather_masters(engine))["trained"].clone()
        set_learning_rate(engine, 0.5)
        assert 0 < train(engine) < math.inf
        moved = (dict(gather_masters(engine))["trained"] - before).abs()
        assert 0.4 < float(moved.max()) < 0.6 and optimizer_step(engine) == steps + 1
    return True


def losses_are_summed(engines: Engines) -> bool:
    engine = engines.stage2
    set_learning_rate(engine, 0.0)
    once = train(engine)
    set_counters(engine, 0, 2, 1)
    engine.backward(engine(torch.ones(1, 5)), scale_wrt_gas=False)
    engine.step()
    twice = train(engine)
    set_counters(engine, 0, 1, 1)
    return math.isclose(twice, 2 * once, rel_tol=1e-5)


def overflows_lower_the_scale(engines: Engines) -> bool:
    engine = engines.fp16
    state = loss_scaler_state(engine)
    assert state is not None and seeks_loss_scale(engine) and not seeks_loss_scale(engines.stage1) and loss_scale(engines.stage1) is None
    engine.module.frozen.data.fill_(60_000.0)
    assert (loss_scale(engine), train(engine), loss_scale(engine)) == (2.0, math.inf, 1.0)
    with pytest.raises(NonFinite, match="even at the smallest loss scale"):
        train(engine)
    engine.optimizer.zero_grad()
    restore_loss_scaler(engine, state)
    return loss_scale(engine) == 2.0


def counters_decide_when_to_update(engines: Engines) -> bool:
    engine = engines.stage2
    set_counters(engine, 4, 2, 8)
    first, engine.micro_steps = engine.is_gradient_accumulation_boundary(), engine.micro_steps + 1
    second = engine.is_gradient_accumulation_boundary()
    assert engine.gradient_accumulation_steps() == engine.optimizer.gradient_accumulation_steps == 2
    assert (engine.global_steps, engine.global_samples) == (4, 32)
    set_counters(engine, 0, 1, 1)
    return (first, second) == (False, True)


def secondary_copies_are_dropped(engines: Engines) -> bool:
    optimizer = engines.stage3.optimizer
    optimizer.invalidate_secondary_tensor()
    return "ds_secondary_tensor = None" in inspect.getsource(type(optimizer).invalidate_secondary_tensor)


@dataclass(frozen=True)
class Need:
    """A feature of Lockstep, and what of DeepSpeed it stands on."""

    feature: str
    internals: str
    holds: Callable[[Engines], bool]


NEEDS = (
    Need("a start without torch's compiler", "runtime.compiler.compile, decorating runtime.zero.muon.original_muon", muon_is_not_compiled),
    Need("pods without a C++ compiler", "ops.__compatible_ops__, read before an operator is built", no_operator_is_built),
    Need(
        "refusing wrong training.deepspeed before a model is loaded",
        "get_zero_config(settings), get_float16_config(settings), which raise pydantic's ValidationError",
        wrong_settings_are_refused,
    ),
    Need("quantized weights with precision BF16", "CUDAQuantizer.dequantize(…, dtype)", quantizer_takes_a_format),
    Need("refusing FP16 where the device has none", "get_accelerator().is_fp16_supported()", fp16_depends_on_the_device),
    Need(
        "Stage1 in BF16 with gradients summed in FP32",
        "DeepSpeedEngine._do_optimizer_sanity_check, which answers BFLOAT16 or ZERO_OPTIMIZATION",
        stage1_has_zeros_optimizer,
    ),
    Need(
        "loading under Stage3 without sending the model",
        "Init._zero_init_param, replaced by Init._convert_to_deepspeed_param(parameter) and parameter.partition()",
        sharding_sends_nothing,
    ),
    Need(
        "loading sharded weights under Stage3",
        "a parameter's ds_id, ds_shape, ds_numel, ds_tensor (with its own ds_numel) and ds_zero_partition_rank",
        shards_are_flat_parts,
    ),
    Need("transformers' loader where shards are on disk or quantized", "ds_tensor.final_location, ds_quant_scale", marks_of_other_shards),
    Need(
        "loading the copies of hierarchicalPartition",
        "ds_secondary_tensor, groups._get_zero_param_intra_parallel_rank_in_mygroup()",
        node_rank_is_asked_without_arguments,
    ),
    Need("lora.initFrom under Stage3", "GatheredParameters(parameter, modifier_rank=0)", rank_0s_values_are_kept),
    Need("adapters of stacks of experts under Stage3", "set_z3_leaf_module(module, True)", a_module_is_gathered_as_one),
    Need(
        "the check of hierarchicalPartition's copies at start",
        "ds_status, ZeroParamStatus.NOT_AVAILABLE, parameter.all_gather_coalesced(parameters).wait(), partition()",
        a_module_is_gathered_by_hand,
    ),
    Need(
        "commits, in every stage",
        "safe_get_full_fp32_param, safe_get_full_optimizer_state, and all that zero_access reads",
        own_state_is_readable,
    ),
    Need(
        "commits under Stage3",
        "optimizer.fp32_partitioned_groups_flat, _get_fp32_opt_state_partition(parameter, True, optim_state_key)[0]",
        stage3_state_is_in_flat_groups,
    ),
    Need(
        "commits under Stage1 and Stage2",
        "optimizer.single_partition_of_fp32_groups, parameter._hp_mapping with lp_fragment_address and get_hp_fragment(key)",
        stage2_state_is_in_flat_groups,
    ),
    Need(
        "resuming under Stage1 and Stage2",
        "optimizer._lazy_init_hp_params_optimizer_state() after _hp_optimizer_states_linked = False",
        moments_are_linked_anew,
    ),
    Need(
        "a step's learning rate, update and norm",
        "engine.get_global_grad_norm(), optimizer.param_groups, optimizer.overflow",
        gradients_are_applied,
    ),
    Need("a loss over all learned tokens", "engine.backward(loss, scale_wrt_gas=False)", losses_are_summed),
    Need(
        "FP16: its loss scale, and resuming it",
        "optimizer.loss_scaler (cur_scale, cur_iter, last_overflow_iter, cur_hysteresis, dynamic), loss_scale, fp16_enabled(), `loss scale"
        " already at minimum`",
        overflows_lower_the_scale,
    ),
    Need(
        "accumulation that changes during a run",
        "engine._config.gradient_accumulation_steps, global_steps, global_samples, micro_steps",
        counters_decide_when_to_update,
    ),
    Need("resuming with hierarchicalPartition", "optimizer.invalidate_secondary_tensor()", secondary_copies_are_dropped),
)


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.holds.__name__)
def test_deepspeed_has_what_a_feature_stands_on(engines: Engines, need: Need) -> None:
    problem: object = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            holds = need.holds(engines)
    except (Exception, pytest.fail.Exception) as error:  # whatever another version of DeepSpeed does
        holds, problem = False, error
    assert holds, f"DeepSpeed {version('deepspeed')} breaks {need.feature}, which uses {need.internals}: {problem!r}"


def internals_of(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yield the names that come from DeepSpeed or that it keeps to itself: imported, on a parameter, or private of an object that isn't
    ours.
    """
    for tree in trees.values():
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if module.startswith("deepspeed"):
                    yield from (alias.name for alias in names)
                case ast.Attribute(value=ast.Name(id=owner), attr=name) if re.fullmatch("_[a-z]\\w+", name) and owner != "self":
                    yield name
                case ast.Attribute(attr=str(name)) | ast.Constant(value=str(name)) if re.fullmatch(r"ds_\w+|__compatible_ops__", name):
                    yield name


def test_every_internal_that_the_room_uses_has_a_feature() -> None:
    used = set(internals_of({path.name: ast.parse(path.read_text(encoding="utf-8")) for path in ROOM.glob("*.py")}))
    named = {word for need in NEEDS for word in re.findall(r"\w+", need.internals)}
    assert {"ds_tensor", "_config", "Init", "_hp_mapping"} <= used
    assert used - named == set()
