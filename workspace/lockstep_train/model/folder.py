"""What a model's folder holds beside its weights and its configuration."""

from __future__ import annotations

from pathlib import Path

from lockstep_train.base.durable import write_durably

CONFIG = "config.json"
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def copy_others(base: Path, folder: Path) -> None:
    """Copy tokenizer, generation settings and licence durably to `folder`: every visible file of `base` that is neither weights nor config.json."""
    for path in sorted(base.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHT_ENDINGS) and path.name != CONFIG:
            write_durably(folder / path.name, path.read_bytes())
