"""Weight files of a base model with a training merged into them, tensor by tensor, on a CPU.

W + scale · B · A is computed in FP32 and cast to the base's dtype. The files, names and dtypes are the base's; what is in memory is a
block of rows of one tensor, and the two factors that change it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lockstep_spec.choices import Precision
from lockstep_spec.files import write_durably
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.limits import Say
from lockstep_train.checkpoint.format.manifest import Manifest
from lockstep_train.checkpoint.format.shards import ShardReader
from lockstep_train.model.layouts import TensorLayout
from lockstep_train.model.stored import INDEX, StoredTensor, weight_paths
from lockstep_train.model.trained import adapter_names, tensor_differences
from lockstep_train.model.updates import (
    Read,
    ReadRange,
    Skeleton,
    Update,
    adapter_updates,
    build_skeleton,
    refusing_others,
    trained_updates,
    wrapped,
)
from lockstep_train.model.weight_files import DTYPES, PRECISIONS, NewTensor, WeightReader, write_tensors
from lockstep_train.zero.kinds import MASTER

BLOCK_ELEMENTS = 8 << 20
KEPT_FACTORS = 8
"""Trained parameters kept in memory: those of two neighboring tensors at least."""


@dataclass(frozen=True)
class TargetRange:
    """Elements [start, start + numel) of a stored tensor are the model's `target` from `first` on."""

    start: int
    numel: int
    target: str
    first: int


