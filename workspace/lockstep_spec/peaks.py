"""Peak rates of GPUs, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping

PEAKS: Mapping[str, float] = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "H800": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H20": 148e12,
    "A800": 312e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI355X": 2516.6e12,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
    "MI250X": 383e12,
}
"""Dense BF16 with FP32 accumulation, FLOP/s of one device, from its maker's data sheet (half of a figure given "with sparsity").
The first name that is a word of the device's counts, so a variant stands before its family."""


def known_peak(device: str) -> float | None:
    """Peak FLOP/s of a device by its name; None for one that isn't in the table, and for a part of a GPU."""
    if is_part(device):
        return None
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", device, re.IGNORECASE)), None)


def is_part(device: str) -> bool:
    """True for an instance of a GPU that is divided (MIG)."""
    return re.search(r"\bMIG\b", device) is not None
