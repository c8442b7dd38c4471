"""Make a PEFT adapter folder from a commit's shards, on a CPU, without the base model:

python -m lockstep_train.export runs/my-job --output adapter
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep_spec.choices import Precision
from lockstep_train.base.durable import make_directory, write_durably
from lockstep_train.base.errors import ConfigError, TrainerError, print_problem
from lockstep_train.checkpoint.commits import newest_whole
from lockstep_train.checkpoint.format.layout import MASTER
from lockstep_train.checkpoint.format.manifest import Manifest
from lockstep_train.checkpoint.format.shards import ShardReader
from lockstep_train.model.base_files import RECORD
from lockstep_train.model.weight_files import NAMES, PRECISIONS, NewTensor, library_order, write_tensors

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


def write_adapter(
    folder: Path, masters: Mapping[str, torch.Tensor], adapter: Mapping[str, Any], precision: str, base_files: Mapping[str, str]
) -> None:
    """Write adapter_model.safetensors and adapter_config.json, which peft loads. `masters`: parameter → values in FP32 or in that precision.

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
    write_tensors(folder / WEIGHTS_FILE, tensors, (read(parameters[tensor.name]).to(dtype) for tensor in tensors), {"format": "pt"})
    if base_files:
        write_durably(folder / RECORD, json.dumps(dict(base_files), indent=2, sort_keys=True).encode())
    write_durably(folder / CONFIG_FILE, json.dumps(adapter["config"], indent=2, sort_keys=True).encode())


def export(paths: Sequence[Path], output: Path) -> Manifest:
    """Export the newest whole commit in `paths` to `output`. Raises ConfigError when there is none, or it holds no adapter."""
    commit, manifest, shards = newest_whole(paths, "export")
    if manifest.adapter["config"] is None:
        raise ConfigError(f"{commit.name} was trained with method Full and holds a whole model, no adapter; use `lockstep adapter merge`")
    with commit.held("export"):
        export_shards(output, manifest, shards)
    return manifest


def export_shards(folder: Path, manifest: Manifest, paths: Sequence[Path]) -> None:
    """Write the adapter of a commit into `folder`, from shards that were checked; `paths` says where each is."""
    reader = ShardReader(folder, manifest, paths)
    files = manifest.identity.base_files
    write_streaming(folder, reader.shapes, lambda name: reader.read(name, MASTER), manifest.adapter, manifest.precision, files)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_train.export", description="Make a PEFT adapter folder from a checkpoint's shards, on a CPU."
    )
    parser.add_argument(
        "source",
        type=Path,
        nargs="+",
        help="a run's folder, its checkpoints folder, or one step-N.aM folder; several where shards are spread",
    )
    parser.add_argument("--output", type=Path, required=True, help="the adapter's folder; created if it is missing")
    options = parser.parse_args(arguments)
    try:
        manifest = export(options.source, options.output)
    except (TrainerError, OSError) as error:
        return print_problem(error)
    print(f"Exported step {manifest.step} (attempt {manifest.attempt}) to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
