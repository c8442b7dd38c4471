"""The most memory that tensors take on a device while something runs: on a GPU as torch's allocator counts it, on a CPU by a mode that sees
every tensor which an operation makes, and when its memory is given back.

The memory plan (lockstep_spec) has the same numbers, but for what no tensor of torch is: CUDA's context, NCCL's buffers, a process.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory:
    """Begin it before a model is loaded, and call `mark` where a part begins; `peaks` has the most bytes of each part.

    A part that is begun several times counts once, with its highest peak. What is before the first mark counts as no part.
    """

    def __init__(self, device: torch.device) -> None:
        self.peaks: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        """Bytes, on a GPU, that the allocator had taken from the device, including gaps between tensors."""
        self._device = device
        self._part: str | None = None
        self._made = None if device.type == "cuda" else Made()

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._made is not None:
            self._made.__enter__()
        return self

    def mark(self, part: str) -> None:
        """Begin `part`."""
        self._count()
        self._part = part
        if self._made is not None:
            self._made.peak_bytes = self._made.held_bytes
        else:
            torch.cuda.reset_peak_memory_stats(self._device)

    def __exit__(self, *raised: object) -> None:
        self._count()
        if self._made is not None:
            self._made.__exit__(None, None, None)

    def _count(self) -> None:
        if self._part is None:
            return
        if self._made is not None:
            peak = self._made.peak_bytes
        else:
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            self.reserved[self._part] = max(self.reserved.get(self._part, 0), torch.cuda.max_memory_reserved(self._device))
        self.peaks[self._part] = max(self.peaks.get(self._part, 0), peak)


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}


class Made(TorchDispatchMode):
    """Counts the memory of all tensors that operations of this thread return, until it is given back, by whichever thread.

    Matrix products in BF16 are computed in FP32, which takes a CPU without instructions for BF16 a fortieth of the time. What they return
    is as large as before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._lock = threading.RLock()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in PRODUCTS and args[0].dtype is torch.bfloat16 and args[0].device.type == "cpu":
            output = function(*(arg.float() for arg in args), **kwargs or {}).bfloat16()
        else:
            output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._add(tensor.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        with self._lock:
            if key in self._sizes:
                return
            self._sizes[key] = storage.nbytes()
            self.held_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        with self._lock:
            self.held_bytes -= self._sizes.pop(key)
