"""Parameters as Stage3 shards them: each keeps its true shape and this rank's part of its elements, flattened, beside an empty tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from lockstep_train.base.imports import replaced

if TYPE_CHECKING:
    import torch


def is_sharded(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Any) -> tuple[int, ...]:
    """Return the true shape of a parameter, sharded or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def own_values(parameter: Any) -> torch.Tensor:
    """Return the values that this rank has of a parameter, whole or sharded."""
    return cast("torch.Tensor", getattr(parameter, "ds_tensor", parameter))


def shards(parameter: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield this rank's shard of a sharded parameter, with hpZ also its node's: flat, with padding; its first element; how many are no
    padding.
    """
    parts = [(parameter.ds_tensor, parameter.ds_zero_partition_rank)]
    if parameter.ds_secondary_tensor is not None:
        from deepspeed.utils import groups

        parts.append((parameter.ds_secondary_tensor, groups._get_zero_param_intra_parallel_rank_in_mygroup()))
    for shard, index in parts:
        start = min(shard.ds_numel * index, parameter.ds_numel)
        yield shard, start, min(shard.ds_numel, parameter.ds_numel - start)


def is_plain(shard: Any) -> bool:
    """Return False for a shard that DeepSpeed keeps on disk, or quantized."""
    return getattr(shard, "final_location", None) is None and not hasattr(shard, "ds_quant_scale")


@contextlib.contextmanager
def sharding_empty() -> Iterator[None]:
    """Let zero.Init shard new parameters without the broadcast meanwhile: what would be sent is uninitialized memory."""
    from deepspeed.runtime.zero.partition_parameters import Init

    with replaced(Init, "_zero_init_param", _shard_empty):
        yield


def _shard_empty(init: Any, parameter: Any) -> None:
    init._convert_to_deepspeed_param(parameter)
    parameter.partition()


def gather_as_one(module: torch.nn.Module) -> None:
    """Let Stage3 gather all parameters below a module before its forward pass, and follow none of the modules within."""
    from deepspeed.utils import set_z3_leaf_module

    set_z3_leaf_module(module, True)


def set_values(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Copy values that every rank has into a parameter; a collective where it is sharded."""
    import torch

    with torch.no_grad():
        if not is_sharded(parameter):
            parameter.copy_(value)
            return
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(parameter, modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                parameter.copy_(value)
