"""NCCL's flight recorder: PyTorch keeps the last collectives of a rank in memory, which shows on which one ranks disagree."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

DEFAULTS = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def switch_on(logs: Path) -> None:
    """Switch the recorder on, before the process group is made. What the user has set stays."""
    for name, value in {**DEFAULTS, "TORCH_FR_DUMP_TEMP_FILE": str(logs / "nccl-timeout-rank-")}.items():
        os.environ.setdefault(name, value)


def write_flight_record(path: Path) -> None:
    """Write the record as JSON, where there is one. Raises OSError."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    records = _records(torch._C._distributed_c10d)
    if records:
        path.write_bytes(next((record for record in records if b'"entries"' in record), records[0]))


def _records(c10d: Any) -> list[bytes]:
    """Records of each of torch's two NCCL backends, of which ranks use one: in torch 2.15 `nccl` is nccl2 unless TORCH_DIST_USE_NCCL2=0,
    and records where the older one's function doesn't look."""
    records = []
    if hasattr(c10d, "_dump_fr_trace_json"):
        records.append(c10d._dump_fr_trace_json(backend="nccl2"))
    if hasattr(c10d, "_dump_nccl_trace_json"):
        records.append(c10d._dump_nccl_trace_json())
    return records
