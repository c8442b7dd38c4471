"""Loading of the base model from a folder, offline: by transformers or, under Stage3, without any collective, each rank its own range of
every tensor.

transformers lets rank 0 read all of it and broadcasts every module twice: three times the model's bytes through one
machine's network. Here transformers still builds the model, finds the files and reports what is missing (`from_pretrained`);
two steps of it are replaced while it does: sharding an empty parameter broadcasts nothing, and loading reads slices.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from lockstep_spec.choices import Precision, Quantization, ZeroStage
from lockstep_spec.training import ModelConfig
from lockstep_spec.words import listed
from lockstep_train.base.cache import refuse_pointers
from lockstep_train.base.errors import ConfigError, TrainerError, may_pass, reason_of, refusal
from lockstep_train.base.imports import OF_FOLDER, replaced
from lockstep_train.base.limits import Say
from lockstep_train.model.layouts import TensorLayout, Unfitting, model_layouts
from lockstep_train.model.moe import check_experts
from lockstep_train.model.quantize import keep_trainable, loading_options
from lockstep_train.model.stored import INDEX, SINGLE, read_headers, weight_paths
from lockstep_train.model.weight_files import PRECISIONS, WeightReader
from lockstep_train.zero.parameters import full_shape, is_plain, is_sharded, sharding_empty, shards

SAMPLED_BYTES = 1 << 16


def model_folder(config: ModelConfig) -> Path:
    """The model's folder. Raises ConfigError when it isn't one."""
    folder = Path(config.name)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"training.model.name {config.name} holds no config.json; it must be the folder of a model that transformers can load"
        )
    return folder


def base_digest(folder: Path) -> str:
    """SHA-256 over config.json and, of every weight file, its size, start and end: what manifests had before base_files.py.

    Written on, so that an older Lockstep can go on from a newer one's commits, and read where a manifest has nothing else.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(SAMPLED_BYTES)
            file.seek(max(0, size - SAMPLED_BYTES))
            digest.update(f"{path.name}:{size}:".encode() + start + file.read(SAMPLED_BYTES))
    return digest.hexdigest()


def refuse_missing_weights(folder: Path) -> None:
    """Raise ConfigError for a folder without weights, and for safetensors files that are missing or cut off, naming the file."""
    refuse_pointers(folder)
    paths = weight_paths(folder)
    read_headers(paths)
    if not paths and not any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"training.model.name {folder} holds no weights: neither {SINGLE}, nor {INDEX} with the files it names, nor *.bin; download the"
            " model again"
        )


def quiet_transformers() -> None:
    """Silence progress bars in a pod's log, and deprecations that are for transformers' own authors."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def model_class(folder: Path) -> Any:
    """Return the class of transformers that makes the folder's model: a causal language model, or one that also sees, where there is none
    for text alone.

    Raises what transformers raises for a configuration that it doesn't know.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = type(AutoConfig.from_pretrained(str(folder), **OF_FOLDER))
    sees = kind not in AutoModelForCausalLM._model_mapping and kind in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def empty_model(folder: Path) -> Any:
    """Build the folder's model without memory, from its config.json alone. Raises what transformers raises."""
    from transformers import AutoConfig

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model_class(folder).from_config(AutoConfig.from_pretrained(str(folder), **OF_FOLDER), trust_remote_code=False)


def load_base(
    folder: Path,
    precision: Precision,
    deepspeed_config: dict[str, Any],
    device: torch.device | None = None,
    say: Say = print,
    quantization: Quantization = Quantization.NONE,
) -> torch.nn.Module:
    """Load a causal LM with frozen weights: under Stage3 each rank reads its own slices, else all of it goes straight to `device`.

    Raises ConfigError when the weights are missing, transformers can't load the folder, or its experts can't be trained this way.
    """
    refuse_missing_weights(folder)
    stage = ZeroStage(f"Stage{deepspeed_config['zero_optimization']['stage']}")
    if stage is ZeroStage.STAGE3:
        model = load_sharded(folder, precision, deepspeed_config, say)
    else:
        model = load_whole(folder, precision, device, **loading_options(quantization, PRECISIONS[precision]))
        if quantization is Quantization.NF4:
            keep_trainable(model)
    check_experts(model, stage, quantization)
    model.requires_grad_(False)
    return model


def load_sharded(folder: Path, precision: Precision, deepspeed_config: dict[str, Any], say: Say) -> torch.nn.Module:
    """Load every weight sharded from the start, by `reading_slices`. A model that can't be read so is loaded by transformers, and `say`
    tells.
    """
    from transformers.integrations import HfDeepSpeedConfig

    # transformers and peft look for this object to decide whether to shard while loading, and whether to gather what they read.
    sharding = HfDeepSpeedConfig(deepspeed_config)
    load = SliceLoad()
    with reading_slices(load):
        model: Any = from_pretrained(folder, precision)
    model.sharding = sharding  # so that it lives as long as the model does
    if load.fallback is not None:
        say(f"{folder} is loaded by transformers: rank 0 reads it and broadcasts it, which is slow, because {load.fallback}")
    return cast(torch.nn.Module, model)


