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

import torch

from lockstep_spec.choices import Precision
from lockstep_spec.files import durable_file
from lockstep_train.base.errors import ConfigError
from lockstep_train.model.stored import StoredTensor

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
