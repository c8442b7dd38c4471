"""Peak rates and memory of GPUs, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class Gpu(NamedTuple):
    """Figures of one kind of GPU, from its maker's data sheet."""

    peak: float | None
    """Dense BF16 with FP32 accumulation, FLOP/s of one device (half of a figure given "with sparsity"); None: not known here."""
    gigabytes: tuple[int, ...] = ()
    """Sizes of its memory, the usual one first, in GB of 10⁹ bytes, less what ECC takes of GDDR6; (): memory isn't planned for it."""
    bfloat16: bool = True


GPUS: Mapping[str, Gpu] = {
    "GB200": Gpu(2500e12, (186,)),
    "B200": Gpu(2250e12, (180,)),
    "H200 NVL": Gpu(835.5e12, (141,)),
    "H200": Gpu(989.4e12, (141,)),
    "GH200": Gpu(989.4e12, (96, 144)),
    "H800": Gpu(989.4e12, (80,)),
    "H100 NVL": Gpu(835.5e12, (94,)),
    "H100 PCIe": Gpu(756e12, (80,)),
    "H100": Gpu(989.4e12, (80,)),
    "H20": Gpu(148e12, (96,)),
    "A800": Gpu(312e12, (80, 40)),
    "A100": Gpu(312e12, (80, 40)),
    "A40": Gpu(149.7e12, (47,)),
    "A30": Gpu(165e12, (24,)),
    "A10G": Gpu(70e12, (23,)),
    "A10": Gpu(125e12, (23,)),
    "L40S": Gpu(362e12, (47,)),
    "L40": Gpu(181e12, (47,)),
    "L4": Gpu(121e12, (23,)),
    "V100": Gpu(None, (32, 16), bfloat16=False),
    "T4": Gpu(None, (15,), bfloat16=False),
    "RTX PRO 6000": Gpu(None, (96,)),
    "RTX 6000 Ada": Gpu(None, (47,)),
    "RTX A6000": Gpu(None, (47,)),
    "RTX 5090": Gpu(None, (32,)),
    "RTX 4090": Gpu(165.2e12, (24,)),
    "RTX 3090": Gpu(71e12, (24,)),
    "MI355X": Gpu(2516.6e12),
    "MI325X": Gpu(1307.4e12),
    "MI300X": Gpu(1307.4e12),
    "MI250X": Gpu(383e12),
}
"""The first name that is a word of the device's counts, so a variant stands before its family."""


def known_peak(device: str) -> float | None:
    """Peak FLOP/s of a device by its name; None for one whose peak isn't in the table, and for a part of a GPU."""
    gpu = known_gpu(device)
    return gpu.peak if gpu is not None else None


def known_gpu(device: str) -> Gpu | None:
    """Return the figures of a device by its name; None for one that isn't in the table, and for a part of a GPU."""
    if is_part(device):
        return None
    return next((gpu for name, gpu in GPUS.items() if re.search(rf"\b{name}\b", device, re.IGNORECASE)), None)


def is_part(device: str) -> bool:
    """True for an instance of a GPU that is divided (MIG)."""
    return re.search(r"\bMIG\b", device) is not None
