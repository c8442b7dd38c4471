"""Models in the cache of a workspace: which files of a repository are needed to train and to use one, fetched there by name, and found
there again.

Needed are safetensors weights, configuration and tokenizer.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from lockstep_spec.modelnames import COMMIT, MODELS, is_address
from lockstep_train.base.errors import ConfigError, TrainerError
from lockstep_train.base.limits import Say
from lockstep_train.fetch.fetch import fetch
from lockstep_train.fetch.folders import remembered_revision, target_in, whole_record
from lockstep_train.fetch.hub import HubRepository
from lockstep_train.fetch.objects import ObjectFolder
from lockstep_train.fetch.remote import Choose, Remote, RemoteFile

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
                f"{name} has its weights only as pickle files, which run code when they are loaded; name a revision or a copy with"
                " safetensors files"
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


def model_remote(name: str) -> Remote:
    return ObjectFolder(name) if is_address(name) else HubRepository(name)


def fetch_model(name: str, pin: str, cache: Path, say: Say, *, revision: str | None = None, to: Path | None = None) -> Path:
    """Everything that training needs of the model, in a folder. Raises ConfigError, TrainerError."""
    return fetch(model_remote(name), pin, cache, say, choose=model_files(name), revision=revision, to=to).folder


def is_fetched(name: str, pin: str, cache: Path) -> bool:
    return whole_record(target_in(cache, model_remote(name).kind, name, pin).folder) is not None


def fetched_near(start: Path, name: str, revision: str | None) -> Path | None:
    """The folder of a hub's model that some folder above `start` has in its cache; None where none has."""
    for parent in start.resolve().parents:
        for pin in _pins(parent / "cache", name, revision):
            with contextlib.suppress(TrainerError):
                if is_fetched(name, pin, parent / "cache"):
                    return target_in(parent / "cache", MODELS, name, pin).folder
    return None


def _pins(cache: Path, name: str, revision: str | None) -> list[str]:
    """Commits that may be in the cache: the revision's, or all of them."""
    if revision:
        pins = [revision, remembered_revision(cache, MODELS, name, revision) or ""]
    else:
        folder = target_in(cache, MODELS, name, "x").folder.parent
        pins = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [pin for pin in pins if COMMIT.fullmatch(pin)]
