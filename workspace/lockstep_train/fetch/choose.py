"""Choice of the files of a model's repository that are needed to train and to use it: safetensors weights, configuration and tokenizer (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from lockstep_train.base.errors import ConfigError
from lockstep_train.fetch.remote import Choose, RemoteFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
PICKLED = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)")
TEXTS = re.compile(
    r"(?!.*\.index\.json$)([^/]+\.(json|jinja|model|tiktoken)|(merges|vocab)[^/]*\.txt|LICEN[CS]E[^/]*|additional_chat_templates/[^/]+\.jinja)"
)
"""Files needed beside weights: configuration, generation settings, tokenizer, chat templates and the license. No code: none is ever run."""
Read = Callable[[str], bytes]


def model_files(name: str) -> Choose:
    """Choose all files that training the model `name` needs. Raises ConfigError for one without safetensors weights."""

    def choose(files: Sequence[RemoteFile], read: Read) -> list[RemoteFile]:
        refuse_no_model(name, files)
        weights = _weights(name, {file.path: file for file in files}, read)
        return [file for file in files if file.path in weights or TEXTS.fullmatch(file.path)]

    return choose


def texts_only(name: str) -> Choose:
    """Choose the files without the weights, which show how data becomes tokens."""

    def choose(files: Sequence[RemoteFile], read: Read) -> list[RemoteFile]:
        refuse_no_model(name, files)
        return [file for file in files if TEXTS.fullmatch(file.path)]

    return choose


def refuse_no_model(name: str, files: Sequence[RemoteFile]) -> None:
    paths = {file.path for file in files}
    if CONFIG in paths:
        return
    if "adapter_config.json" in paths:
        raise ConfigError(f"{name} is an adapter, not a model: name its base model, and put the adapter's folder in training.lora.initFrom")
    kinds = sorted({PurePosixPath(path).suffix for path in paths if PurePosixPath(path).suffix})
    raise ConfigError(
        f"{name} has no {CONFIG}, so transformers can't load it as a model (its files: {', '.join(kinds) or 'none'}); check the name"
    )


def _weights(name: str, files: dict[str, RemoteFile], read: Read) -> set[str]:
    if SINGLE in files:
        return {SINGLE}
    if INDEX not in files:
        if any(PICKLED.fullmatch(path) for path in files):
            raise ConfigError(
                f"{name} has its weights only as pickle files, which run code when they are loaded; name a revision or a copy with safetensors files"
            )
        raise ConfigError(f"{name} has no weights: neither {SINGLE} nor {INDEX}; check the name and the revision")
    try:
        named = {str(path) for path in json.loads(read(INDEX))["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{INDEX} of {name} is not an index of weight files ({error}); name another revision") from error
    pickled = sorted(path for path in named if not path.endswith(".safetensors"))
    if pickled:
        raise ConfigError(
            f"{INDEX} of {name} names {pickled[0]}, which is not a safetensors file; name a revision or a copy of it with safetensors files"
        )
    missing = sorted(named - files.keys())
    if missing:
        raise ConfigError(f"{name} has no {missing[0]}, which its {INDEX} names; name another revision")
    return {INDEX, *named}
