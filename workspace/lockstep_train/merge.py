"""Make a full model folder from a commit's shards and the base model, on a CPU, tensor by tensor:

python -m lockstep_train.merge runs/my-job --output merged

W + scale · B · A is computed in FP32 and cast to the base's dtype. The files, names and dtypes are the base's; what is in memory is a
block of rows of one tensor, and the two factors that change it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lockstep_spec.choices import Precision
from lockstep_spec.files import make_directory, write_durably
from lockstep_train.base.errors import ConfigError, TrainerError, print_problem
from lockstep_train.base.limits import Say
from lockstep_train.checkpoint.commits import newest_whole
from lockstep_train.checkpoint.format.manifest import Manifest
from lockstep_train.checkpoint.format.shards import ShardReader
from lockstep_train.model.base_files import refuse_other_base
from lockstep_train.model.layouts import TensorLayout
from lockstep_train.model.load import base_digest
from lockstep_train.model.updates import Skeleton, Update, build_skeleton, trained_updates
from lockstep_train.model.weight_files import (
    CONFIG,
    DTYPES,
    INDEX,
    PRECISIONS,
    NewTensor,
    StoredTensor,
    WeightReader,
    copy_others,
    read_headers,
    weight_paths,
    write_tensors,
)
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


def untie(model: Skeleton, updates: Mapping[str, Update], adapter: Mapping[str, Any]) -> Untied:
    """Untie tensors: an adapter on one of two tied tensors changes only that one, so the merged model must have both. Trained whole, they
    stay one.
    """
    apart = {} if adapter["config"] is None else {name: source for name, source in model.tied.items() if {name, source} & updates.keys()}
    return Untied({name: model.layouts[source] for name, source in apart.items() if name not in model.layouts}, bool(apart))


def merge(paths: Sequence[Path], output: Path, base: Path | None = None, say: Say = lambda line: None) -> tuple[Manifest, int]:
    """Merge the newest whole commit in `paths`; its manifest, and how many stored tensors changed. `say` hears what it is at.

    Raises ConfigError when there is none, when `base` (default: where the run had it) is another model or can't be merged into,
    and when `output` holds something.
    """
    commit, manifest, shards = newest_whole(paths, "merge")
    folder = base or Path(manifest.base_model)
    say(f"reading {folder}, to compare it with the base model of step {manifest.step}")
    _refuse_another_base(folder, manifest)
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; give a new folder")
    with commit.held("merge"):
        changed = _write_model(folder, output, manifest, ShardReader(shards[0].parent, manifest, shards), say)
    return manifest, changed


def _refuse_another_base(folder: Path, manifest: Manifest) -> None:
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no {CONFIG}; say where the base model {Path(manifest.base_model).name} is with --base")
    trained, remedy = f"step {manifest.step}", f"give that one with --base (the run had it at {manifest.base_model})"
    if manifest.identity.base_files:
        refuse_other_base(folder, manifest.identity.base_files, trained, remedy)
    elif base_digest(folder) != manifest.identity.base:
        raise ConfigError(f"{folder} is not the base model that {trained} was trained on: its {CONFIG} or weights differ; {remedy}")


def _write_model(folder: Path, output: Path, manifest: Manifest, shards: ShardReader, say: Say) -> int:
    tensors = read_headers(weight_paths(folder))
    if not tensors:
        raise ConfigError(f"{folder} has no safetensors weights; convert the base model to safetensors first")
    model = build_skeleton(folder, tensors)
    updates = trained_updates(model, manifest.adapter, *_readers(shards, PRECISIONS[Precision(manifest.precision)]))
    untied = untie(model, updates, manifest.adapter)
    make_directory(output)
    with WeightReader(tensors) as stored:
        merger = Merger(model.layouts, untied.layouts, updates, stored)
        _write_files(folder, output, tensors, merger, untied.layouts, say)
        changed = len(merger.changed) + len(untied.layouts)
    copy_others(folder, output)
    config = json.loads((folder / CONFIG).read_text())
    if untied.any:
        config["tie_word_embeddings"] = False
    write_durably(output / CONFIG, json.dumps(config, indent=2).encode())  # last: without it, a folder is no model
    return changed


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_train.merge",
        description="Make a full model folder from a checkpoint's shards and the base model, on a CPU.",
    )
    parser.add_argument("source", type=Path, nargs="+", help="a run's folder, or one step-N.aM folder; several where shards are spread")
    parser.add_argument("--output", type=Path, required=True, help="the model's folder: a new or an empty one")
    parser.add_argument("--base", type=Path, help="the base model's folder (default: where the run had it)")
    options = parser.parse_args(arguments)
    try:
        manifest, changed = merge(options.source, options.output, options.base, lambda line: print(line, file=sys.stderr, flush=True))
    except (TrainerError, OSError) as error:
        return print_problem(error)
    print(f"Merged step {manifest.step} (attempt {manifest.attempt}) into {options.output}: {changed} tensors changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
