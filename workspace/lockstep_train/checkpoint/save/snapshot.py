"""A rank's state as the bytes of its shard file, in host memory that every save uses again.

Masters and moments change only in the optimizer's update. So the copy runs beside the next forward and backward pass, and
training waits for what is left of it just before the update: usually nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep_spec.files import create_directories, sync_directory, write_pages_durably
from lockstep_train.checkpoint.format.layout import shard_file
from lockstep_train.checkpoint.format.manifest import FragmentRecord, ShardRecord
from lockstep_train.zero.zero_access import Fragment

CHUNK_ELEMENTS = 1 << 20
_ALIGNMENT = 64
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class FilePiece:
    """Elements that lie side by side both in memory and in the file."""

    source: torch.Tensor
    """Source, 1-D."""
    dtype: torch.dtype
    """Number format in the file."""
    offset: int
    """Byte in the file."""


@dataclass(frozen=True)
class FileImage:
    """Content of a shard file to be written, and where it comes from."""

    records: tuple[FragmentRecord, ...]
    header: bytes
    size: int
    """Bytes of the file."""
    pieces: tuple[FilePiece, ...]


def lay_out(fragments: Iterable[Fragment]) -> FileImage:
    """Lay out a safetensors file: for each kind one flat tensor, the fragments' elements in the order of the records.

    That order is the memory's, not the model's, so that a few large copies do instead of three a parameter.
    """
    ordered = _in_memory_order(list(fragments))
    records = tuple(FragmentRecord(item.name, item.shape, item.start, item.numel) for item in ordered)
    kinds = tuple(ordered[0].tensors) if ordered else ()
    dtypes = {kind: functools.reduce(torch.promote_types, (item.tensors[kind].dtype for item in ordered)) for kind in kinds}
    total = sum(record.numel for record in records)
    header, starts, size = _header(dtypes, total)
    pieces = [piece for kind in kinds for piece in _pieces([item.tensors[kind] for item in ordered], dtypes[kind], starts[kind])]
    return FileImage(records, header, size, tuple(pieces))


def _in_memory_order(fragments: list[Fragment]) -> list[Fragment]:
    """Sort storages in the order in which the model meets them (addresses differ from run to run), then by place in the storage."""
    storages: dict[int, int] = {}

    def place(fragment: Fragment) -> tuple[int, int]:
        tensor = next(iter(fragment.tensors.values()))
        return storages.setdefault(tensor.untyped_storage().data_ptr(), len(storages)), int(tensor.storage_offset())

    return sorted(fragments, key=place)


def _header(dtypes: dict[str, torch.dtype], total: int) -> tuple[bytes, dict[str, int], int]:
    """The header, each kind's first byte, and the size of the file."""
    entries: dict[str, Any] = {}
    offset = 0
    for kind, dtype in dtypes.items():
        end = offset + total * dtype.itemsize
        entries[kind] = {"dtype": _DTYPES[dtype], "shape": [total], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    begin = 8 + len(text)
    starts = {kind: begin + entry["data_offsets"][0] for kind, entry in entries.items()}
    return len(text).to_bytes(8, "little") + text, starts, begin + offset


def _pieces(sources: Sequence[torch.Tensor], dtype: torch.dtype, offset: int) -> Iterator[FilePiece]:
    """One piece for each stretch of neighbors."""
    first, numel = None, 0
    for source in (item.detach() for item in sources if item.numel()):
        if first is not None and _adjoin(first, numel, source):
            numel += source.numel()
            continue
        if first is not None:
            yield FilePiece(first.as_strided((numel,), (1,)), dtype, offset)
            offset += numel * dtype.itemsize
        first, numel = source, source.numel()
    if first is not None:
        yield FilePiece(first.as_strided((numel,), (1,)), dtype, offset)


def _adjoin(first: torch.Tensor, numel: int, source: torch.Tensor) -> bool:
    together = source.dtype == first.dtype and source.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    return together and int(source.storage_offset()) == int(first.storage_offset()) + numel


class HostBuffer:
    """Whole pages of host memory, so that a file can be written from it past the page cache; pinned where a GPU copies into it."""

    def __init__(self, size: int, pinned: bool) -> None:
        """Take the memory. Raises MemoryError or OSError when there is none."""
        self.size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, self.size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.pinned = pinned
        if pinned:
            code = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.size, 0))  # type: ignore[no-untyped-call]
            if code != 0:
                raise MemoryError(f"CUDA can't pin it (error {code})")
        else:
            self.bytes.zero_()  # an untouched page is no memory yet; pinning touches them all


