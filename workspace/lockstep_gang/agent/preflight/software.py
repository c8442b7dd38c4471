"""Versions and variables that ranks of all nodes must have alike. Nothing is imported to find a version."""

from __future__ import annotations

import platform
from collections.abc import Mapping

LIBRARIES = (
    "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "deepspeed", "transformers", "peft", "accelerate", "safetensors", "numpy",
    "bitsandbytes",
)  # fmt: skip
PYTHON = "python"
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "PYTORCH_CUDA_", "PYTORCH_ALLOC_")
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")
_VALUE_CHARACTERS = 300


def versions() -> dict[str, str]:
    """Python's, and that of every library that is installed."""
    import importlib.metadata  # 40 ms that an agent's start need not wait for

    found = {PYTHON: platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that change how ranks talk and compute. Named one by one or by prefix, so that no secret is ever among them."""
    return {name: value[:_VALUE_CHARACTERS] for name, value in sorted(variables.items()) if name in _NAMES or name.startswith(_PREFIXES)}
