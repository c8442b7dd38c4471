"""A base model with an adapter: where it is, how it is loaded, and what it writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep_spec.modelnames import is_hub_name
from lockstep_train.base.errors import ConfigError, reason_of, refusal
from lockstep_train.checkpoint.format.layout import ADAPTER_CONFIG
from lockstep_train.fetch.model import fetched_near

OTHER_BASE = "name the model that it was trained on with --model"
CONTINUED: Mapping[str, Any] = MappingProxyType({"no_repeat_ngram_size": 3})
"""Options for text that is continued: a small model loves to repeat three words in a row."""


def write(model: Any, tokenizer: Any, ids: list[int], tokens: int, **options: Any) -> Any:
    """Return the tokens with at most `tokens` more, which the model finds likeliest after them."""
    import torch

    inputs = torch.tensor([ids], device=model.device)
    given = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "pad_token_id": tokenizer.eos_token_id}
    return model.generate(**given, **options, max_new_tokens=tokens, do_sample=False)


def base_of(adapter: Path, config: Mapping[str, Any] | None = None) -> Path:
    """Return the base model's folder, as the adapter names it, from the root or from a folder above it. Raises ConfigError.

    `config`: its adapter_config.json, where it isn't in the folder.
    """
    try:
        description = config or json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        stated, revision = description["base_model_name_or_path"], description.get("revision")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise refusal(f"{adapter / ADAPTER_CONFIG} names no base model ({error}); name its folder with --model", error) from error
    named = Path(str(stated))
    if named.is_absolute():  # (where there are no pods, a folder above stands for /workspace, or has one of that name)
        places = [above / Path(*parts) for above in adapter.resolve().parents for parts in (named.parts[1:], named.parts[2:]) if parts]
        return next((place for place in (named, *places) if place.is_dir()), named)
    if not is_hub_name(str(stated)) or named.is_dir():
        return named
    fetched = fetched_near(adapter, str(stated), revision)
    if fetched is None:
        at = "" if revision is None else f" --revision {revision}"
        raise ConfigError(
            f"the base model {stated} of {adapter} is in no cache above it; fetch it with: lockstep model get {stated}{at}, and name its"
            " folder with --model"
        )
    return fetched


def refuse_no_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {folder} holds no config.json; it must be a model's folder")


def load(folder: Path, adapter: Path | None, named: str = "") -> tuple[Any, Any]:
    """Load (model, tokenizer), on the first GPU if there is one. `named`: words for the adapter.

    Raises ConfigError when a folder isn't what it should be.
    """
    refuse_no_model(folder)
    from lockstep_train.base.imports import OF_FOLDER, import_peft
    from lockstep_train.model.load import model_class, quiet_transformers, refuse_missing_tensors

    if adapter is not None and not (adapter / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"--adapter {adapter} holds no {ADAPTER_CONFIG}; it must be a PEFT adapter's folder")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    quiet_transformers()
    import torch
    from transformers import AutoTokenizer

    from lockstep_train.model.base_files import adapter_record, refuse_other_base

    recorded = adapter_record(adapter) if adapter is not None else {}
    with ThreadPoolExecutor(1) as beside:
        trained = named or f"the adapter {adapter}"
        checked = beside.submit(refuse_other_base, folder, recorded, trained, OTHER_BASE) if recorded else None
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **OF_FOLDER)
            model, report = model_class(folder).from_pretrained(str(folder), output_loading_info=True, **OF_FOLDER)
        except Exception as error:  # whatever the folder's files lead to
            raise refusal(f"--model {folder} can't be loaded: {reason_of(error)}", error) from error
        if checked is not None:
            checked.result()
    refuse_missing_tensors(report["missing_keys"], f"--model {folder}")
    if adapter is not None:
        model = import_peft().PeftModel.from_pretrained(model, str(adapter))
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer
