"""Updates: which tensors of a base model a run trained, how, and their new values, a block of rows at a time, in FP32.

Which ones is asked of transformers and peft, on a model without memory. A tensor of any number of dimensions is taken as rows of its last
one, [rows, width].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep_train.base.errors import ConfigError, reason_of, refusal
from lockstep_train.base.imports import import_peft
from lockstep_train.model.layouts import TensorLayout, Unfitting, model_layouts
from lockstep_train.model.load import empty_model, quiet_transformers
from lockstep_train.model.stored import StoredTensor

PREFIX = "base_model.model."
ADAPTER = "default"
Base = Callable[[], torch.Tensor]
"""The same rows of the base model, [count, width], in FP32; called only where they are needed."""
Read = Callable[[str], torch.Tensor]
"""A trained parameter by its name, whole, as the live model computes with it, in FP32."""
ReadRange = Callable[[str, int, int], torch.Tensor]
"""Elements [start, start + numel) of one, flattened."""


@dataclass(frozen=True)
class Replaced:
    """A tensor that was trained whole, of `width` elements a row."""

    parameter: str
    width: int
    read_range: ReadRange

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.parameter,)

    def rows(self, first: int, count: int, base: Base) -> torch.Tensor:
        return self.read_range(self.parameter, first * self.width, count * self.width).view(count, self.width)


@dataclass(frozen=True)
class LowRank:
    """Low-rank update W + scale · B · A, of lora_A [rank, in] and lora_B [out, rank]; an embedding's factors have other names and W is
    transposed.
    """

    a: str
    b: str
    scale: float
    read: Read
    transposed: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.a, self.b)

    def rows(self, first: int, count: int, base: Base) -> torch.Tensor:
        a, b = self.read(self.a), self.read(self.b)
        left, right = (a.T, b.T) if self.transposed else (b, a)
        return base() + self.scale * (left[first : first + count] @ right)


@dataclass(frozen=True)
class Decomposed:
    """DoRA update: every row of W + scale · B · A, stretched to its magnitude."""

    low_rank: LowRank
    magnitude: str

    @property
    def parameters(self) -> tuple[str, ...]:
        return (*self.low_rank.parameters, self.magnitude)

    def rows(self, first: int, count: int, base: Base) -> torch.Tensor:
        direction = self.low_rank.rows(first, count, base)
        magnitude = self.low_rank.read(self.magnitude).view(-1)[first : first + count]
        stretched: torch.Tensor = direction * (magnitude / torch.linalg.vector_norm(direction, dim=1)).unsqueeze(1)
        return stretched


@dataclass(frozen=True)
class Experts:
    """Update of all experts' weights in one tensor [experts, out, in], or [experts, in, out] (`transposed`).

    The factors are laid out unalike: lora_A [experts · rank, in] has the expert slowest, lora_B [out, rank · experts] fastest.
    """

    a: str
    b: str
    scale: float
    experts: int
    out_features: int
    in_features: int
    transposed: bool
    read: Read

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.a, self.b)

    def rows(self, first: int, count: int, base: Base) -> torch.Tensor:
        a = self.read(self.a).view(self.experts, -1, self.in_features)
        b = self.read(self.b).view(self.out_features, -1, self.experts)
        values = base()
        height = self.in_features if self.transposed else self.out_features
        done = 0
        while done < count:
            expert, row = divmod(first + done, height)
            taken = min(count - done, height - row)
            left, right = (a[expert].T, b[:, :, expert].T) if self.transposed else (b[:, :, expert], a[expert])
            values[done : done + taken] += self.scale * (left[row : row + taken] @ right)
            done += taken
        return values


Update = Replaced | LowRank | Decomposed | Experts
"""Update of a tensor: `parameters` are the trained ones that it comes from, `rows` returns rows [first, first + count) of the new values,
as [count, width].
"""


@dataclass(frozen=True)
class Skeleton:
    """A base model on torch's meta device, and how its tensors lie in its files."""

    model: Any
    layouts: Mapping[str, TensorLayout]
    """Layouts by the model's names; tied tensors only where the files have them."""
    tied: Mapping[str, str]
    """Tensor → the one that it shares its memory with."""


def build_skeleton(base: Path, tensors: Mapping[str, StoredTensor]) -> Skeleton:
    """Build a skeleton. Raises ConfigError for a model that transformers doesn't know, or whose files can't be taken apart range by
    range.
    """
    quiet_transformers()
    from transformers.conversion_mapping import get_model_conversion_mapping

    try:
        model = empty_model(base)
        layouts, _ = model_layouts(model, get_model_conversion_mapping(model), tensors)
    except Unfitting as error:
        raise ConfigError(f"{base} can't be merged into: {error}; give a folder with unquantized safetensors weights") from error
    except Exception as error:  # also ImportError, KeyError and errors of its own: whatever a config.json leads to
        raise refusal(f"{base} can't be built as a causal language model: {reason_of(error)}", error) from error
    return Skeleton(model, layouts, dict(getattr(model, "all_tied_weights_keys", None) or {}))


def trained_updates(base: Skeleton, adapter: Mapping[str, Any], read: Read, read_range: ReadRange) -> dict[str, Update]:
    """Updates of each tensor that was trained, by the model's names. `adapter` is the manifest's. Raises ConfigError for a parameter that
    nothing here knows how to merge."""
    shapes = {name: tuple(tensor.shape) for name, tensor in base.model.state_dict().items()}
    names, config = adapter["names"], adapter["config"]
    if config is not None:
        return refusing_others(dict(adapter_updates(wrapped(base.model, config, "this adapter"), shapes, read, read_range)), names)
    updates: dict[str, Update] = {name: Replaced(name, _width(shapes[name]), read_range) for name in names if name in shapes}
    return refusing_others(updates, names)


def refusing_others(updates: dict[str, Update], names: Collection[str]) -> dict[str, Update]:
    """Return the updates. Raises ConfigError unless they come from all of the trained parameters `names`."""
    merged = {parameter for update in updates.values() for parameter in update.parameters}
    left = sorted(set(names) - merged)
    if left:
        raise ConfigError(f"{left[0]} can't be merged ({len(left)} such parameters): load the exported adapter with peft instead")
    return updates


def _width(shape: tuple[int, ...]) -> int:
    return shape[-1] if shape else 1


def wrapped(model: Any, config: Mapping[str, Any], adapter: str) -> Any:
    """Return the model with an adapter as PEFT makes it, without memory. Raises ConfigError where PEFT finds no place for it."""
    peft = import_peft()
    settings = peft.PeftConfig.from_peft_type(**{**config, "inference_mode": False})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied embeddings: they are taken apart where it matters
        try:
            return peft.get_peft_model(model, settings, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
        except ValueError as error:
            raise ConfigError(f"{adapter} doesn't fit this base model: {reason_of(error)}; name the one that it was trained on") from error


def adapter_updates(wrapped: Any, shapes: Mapping[str, tuple[int, ...]], read: Read, read_range: ReadRange) -> Iterator[tuple[str, Update]]:
    """Yield the tensors that an adapter trains, with their updates. `shapes`: those of the base model's tensors, by name."""
    from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper
    from peft.utils.other import ModulesToSaveWrapper

    for path, module in wrapped.named_modules():
        target = path.removeprefix(PREFIX).replace(".base_layer", "")
        if isinstance(module, ModulesToSaveWrapper):
            for name, _ in module.modules_to_save[ADAPTER].named_parameters():
                full = f"{target}.{name}"
                yield full, Replaced(f"{path}.modules_to_save.{ADAPTER}.{name}", _width(shapes[full]), read_range)
        elif isinstance(module, ParamWrapper):
            yield f"{target}.{module.parameter_name}", _parameter_update(path, module, read)
        elif isinstance(module, Embedding) and ADAPTER in module.lora_embedding_A:
            a, b = (f"{path}.lora_embedding_{letter}.{ADAPTER}" for letter in "AB")
            yield f"{target}.weight", LowRank(a, b, module.scaling[ADAPTER], read, transposed=True)
        elif isinstance(module, Linear) and not (module.fan_in_fan_out and module.use_dora[ADAPTER]):
            yield f"{target}.weight", _linear_update(path, module, read)


def _factors(path: str) -> tuple[str, str]:
    return f"{path}.lora_A.{ADAPTER}.weight", f"{path}.lora_B.{ADAPTER}.weight"


def _linear_update(path: str, module: Any, read: Read) -> Update:
    low_rank = LowRank(*_factors(path), module.scaling[ADAPTER], read, transposed=module.fan_in_fan_out)
    if not module.use_dora[ADAPTER]:
        return low_rank
    return Decomposed(low_rank, f"{path}.lora_magnitude_vector.{ADAPTER}.weight")


def _parameter_update(path: str, module: Any, read: Read) -> Update:
    """Update of a parameter. peft swaps its in and out features where a module stores [experts, out, in]; it has kept note of that."""
    scale = module.scaling[ADAPTER]
    if module.num_experts == 1:
        return LowRank(*_factors(path), scale, read)
    transposed = not module._did_swap_in_out_features
    return Experts(*_factors(path), scale, module.num_experts, module.out_features, module.in_features, transposed, read)
