"""Write what training leaves: a PEFT adapter's folder, or after full fine-tuning a whole model's. An adapter can also be made from a
commit's shards, on a CPU, without the base model (proof/__main__.py).

A whole model is what transformers loads, written layer by layer. Its tensors get the names and the layout of the base model's own files, by
transformers' rules, so that whatever reads the base (other trainers, inference servers) reads this too. What the training has no part in is
copied: buffers, tensors that transformers leaves alone, the tokenizer.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep_spec.choices import Precision
from lockstep_spec.files import make_directory, sync_directory, write_durably
from lockstep_train.base.errors import ConfigError, reason_of, refusal
from lockstep_train.card import kept_tokenizers, make_whole, provenance_of
from lockstep_train.checkpoint.commits import newest_whole
from lockstep_train.checkpoint.format.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from lockstep_train.checkpoint.format.manifest import Manifest
from lockstep_train.checkpoint.format.shards import ShardReader
from lockstep_train.model.base_files import RECORD, encode_record
from lockstep_train.model.load import empty_model
from lockstep_train.model.stored import CONFIG, INDEX, SINGLE, copy_others, weight_paths
from lockstep_train.model.weight_files import NAMES, PRECISIONS, NewTensor, library_order, write_tensors
from lockstep_train.zero.kinds import MASTER

SHARD_BYTES = 5 * 10**9
TEMPORARY = ".model.{}.tmp"
LAYER = re.compile(r"^(.*?\.\d+)\.")


def write_model(folder: Path, base: Path, tensors: Iterable[tuple[str, torch.Tensor]], precision: str) -> None:
    """Write the model to `folder`. `tensors`: each parameter's name and FP32 values, in the model's order; one layer at a time
    is held, and one file. Raises ConfigError when the base model's folder is gone."""
    dtype = PRECISIONS[Precision(precision)]
    skeleton = _skeleton(base)
    make_directory(folder)
    for abandoned in folder.glob(TEMPORARY.format("*")):  # by an export that was killed: as large as the model
        abandoned.unlink(missing_ok=True)
    files = WeightFiles(folder)
    for layer in by_layer(tensors):
        for name, tensor in stored_tensors(skeleton, {name: value.to(dtype) for name, value in layer}).items():
            files.add(name, tensor)
    for name, tensor in untrained_tensors(base, files.written | set(skeleton.all_tied_weights_keys)):
        files.add(name, tensor)
    copy_rest(base, folder, str(dtype).removeprefix("torch."))
    files.finish()


def _skeleton(base: Path) -> Any:
    """Build the model without memory: transformers' rules depend on it."""
    try:
        return empty_model(base)
    except Exception as error:  # also ImportError, KeyError and errors of its own: whatever a config.json leads to
        raise refusal(
            f"{base} is the base model of this run, but it can't be read ({reason_of(error)}); its {CONFIG} and tokenizer are needed", error
        ) from error


def by_layer(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Group neighbors of one layer, because some layouts join several of its tensors."""

    def layer(item: tuple[str, torch.Tensor]) -> str:
        match = LAYER.match(item[0])
        return match.group(1) if match else item[0]

    for _, group in itertools.groupby(tensors, layer):
        yield list(group)


def stored_tensors(skeleton: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert tensors to what the base model's files have: fused experts one by one, older names."""
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, torch.Tensor] = revert_weight_conversion(skeleton, tensors)
    return stored