@dataclass(frozen=True)
class Snapshot:
    """One save's copy: `copy` may run on any thread, until the next update."""

    image: FileImage
    buffer: HostBuffer
    begun: Any
    """CUDA event of what the training stream had queued when the save began; None without a GPU."""

    @property
    def content(self) -> memoryview:
        """The file's bytes and what else is in the buffer, which ends with a whole page."""
        return memoryview(self.buffer.memory)

    def copy(self) -> None:
        """Copy until the buffer has everything."""
        self.buffer.memory[: len(self.image.header)] = self.image.header
        if self.begun is None:
            self._copy_pieces()
            return
        device = next(piece.source.device for piece in self.image.pieces if piece.source.is_cuda)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # a new thread's own device is always the first one
        stream.wait_event(self.begun)
        with torch.cuda.stream(stream):
            self._copy_pieces()
        stream.synchronize()

    def _copy_pieces(self) -> None:
        for piece in self.image.pieces:
            end = piece.offset + piece.source.numel() * piece.dtype.itemsize
            _copy(piece.source, self.buffer.bytes[piece.offset : end].view(piece.dtype))


class HostMemory:
    """Buffer of all saves."""

    def __init__(self) -> None:
        self._buffer: HostBuffer | None = None
        self._last: Snapshot | None = None

    def reserve(self, image: FileImage) -> HostBuffer:
        """Take what the saves will need. Raises MemoryError or OSError."""
        cuda = any(piece.source.is_cuda for piece in image.pieces)
        if self._buffer is None or self._buffer.size < image.size or self._buffer.pinned != cuda:
            self._buffer = None  # never two of them
            self._buffer = HostBuffer(image.size, cuda)
        return self._buffer

    def begin(self, image: FileImage) -> Snapshot:
        """Fix what is copied: the state as it is at this moment in the training thread's stream."""
        last = self._last
        if last is not None and last.image is image and last.begun is None:
            return last  # the same copy into the same buffer again
        self._last = self._begin(image)
        return self._last

    def _begin(self, image: FileImage) -> Snapshot:
        buffer = self.reserve(image)
        begun = torch.cuda.Event() if buffer.pinned else None  # type: ignore[no-untyped-call]
        if begun is not None:
            begun.record()
        return Snapshot(image, buffer, begun)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a piece; without a GPU in chunks, between which other threads get their turn at the memory."""
    if source.is_cuda:
        target.copy_(source, non_blocking=True)
        return
    for start in range(0, source.numel(), CHUNK_ELEMENTS):
        target[start : start + CHUNK_ELEMENTS].copy_(source[start : start + CHUNK_ELEMENTS])


def write_shard(folder: Path, snapshot: Snapshot, rank: int, world_size: int) -> ShardRecord:
    """Write this rank's shard durably; the record of it goes into the manifest. Raises OSError.

    The checksum is computed beside the writing: SHA-256 runs faster than most volumes write, and neither holds the GIL.
    The folder's own name is synced last: a journal has it since the file's sync, so that there is nothing left to wait for.
    """
    created = create_directories(folder)
    file, size = shard_file(rank, world_size), snapshot.image.size
    with ThreadPoolExecutor(1, "checksum") as beside:
        checksum = beside.submit(lambda: hashlib.sha256(snapshot.content[:size]).hexdigest())
        write_pages_durably(folder / file, snapshot.content, size)
        for path in created:
            sync_directory(path.parent)
        return ShardRecord(file, size, checksum.result(), snapshot.image.records)
