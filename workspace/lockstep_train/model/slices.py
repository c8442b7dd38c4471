"""Load a model under Stage3 without any collective: each rank reads its own range of every tensor.

transformers lets rank 0 read all of it and broadcasts every module twice: three times the model's bytes through one
machine's network. Here transformers still builds the model, finds the files and reports what is missing (`from_pretrained`);
two steps of it are replaced while it does: sharding an empty parameter broadcasts nothing, and loading reads slices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep_train.base.errors import ConfigError
from lockstep_train.base.imports import replaced
from lockstep_train.base.limits import Say
from lockstep_train.model.layouts import TensorLayout, Unfitting, model_layouts
from lockstep_train.model.weight_files import WeightReader, read_headers

READERS = 4
"""Threads that read; more do not help one disk and hold more staging memory."""


@dataclass
class SliceLoad:
    """Outcome of a load."""

    bytes_read: int = 0
    fallback: str | None = None
    """Reason why transformers' own loader was used instead."""


@contextlib.contextmanager
def reading_slices(load: SliceLoad) -> Iterator[None]:
    """Let `from_pretrained` under Stage3 make every rank read its own slices, within this; `load` says how it went."""
    from deepspeed.runtime.zero.partition_parameters import Init
    from transformers import PreTrainedModel

    transformers_load = PreTrainedModel._load_pretrained_model

    def load_slices(model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, expected_keys: Any = None) -> Any:
        try:
            return _load_slices(model, checkpoint_files, load_config, load), None
        except Unfitting as reason:
            load.fallback = str(reason)
            return transformers_load(model, state_dict, checkpoint_files, load_config, expected_keys)

    with replaced(PreTrainedModel, "_load_pretrained_model", staticmethod(load_slices)), replaced(Init, "_zero_init_param", _shard_empty):
        yield


def _shard_empty(init: Any, parameter: Any) -> None:
    """Shard a new parameter as zero.Init does, without the broadcast: what would be sent is uninitialized memory."""
    init._convert_to_deepspeed_param(parameter)
    parameter.partition()


def _load_slices(model: Any, checkpoint_files: list[str] | None, load_config: Any, load: SliceLoad) -> Any:
    """Fill this rank's shards and every buffer. Raises Unfitting before anything is written, ConfigError for wrong shapes."""
    from transformers.utils.loading_report import LoadStateDictInfo

    if load_config.hf_quantizer is not None:
        raise Unfitting("its weights are quantized")
    if not checkpoint_files or not all(file.endswith(".safetensors") for file in checkpoint_files):
        raise Unfitting("its weights are no safetensors files")
    tensors = read_headers([Path(file) for file in checkpoint_files])
    places: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    layouts, unexpected = model_layouts(model, load_config.weight_mapping or [], tensors)
    refuse_wrong_shapes(layouts, places, load_config.pretrained_model_name_or_path)
    jobs = [job for name, layout in layouts.items() for job in _jobs(places[name], layout)]
    with WeightReader(tensors) as reader, ThreadPoolExecutor(READERS) as pool:
        load.bytes_read = sum(pool.map(lambda job: _fill(reader, *job), jobs))
    for name in layouts:
        places[name]._is_hf_initialized = True  # type: ignore[attr-defined]  # or transformers would draw it anew
    model._weight_conversions = [conversion for conversion in load_config.weight_mapping or [] if conversion.was_used()]
    return LoadStateDictInfo(
        missing_keys=set(places) - set(layouts),
        unexpected_keys=unexpected,
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


def refuse_wrong_shapes(layouts: dict[str, TensorLayout], places: dict[str, torch.Tensor], folder: object) -> None:
    """Raise ConfigError, on every rank alike, where the files hold another shape than config.json asks for."""
    wrong = [(name, layout.shape) for name, layout in layouts.items() if layout.shape != tuple(_shape(places[name]))]
    if wrong:
        name, shape = wrong[0]
        raise ConfigError(
            f"training.model.name {folder}: {name} has the shape {list(shape)} in the weight files, but config.json asks for "
            f"{list(_shape(places[name]))} ({len(wrong)} tensors differ); its weights and its config.json must be of one model"
        )


def _shape(place: Any) -> Any:
    return place.ds_shape if hasattr(place, "ds_id") else place.shape


Job = tuple[torch.Tensor, TensorLayout, int, int]
"""Job of a reader: where to write, what, from which element on, and how many."""


def _jobs(place: Any, layout: TensorLayout) -> Iterator[Job]:
    """Yield the jobs of this rank's shard, with hpZ also its node's, or of a whole buffer."""
    if not hasattr(place, "ds_id"):
        yield place.data.view(-1), layout, 0, place.numel()
        return
    shards = [(place.ds_tensor, place.ds_zero_partition_rank)]
    if place.ds_secondary_tensor is not None:
        from deepspeed.utils import groups

        shards.append((place.ds_secondary_tensor, groups._get_zero_param_intra_parallel_rank_in_mygroup()))
    for shard, index in shards:
        if getattr(shard, "final_location", None) is not None or hasattr(shard, "ds_quant_scale"):
            raise Unfitting("its shards are kept on disk or quantized by DeepSpeed")
        start = min(shard.ds_numel * index, place.ds_numel)
        yield shard, layout, start, min(shard.ds_numel, place.ds_numel - start)


@torch.no_grad()
def _fill(reader: WeightReader, out: torch.Tensor, layout: TensorLayout, start: int, numel: int) -> int:
    """Fill a shard; bytes read. What is left of the shard is padding: zeroed, because it is uninitialized memory that may hold NaN."""
    written = read = 0
    for piece in layout.cut(start, numel):
        read += reader.read(piece.name, piece.start, out[written : written + piece.numel])
        written += piece.numel
    out[numel:].zero_()
    return read


def say_fallback(load: SliceLoad, folder: Path, say: Say) -> None:
    if load.fallback is not None:
        say(f"{folder} is loaded by transformers: rank 0 reads it and broadcasts it, which is slow, because {load.fallback}")
