"""Files of a model's folder: which hold its weights, where each tensor lies in them, and which others belong to it.

Nothing here needs torch, so a wrong folder is refused at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_spec.files import write_durably
from lockstep_train.base.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@dataclass(frozen=True)
class StoredTensor:
    """Place of one tensor's bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file."""


def weight_paths(folder: Path) -> list[Path]:
    """The safetensors files of a model folder as transformers finds them; empty when it has other weights, or none.

    Raises ConfigError for an index that can't be read and for a file that it names and that isn't there.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of weight files ({type(error).__name__}: {error}); download the model again") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {missing[0]}, which its {INDEX} names ({len(missing)} of {len(names)} files are missing); download the model"
            " again"
        )
    return [folder / name for name in names]


def read_header(path: Path, remedy: str = "download the model again") -> dict[str, StoredTensor]:
    """The tensors of one file, by name. Raises ConfigError, which ends with `remedy`, for one that is cut off or no safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise ConfigError(f"{path} is cut off: {size} bytes do not even hold its header; {remedy}")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {
                name: StoredTensor(path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
                for name, entry in header.items()
            }
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"{path} is not a safetensors file ({type(error).__name__}: {error}); {remedy}") from error
    if size < end:
        raise ConfigError(f"{path} is cut off: it has {size} bytes, its header promises {end}; {remedy}")
    return tensors


def read_headers(paths: list[Path]) -> dict[str, StoredTensor]:
    """All tensors of a model. Raises ConfigError like `read_header`."""
    return {name: tensor for path in paths for name, tensor in read_header(path).items()}


def copy_others(base: Path, folder: Path) -> None:
    """Copy tokenizer, generation settings and license durably to `folder`: every visible file of `base` that is neither weights nor
    config.json.
    """
    for path in sorted(base.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHT_ENDINGS) and path.name != CONFIG:
            write_durably(folder / path.name, path.read_bytes())
