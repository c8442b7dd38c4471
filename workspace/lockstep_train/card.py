"""Files that make a folder of trained weights whole: the tokenizer with the chat template of the run, and a model card in the hub's form.

A card may be published, so it names no path, no host and no row of the data: only what the weights were trained on, and how.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_spec import VERSION
from lockstep_spec.files import make_directory, write_durably
from lockstep_spec.modelnames import is_address, is_hub_name
from lockstep_spec.words import printable_line
from lockstep_train.checkpoint.format.manifest import Manifest
from lockstep_train.checkpoint.format.views import TOKENIZER
from lockstep_train.data.tokens.tokenizer import tokenizer_files
from lockstep_train.model.base_files import encode_record
from lockstep_train.model.stored import CONFIG

CARD = "README.md"
LICENCE_KEYS = ("license", "license_name")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
STEPS = re.compile(r"^\| steps \| (\d+) \|$", re.MULTILINE)
LICENCE = re.compile(r"[\w.+-]{1,64}")


@dataclass(frozen=True)
class Provenance:
    """Origin of trained weights."""

    base: str
    """Name or folder of the base model, as the run or the adapter has it."""
    revision: str | None
    base_files: Mapping[str, str]
    config: Mapping[str, Any] | None
    """adapter_config.json; None after full fine-tuning."""
    step: int | None = None
    """Steps of the training; None where nothing says."""

    @property
    def name(self) -> str:
        """Return the base model as it is known everywhere: its name on the hub, or that of its folder without what leads there."""
        path = self.base.partition("://")[2].partition("/")[2] if is_address(self.base) else self.base
        name = self.base if self.is_published else Path(path).name
        return name if HUB_NAME.fullmatch(name) else "(unnamed)"

    @property
    def is_published(self) -> bool:
        """Return True if the base model is known by a name of the hub."""
        return is_hub_name(self.base) and HUB_NAME.fullmatch(self.base) is not None


def provenance_of(manifest: Manifest) -> Provenance:
    origin, config = manifest.base_origin or {}, manifest.adapter["config"]
    base = origin.get("name") or (config or {}).get("base_model_name_or_path") or manifest.base_model
    return Provenance(base, origin.get("pin"), manifest.identity.base_files, config, manifest.step)


def kept_tokenizers(commits: Sequence[Path]) -> list[Path]:
    """Return the folders that may hold the tokenizer of a run, of which these are commits: the run's own, and theirs."""
    return [*(commit.parent.parent / TOKENIZER for commit in commits if commit.parent.name == "checkpoints"), *commits]


def make_whole(folder: Path, origin: Provenance, base: Path, tokenizers: Sequence[Path], *, merged: bool = False) -> None:
    """Write the tokenizer and the card into `folder`. `tokenizers`: folders that may have the run's, of which a later one counts more, and
    each more than the base's, whose folder may be gone. Raises OSError.
    """
    make_directory(folder)
    for path in [path for source in (base, *tokenizers) if source.is_dir() for path in tokenizer_files(source) if path.parent == source]:
        write_durably(folder / path.name, path.read_bytes())
    write_durably(folder / CARD, card(origin, licence_of(base), merged=merged).encode())


def licence_of(base: Path) -> dict[str, str]:
    """Return the keys about the licence of the base model's own card, or of its config.json; {} where neither has any."""
    from huggingface_hub import metadata_load

    for read in (lambda: metadata_load(base / CARD), lambda: json.loads((base / CONFIG).read_bytes())):
        with contextlib.suppress(Exception):  # whatever a file of other people leads to
            stated = {key: value for key in LICENCE_KEYS if LICENCE.fullmatch(value := str((read() or {}).get(key) or ""))}
            if stated:
                return stated
    return {}


def step_of(adapter: Path) -> int | None:
    """Return the steps that an adapter's card names, if it was written here."""
    with contextlib.suppress(OSError, ValueError):
        if row := STEPS.search((adapter / CARD).read_text(encoding="utf-8")):
            return int(row[1])
    return None


def card(origin: Provenance, licence: Mapping[str, Any], *, merged: bool = False) -> str:
    """Return the model card. `merged`: of a whole model, which has the adapter in its weights."""
    from huggingface_hub import ModelCardData

    config = origin.config
    is_adapter = config is not None and not merged
    method = "full fine-tuning" if config is None else _method(config)
    tags = ["lockstep", *(["lora"] if config else [])]
    tags += [f"base_model:adapter:{origin.base}"] if is_adapter and origin.is_published else []
    head = ModelCardData(
        base_model=origin.base if origin.is_published else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=sorted(tags),
        **licence,
    )
    rows = {
        "base model": f"{origin.name}{f' at {origin.revision}' if origin.revision else ''}",
        "its digest": _digest(origin.base_files),
        "method": method,
        "rank and alpha": f"{config.get('r')} and {config.get('lora_alpha')}" if config else "",
        "targets": _named(config, "target_modules", "target_parameters"),
        "trained whole": _named(config, "modules_to_save"),
        "steps": str(origin.step) if origin.step is not None else "",
        "written by": f"Lockstep {VERSION}",
    }
    kind = "A PEFT adapter" if is_adapter else "A model"
    lines = ["---", head.to_yaml(), "---", "", f"# {'Adapter of' if is_adapter else 'Fine-tuned'} {origin.name}", ""]
    lines += [f"{kind}, trained by {method}.", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {printable_line(value)} |" for key, value in rows.items() if value]
    return "\n".join(lines) + "\n"


def _method(config: Mapping[str, Any]) -> str:
    words = {"use_dora": "DoRA", "use_rslora": "rank-stabilized LoRA"}
    return " and ".join(word for key, word in words.items() if config.get(key)) or "LoRA"


def _named(config: Mapping[str, Any] | None, *keys: str) -> str:
    values = [value for key in keys if (value := (config or {}).get(key))]
    return ", ".join(f"`{name}`" for value in values for name in ([value] if isinstance(value, str) else sorted(map(str, value))))


def _digest(files: Mapping[str, str]) -> str:
    """Return the SHA-256 of base_files.json, which has those of all files."""
    return f"SHA-256 {hashlib.sha256(encode_record(files)).hexdigest()} (of `base_files.json`)" if files else ""
