"""Safetensors files written tensor by tensor: no more than one chunk of one tensor is in memory.

A file is 8 bytes of header length, a JSON header padded with spaces to a multiple of 8, and the tensors' bytes
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep_train.base.durable import durable_file
from lockstep_train.model.weight_files import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