def load_whole(folder: Path, precision: Precision, device: torch.device | None = None, **options: Any) -> torch.nn.Module:
    """Load all weights on every rank. On a GPU they go there tensor by tensor; on CPUs ranks share the file's pages until they write."""
    placement = {} if device is None or device.type == "cpu" else {"device_map": {"": device}}
    return from_pretrained(folder, precision, **placement, **options)


def from_pretrained(folder: Path, precision: Precision, **options: Any) -> torch.nn.Module:
    """Load by transformers. Raises, with the first line of what it says, ConfigError, or TrainerError for a fault that may pass."""
    quiet_transformers()
    try:
        with judging_conversions():
            model, report = model_class(folder).from_pretrained(
                str(folder), dtype=PRECISIONS[precision], output_loading_info=True, **OF_FOLDER, **options
            )
    except TrainerError:
        raise
    except Exception as error:  # also ImportError, KeyError and errors of its own: whatever a config.json leads to
        raise refusal(f"training.model.name {folder} can't be loaded as a causal language model: {reason_of(error)}", error) from error
    refuse_missing_tensors(report["missing_keys"], f"training.model.name {folder}")
    return cast(torch.nn.Module, model)


@contextlib.contextmanager
def judging_conversions() -> Iterator[None]:
    """Let faults that may pass end the load: transformers notes whatever fails while it fuses or packs a tensor, also a device's memory
    that is exhausted, and raises an error in the end that has none of it.
    """
    from transformers import core_model_loading

    noted = core_model_loading.log_conversion_errors

    @contextlib.contextmanager
    def judged(*arguments: Any, **options: Any) -> Iterator[None]:
        passing: Exception | None = None
        try:
            with noted(*arguments, **options):
                try:
                    yield
                except Exception as error:
                    passing = error if may_pass(error) else None
                    raise
        except Exception as error:
            raise passing or error from None

    with replaced(core_model_loading, "log_conversion_errors", judged):
        yield


def refuse_missing_tensors(missing: Collection[str], folder: str) -> None:
    """Raise ConfigError for tensors that the model has and its files don't: transformers draws them at random.

    `missing`: as transformers reports them, without tied ones and those that the model's code fills itself.
    """
    if missing:
        raise ConfigError(
            f"{folder}: its weight files lack {listed(sorted(missing))}, which its config.json asks for; its weights and its config.json"
            " must be of one model, so download the model again"
        )


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
    from transformers import PreTrainedModel

    transformers_load = PreTrainedModel._load_pretrained_model

    def load_slices(model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, expected_keys: Any = None) -> Any:
        try:
            return _load_slices(model, checkpoint_files, load_config, load), None
        except Unfitting as reason:
            load.fallback = str(reason)
            return transformers_load(model, state_dict, checkpoint_files, load_config, expected_keys)

    with replaced(PreTrainedModel, "_load_pretrained_model", staticmethod(load_slices)), sharding_empty():
        yield


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
    wrong = [(name, layout.shape) for name, layout in layouts.items() if layout.shape != full_shape(places[name])]
    if wrong:
        name, shape = wrong[0]
        raise ConfigError(
            f"training.model.name {folder}: {name} has the shape {list(shape)} in the weight files, but config.json asks for "
            f"{list(full_shape(places[name]))} ({len(wrong)} tensors differ); its weights and its config.json must be of one model"
        )


Job = tuple[torch.Tensor, TensorLayout, int, int]
"""Job of a reader: where to write, what, from which element on, and how many."""


def _jobs(place: Any, layout: TensorLayout) -> Iterator[Job]:
    """Yield the jobs of this rank's shard, with hpZ also its node's, or of a whole buffer."""
    if not is_sharded(place):
        yield place.data.view(-1), layout, 0, place.numel()
        return
    for shard, start, numel in shards(place):
        if not is_plain(shard):
            raise Unfitting("its shards are kept on disk or quantized by DeepSpeed")
        yield shard, layout, start, numel


@torch.no_grad()
def _fill(reader: WeightReader, out: torch.Tensor, layout: TensorLayout, start: int, numel: int) -> int:
    """Fill a shard; bytes read. What is left of the shard is padding: zeroed, because it is uninitialized memory that may hold NaN."""
    written = read = 0
    for piece in layout.cut(start, numel):
        read += reader.read(piece.name, piece.start, out[written : written + piece.numel])
        written += piece.numel
    out[numel:].zero_()
    return read