def untrained_tensors(base: Path, written: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of the base that are not in `written`, as they are, from the files that transformers reads: a folder may hold the same
    weights once more in another library's files and names, such as Mistral's consolidated.safetensors.
    """
    from safetensors import safe_open

    for path in weight_paths(base):
        with safe_open(path, "pt") as file:
            for name in sorted(set(file.keys()) - written):
                yield name, file.get_tensor(name)


def copy_rest(base: Path, folder: Path, dtype: str) -> None:
    """Copy config.json with the new number format, and every file that holds no weights."""
    copy_others(base, folder)
    config: dict[str, Any] = json.loads((base / CONFIG).read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}
    write_durably(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True).encode())


class WeightFiles:
    """Weight files, written whenever one is full. Their final names say how many there are, so they come last."""

    def __init__(self, folder: Path) -> None:
        self.written: set[str] = set()
        self._folder = folder
        self._pending: dict[str, torch.Tensor] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        pending_bytes = sum(value.numel() * value.element_size() for value in self._pending.values())
        if self._pending and pending_bytes + size > SHARD_BYTES:
            self._write()
        self._pending[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)  # a view would keep its whole stack
        self.written.add(name)
        self._total += size

    def _write(self) -> None:
        from safetensors.torch import save_file

        path = self._folder / TEMPORARY.format(secrets.token_hex(8))
        path.touch()
        usual = path.stat().st_mode
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(usual)  # safetensors writes for its own user only
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self._files.append((path, list(self._pending)))
        self._pending = {}

    def finish(self) -> None:
        """Give the files their names and write the index; what an earlier export left goes."""
        self._write()
        count = len(self._files)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE for number in range(1, count + 1)]
        weight_map: Mapping[str, str] = {tensor: name for name, (_, tensors) in zip(names, self._files, strict=True) for tensor in tensors}
        for name, (path, _) in zip(names, self._files, strict=True):
            path.replace(self._folder / name)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
            write_durably(self._folder / INDEX, json.dumps(index, indent=2).encode())
        for stale in self._folder.glob("model*.safetensors*"):
            if stale.name not in {*names, INDEX} or (count == 1 and stale.name.endswith(".json")):
                stale.unlink(missing_ok=True)
        sync_directory(self._folder)


def write_adapter(
    folder: Path, masters: Mapping[str, torch.Tensor], adapter: Mapping[str, Any], precision: str, base_files: Mapping[str, str]
) -> None:
    """Write adapter_model.safetensors and adapter_config.json, which peft loads. `masters`: parameter → values in FP32 or in that
    precision.

    The tensors get the dtype the model computed with, so that the loaded adapter gives the live model's logits.
    """
    shapes = {name: tuple(value.shape) for name, value in masters.items()}
    write_streaming(folder, shapes, masters.__getitem__, adapter, precision, base_files)


def write_streaming(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], torch.Tensor],
    adapter: Mapping[str, Any],
    precision: str,
    base_files: Mapping[str, str],
) -> None:
    """Write as `write_adapter` does, one parameter after the other: `read` gives its FP32 values when its turn has come."""
    dtype = PRECISIONS[Precision(precision)]
    parameters = {adapter["names"][name]: name for name in shapes}
    tensors = library_order(NewTensor(adapter["names"][name], NAMES[dtype], shape) for name, shape in shapes.items())
    make_directory(folder)
    write_tensors(folder / ADAPTER_WEIGHTS, tensors, (read(parameters[tensor.name]).to(dtype) for tensor in tensors), {"format": "pt"})
    if base_files:
        write_durably(folder / RECORD, encode_record(base_files))
    write_durably(folder / ADAPTER_CONFIG, json.dumps(adapter["config"], indent=2, sort_keys=True).encode())


def export(paths: Sequence[Path], output: Path) -> Manifest:
    """Export the newest whole commit in `paths` to `output`. Raises ConfigError when there is none, or it holds no adapter."""
    commit, manifest, shards = newest_whole(paths, "export")
    if manifest.adapter["config"] is None:
        raise ConfigError(f"{commit.name} was trained with method Full and holds a whole model, no adapter; use `lockstep adapter merge`")
    with commit.held("export"):
        make_whole(output, provenance_of(manifest), Path(manifest.base_model), kept_tokenizers(commit.folders))
        reader, files = ShardReader(output, manifest, shards), manifest.identity.base_files
        write_streaming(output, reader.shapes, lambda name: reader.read(name, MASTER), manifest.adapter, manifest.precision, files)
    return manifest
