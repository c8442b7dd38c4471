"""Safetensors files read range by range, without a mapping: exactly the bytes asked for, into the memory that keeps them; and written
tensor by tensor, with no more than one chunk of one tensor in memory.

A file is 8 bytes of header length, a JSON header padded with spaces to a multiple of 8, and the tensors' bytes, row-major and little-endian
(https://github.com/huggingface/safetensors, "Format"). A mapping would count every page it touches as this process's memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep_spec.choices import Precision
from lockstep_spec.files import durable_file, write_durably
from lockstep_train.base.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
STAGING_BYTES = 16 << 20
"""Read at once where the bytes can't go straight to their place: another dtype, or a GPU."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PRECISIONS = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16, Precision.FP32: torch.float32}
"""Dtype that each training.precision computes in."""


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


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name. Raises ConfigError for a file that is not a safetensors file or is cut off."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise ConfigError(f"{path} is cut off: {size} bytes do not even hold its header; download the model again")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {
                name: StoredTensor(path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
                for name, entry in header.items()
            }
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"{path} is not a safetensors file ({type(error).__name__}: {error}); download the model again") from error
    if size < end:
        raise ConfigError(f"{path} is cut off: it has {size} bytes, its header promises {end}; download the model again")
    return tensors


def read_headers(paths: list[Path]) -> dict[str, StoredTensor]:
    """All tensors of a model. Raises ConfigError like `read_header`."""
    return {name: tensor for path in paths for name, tensor in read_header(path).items()}


class WeightReader:
    """Reader of ranges of stored tensors; may be used by several threads."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self.tensors = tensors
        self._files = {path: os.open(path, os.O_RDONLY) for path in sorted({tensor.file for tensor in tensors.values()})}

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def read(self, name: str, start: int, out: torch.Tensor) -> int:
        """Fill the 1-D tensor `out` with the elements of `name` from `start` on, cast to its dtype; bytes read from the file."""
        tensor = self.tensors[name]
        dtype = DTYPES[tensor.dtype]
        offset = tensor.offset + start * dtype.itemsize
        if out.device.type == "cpu" and out.dtype == dtype:
            return self._read_bytes(tensor.file, offset, out)
        for piece in torch.split(out, STAGING_BYTES // dtype.itemsize):
            staging = torch.empty(piece.numel(), dtype=dtype)
            offset += self._read_bytes(tensor.file, offset, staging)
            piece.copy_(staging)
        return out.numel() * dtype.itemsize

    def _read_bytes(self, path: Path, offset: int, out: torch.Tensor) -> int:
        done = 0
        view = memoryview(out.detach().view(torch.uint8).numpy().data) if out.numel() else memoryview(b"")
        while done < len(view):
            count = os.preadv(self._files[path], [view[done:]], offset + done)
            if count == 0:
                raise ConfigError(f"{path} ended at byte {offset + done} while it was read; download the model again")
            done += count
        return done


def copy_others(base: Path, folder: Path) -> None:
    """Copy tokenizer, generation settings and license durably to `folder`: every visible file of `base` that is neither weights nor
    config.json.
    """
    for path in sorted(base.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHT_ENDINGS) and path.name != CONFIG:
            write_durably(folder / path.name, path.read_bytes())


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written; `dtype` as the format names it (`F32`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def library_order(tensors: Iterable[NewTensor]) -> list[NewTensor]:
    """The order in which the safetensors library lays a file out: larger elements first, so that each is aligned, then by name."""
    return sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype].itemsize, tensor.name))


def header(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> bytes:
    """The file's first bytes, for tensors in this order."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_tensors(path: Path, tensors: Sequence[NewTensor], values: Iterable[torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write `path` durably. `values`: the elements of the tensors in order, in pieces of any length of the right dtype.

    Raises ValueError when they are not as many bytes as the tensors have.
    """
    promised = sum(tensor.size_bytes for tensor in tensors)
    written = 0
    with durable_file(path) as file:
        file.write(header(tensors, metadata))
        for value in values:
            if value.numel():
                written += file.write(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        if written != promised:
            raise ValueError(f"{path}: {written} bytes of tensors, but their shapes promise {promised}")
