"""NCCL's flight recorder: PyTorch keeps the last collectives of a rank in memory, which shows on which one ranks disagree."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DEFAULTS = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def switch_on(logs: Path) -> None:
    """Before the process group is made. What the user has set stays."""
    for name, value in {**DEFAULTS, "TORCH_FR_DUMP_TEMP_FILE": str(logs / "nccl-timeout-rank-")}.items():
        os.environ.setdefault(name, value)


def write_record(path: Path) -> None:
    """The record as JSON, where there is one. Raises OSError."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is not None:
        path.write_bytes(dump())
