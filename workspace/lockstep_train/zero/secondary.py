"""Check at start that the second copy of the weights, which the ranks of a node share (ZeRO++ hpZ), is that of the weights.

Runs with such copies have trained on wrong weights, silently, with a loss that only looked bad. A second forward pass without
the copies would show it, but would send the whole model between the nodes, which is what the copies are there to avoid. Instead
every weight is gathered once as a forward pass gathers it, within the node, and its fingerprint compared with that of
the first copy, which all ranks add up in one all-reduce of 8 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from lockstep_train.base.errors import TrainerError
from lockstep_train.zero.parameters import own_values, shards

CHUNK = 1 << 22
"""Elements fingerprinted at a time: they are widened to 64 bits."""
WEIGHTS = 65_521
"""A prime: no power of two that a shifted range could hide in."""


@torch.no_grad()
def check_secondary_shards(model: torch.nn.Module) -> None:
    """Compare the copies with the weights. A collective. Raises TrainerError, on every rank, where a frozen weight as gathered within a
    node is not the weight.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if _copied(parameter)}
    if not names:
        return
    order = {parameter: index for index, parameter in enumerate(names)}
    device = own_values(next(iter(names))).device
    expected = torch.zeros(len(names), dtype=torch.int64, device=device)
    for parameter, index in order.items():
        shard, start, numel = next(shards(parameter))
        expected[index] = fingerprint(shard[:numel], start)
    dist.all_reduce(expected)
    wrong = torch.zeros_like(expected)
    for parameters in _modules(model):
        for parameter, value in _gathered(parameters):
            wrong[order[parameter]] = (fingerprint(value.flatten(), 0) != expected[order[parameter]]).long()
    dist.all_reduce(wrong)
    bad = [name for parameter, name in names.items() if wrong[order[parameter]] > 0]
    if bad:
        raise TrainerError(
            f"{len(bad)} weights differ between the copy that the ranks of a node share and the weights themselves ({bad[0]} is the first);"
            " set training.hierarchicalPartition to None"
        )


def fingerprint(values: torch.Tensor, start: int) -> torch.Tensor:
    """Fingerprint of a flat range that begins at element `start` of a tensor; those of ranges that cover it add up to that of the whole.

    A sum of the elements' bits, each times its place, modulo 2⁶⁴: exact, whatever the order of the additions.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    bits = values.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    for offset in range(0, bits.numel(), CHUNK):
        chunk = bits[offset : offset + CHUNK].long()
        places = torch.arange(start + offset, start + offset + chunk.numel(), device=values.device) % WEIGHTS + 1
        total += (chunk * places).sum()
    return total


def _copied(parameter: Any) -> bool:
    """Return True for a weight that is frozen, sharded, and has a copy: copies of trained weights are dropped before each update."""
    return not parameter.requires_grad and getattr(parameter, "ds_secondary_tensor", None) is not None


def _modules(model: torch.nn.Module) -> Iterator[list[Any]]:
    """The copied parameters of each module, once: a forward pass gathers module by module."""
    seen: set[Any] = set()
    for module in model.modules():
        parameters = [parameter for parameter in module.parameters(recurse=False) if _copied(parameter) and parameter not in seen]
        seen.update(parameters)
        if parameters:
            yield parameters


def _gathered(parameters: list[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    absent = [parameter for parameter in parameters if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE]
    if absent:
        absent[0].all_gather_coalesced(absent).wait()
    for parameter in parameters:
        yield parameter, parameter.data
    for parameter in absent:
        parameter.partition()