class Merger:
    """Computation of the tensors of the merged model's files."""

    def __init__(
        self, layouts: Mapping[str, TensorLayout], added: Mapping[str, TensorLayout], updates: Mapping[str, Update], stored: WeightReader
    ) -> None:
        """`added`: tensors that the base's files lack, by what they start from; they change no stored tensor."""
        self._layouts = {**layouts, **added}
        self._updates = updates
        self._stored = stored
        self._parts: dict[str, list[TargetRange]] = {}
        for target in updates.keys() - added.keys():
            first = 0
            for piece in layouts[target].pieces:
                self._parts.setdefault(piece.name, []).append(TargetRange(piece.start, piece.numel, target, first))
                first += piece.numel

    @property
    def changed(self) -> set[str]:
        """Stored tensors that training changed."""
        return set(self._parts)

    def tensor(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a stored tensor's elements, flattened, block by block, in the dtype it is stored in."""
        stored = self._stored.tensors[name]
        done = 0
        for part in sorted(self._parts.get(name, []), key=lambda part: part.start):
            yield from self._copied(name, done, part.start - done)
            yield from self.merged(part.target, part.first, part.numel, DTYPES[stored.dtype])
            done = part.start + part.numel
        yield from self._copied(name, done, torch.Size(stored.shape).numel() - done)

    def _copied(self, name: str, start: int, numel: int) -> Iterator[torch.Tensor]:
        for offset in range(0, numel, BLOCK_ELEMENTS):
            block = torch.empty(min(BLOCK_ELEMENTS, numel - offset), dtype=DTYPES[self._stored.tensors[name].dtype])
            self._stored.read(name, start + offset, block)
            yield block

    def merged(self, target: str, start: int, numel: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield elements [start, start + numel) of one of the model's tensors that training may have changed."""
        layout = self._layouts[target]
        width = layout.shape[-1] if layout.shape else 1
        step = max(1, BLOCK_ELEMENTS // width)
        end = start + numel
        for row in range(start // width, -(-end // width), step):
            rows = min(step, -(-end // width) - row)
            values = self._rows(target, row, rows, width).view(-1)
            yield values[max(0, start - row * width) : end - row * width].to(dtype)

    def _rows(self, target: str, first: int, count: int, width: int) -> torch.Tensor:
        def base() -> torch.Tensor:
            values, done = torch.empty(count * width), 0
            for piece in self._layouts[target].cut(first * width, count * width):
                self._stored.read(piece.name, piece.start, values[done : done + piece.numel])
                done += piece.numel
            return values.view(count, width)

        update = self._updates.get(target)
        return base() if update is None else update.rows(first, count, base)


@dataclass(frozen=True)
class Untied:
    """Tensors that were one and no longer are: `layouts` of those that the files lack, by their new names."""

    layouts: Mapping[str, TensorLayout]
    any: bool


def untie(model: Skeleton, updates: Mapping[str, Update]) -> Untied:
    """Untie tensors: an adapter on one of two tied tensors changes only that one, so the merged model must have both."""
    apart = {name: source for name, source in model.tied.items() if {name, source} & updates.keys()}
    return Untied({name: model.layouts[source] for name, source in apart.items() if name not in model.layouts}, bool(apart))


def write_merged(
    base: Path, output: Path, tensors: dict[str, StoredTensor], updates_of: Callable[[Skeleton], dict[str, Update]], *, full: bool, say: Say
) -> tuple[int, bool]:
    """Write the weight files; how many stored tensors changed, and whether tied ones came apart. `full`: all of the model was trained, so
    tied tensors stay one.
    """
    model = build_skeleton(base, tensors)
    updates = updates_of(model)
    untied = Untied({}, False) if full else untie(model, updates)
    with WeightReader(tensors) as stored:
        merger = Merger(model.layouts, untied.layouts, updates, stored)
        _write_files(base, output, tensors, merger, untied.layouts, say)
        return len(merger.changed) + len(untied.layouts), untied.any


def updates_of_commit(model: Skeleton, manifest: Manifest, shards: Sequence[Path]) -> dict[str, Update]:
    """Return the updates of a commit, from shards that were checked. Raises as `trained_updates`."""
    reader = ShardReader(shards[0].parent, manifest, shards)
    return trained_updates(model, manifest.adapter, *_readers(reader, PRECISIONS[Precision(manifest.precision)]))


def updates_of_adapter(model: Skeleton, config: Mapping[str, Any], tensors: dict[str, StoredTensor], adapter: Path) -> dict[str, Update]:
    """Return the updates of a PEFT adapter's files, named as PEFT names them. Raises ConfigError for tensors that are not those which PEFT
    makes of this base model.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.model.state_dict().items()}
    peft = wrapped(model.model, config, f"the adapter {adapter}")
    names = adapter_names(peft)
    own = {names[name]: tuple(parameter.shape) for name, parameter in peft.named_parameters() if name in names}
    if problems := tensor_differences({name: tensor.shape for name, tensor in tensors.items()}, own):
        raise ConfigError(
            f"the adapter {adapter} doesn't fit this base model: {problems[0]}; name the model that it was trained on with --base"
        )
    return refusing_others(dict(adapter_updates(peft, shapes, *_file_readers(tensors, names))), names)


def _file_readers(tensors: dict[str, StoredTensor], names: Mapping[str, str]) -> tuple[Read, ReadRange]:
    """Return readers of an adapter's file. `names`: parameter → tensor."""
    stored = WeightReader(tensors)

    def read_range(name: str, start: int, numel: int) -> torch.Tensor:
        values = torch.empty(numel)
        stored.read(names[name], start, values)
        return values

    @lru_cache(maxsize=KEPT_FACTORS)
    def read(name: str) -> torch.Tensor:
        shape = torch.Size(tensors[names[name]].shape)
        return read_range(name, 0, shape.numel()).view(shape)

    return read, read_range


def _readers(shards: ShardReader, dtype: torch.dtype) -> tuple[Any, Any]:
    """Readers of the trained parameters as the live model computes with them: rounded to the run's precision."""

    def read_range(name: str, start: int, numel: int) -> torch.Tensor:
        return shards.read(name, MASTER, start, numel).to(dtype).float()

    @lru_cache(maxsize=KEPT_FACTORS)
    def read(name: str) -> torch.Tensor:
        return shards.read(name, MASTER).to(dtype).float().view(shards.shapes[name])

    return read, read_range


def _write_files(
    folder: Path,
    output: Path,
    tensors: Mapping[str, StoredTensor],
    merger: Merger,
    added: Mapping[str, TensorLayout],
    say: Say,
) -> None:
    """Write every weight file under its name; tensors that the base didn't need come last in the last one."""
    files = weight_paths(folder)
    for number, file in enumerate(files, 1):
        say(f"writing {output / file.name}, file {number} of {len(files)}")
        here = sorted((tensor for tensor in tensors.items() if tensor[1].file == file), key=lambda item: item[1].offset)
        new = [NewTensor(name, tensor.dtype, tensor.shape) for name, tensor in here]
        extra = (
            [NewTensor(name, tensors[layout.pieces[0].name].dtype, layout.shape) for name, layout in added.items()]
            if file == files[-1]
            else []
        )

        def values(new: list[NewTensor] = new, extra: list[NewTensor] = extra) -> Iterator[torch.Tensor]:
            for tensor in new:
                yield from merger.tensor(tensor.name)
            for tensor in extra:
                yield from merger.merged(tensor.name, 0, torch.Size(tensor.shape).numel(), DTYPES[tensor.dtype])

        write_tensors(output / file.name, [*new, *extra], values(), {"format": "pt"})
    if ((folder / INDEX).is_file() and len(files) > 1) or files[0].name not in {"model.safetensors"}:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(added, files[-1].name)
        write_durably(output / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())
