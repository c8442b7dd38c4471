"""A PEFT adapter folder from a commit's shards, on a CPU, without the base model:

python -m lockstep_train.export runs/my-job --output adapter
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep_train.checkpoint.chain import candidates
from lockstep_train.checkpoint.durable import make_directory, write_durably
from lockstep_train.checkpoint.kinds import MASTER
from lockstep_train.checkpoint.layout import MANIFEST
from lockstep_train.checkpoint.load import ShardReader
from lockstep_train.checkpoint.manifest import Manifest, decode
from lockstep_train.checkpoint.volume import list_commits, read_records, shard_problem
from lockstep_train.errors import ConfigError, TrainerError

DTYPES = {"BF16": torch.bfloat16, "FP32": torch.float32}


def write_adapter(folder: Path, masters: Mapping[str, torch.Tensor], adapter: Mapping[str, Any], precision: str) -> None:
    """Write adapter_model.safetensors and adapter_config.json, which peft loads. `masters`: parameter → FP32 values.

    The tensors get the dtype the model computed with, so that the loaded adapter gives the live model's logits.
    """
    from safetensors.torch import save

    make_directory(folder)
    tensors = {adapter["names"][name]: value.to(DTYPES[precision]).contiguous() for name, value in masters.items()}
    write_durably(folder / "adapter_model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_durably(folder / "adapter_config.json", json.dumps(adapter["config"], indent=2, sort_keys=True).encode())


def commit_folder(path: Path) -> Path:
    """The commit at `path`: itself, or the newest whose shards are whole in a run's or a checkpoints folder. Raises ConfigError."""
    if (path / MANIFEST).is_file():
        return path
    problems: list[str] = []
    for checkpoints in (path, path / "checkpoints"):
        for name in candidates(list_commits(checkpoints), read_records(checkpoints)):
            found = problem_of(checkpoints / str(name))
            if found is None:
                return checkpoints / str(name)
            problems.append(found)
    reason = "; ".join(problems) if problems else "no commits are there"
    raise ConfigError(f"{path} holds no commit to export ({reason}); give a run's folder or one step-N.aM folder")


def problem_of(folder: Path) -> str | None:
    """Why a commit can't be exported from here, or None."""
    try:
        manifest = decode((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        return f"{folder / MANIFEST}: {error}"
    return next((problem for shard in manifest.shards if (problem := shard_problem(folder, shard))), None)


def export(path: Path, output: Path) -> Manifest:
    """Export the commit at `path` to `output`. Raises ConfigError when there is none or it is damaged."""
    folder = commit_folder(path)
    problem = problem_of(folder)
    if problem is not None:
        raise ConfigError(f"{folder} can't be exported: {problem}")
    manifest = decode((folder / MANIFEST).read_bytes())
    reader = ShardReader(folder, manifest)
    masters = {name: reader.read(name, MASTER).view(shape) for name, shape in reader.shapes.items()}
    write_adapter(output, masters, manifest.adapter, manifest.precision)
    return manifest


def export_shards(folder: Path, manifest: Manifest, paths: Sequence[Path]) -> None:
    """The adapter of a commit, into its own folder, from shards that were checked; `paths` says where each is."""
    reader = ShardReader(folder, manifest, paths)
    masters = {name: reader.read(name, MASTER).view(shape) for name, shape in reader.shapes.items()}
    write_adapter(folder, masters, manifest.adapter, manifest.precision)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_train.export", description="Make a PEFT adapter folder from a checkpoint's shards, on a CPU."
    )
    parser.add_argument("source", type=Path, help="a run's folder, its checkpoints folder, or one step-N.aM folder")
    parser.add_argument("--output", type=Path, required=True, help="the adapter's folder; made if it isn't there")
    options = parser.parse_args(arguments)
    try:
        manifest = export(options.source, options.output)
    except TrainerError as error:
        print(f"export: {error}", file=sys.stderr)
        return error.exit_code
    print(f"Exported step {manifest.step} (attempt {manifest.attempt}) to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
