"""The base model of a run: a folder, or a name whose files are fetched into the workspace's cache, pinned for all starts of the run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep_spec.modelnames import COMMIT, is_address, is_folder
from lockstep_train.base.cache import cache_folder
from lockstep_train.base.config import ModelConfig, Origin, RunConfig
from lockstep_train.base.durable import make_directory, write_durably
from lockstep_train.base.errors import TrainerError
from lockstep_train.checkpoint.format.layout import MANIFEST
from lockstep_train.fetch.choose import model_files, texts_only
from lockstep_train.fetch.fetch import Say, fetch, pin_of
from lockstep_train.fetch.folders import remembered_revision, target_in, whole_record
from lockstep_train.fetch.hub import HubRepository
from lockstep_train.fetch.objects import ObjectFolder
from lockstep_train.fetch.remote import Remote

PIN = "model.json"
"""In the run's folder: which commit its model is. Written before anything is fetched, so that a branch that moves changes no run."""
TEXTS = "-texts"


def remote_of(name: str) -> Remote:
    return ObjectFolder(name) if is_address(name) else HubRepository(name)


def fetch_model(name: str, pin: str, cache: Path, say: Say, *, revision: str | None = None, to: Path | None = None) -> Path:
    """Everything that training needs of the model, in a folder. Raises ConfigError, TrainerError."""
    return fetch(remote_of(name), pin, cache, say, choose=model_files(name), revision=revision, to=to).folder


def is_fetched(name: str, pin: str, cache: Path) -> bool:
    return whole_record(target_in(cache, remote_of(name).kind, name, pin).folder) is not None


def recorded_pin(run_dir: Path, model: ModelConfig) -> str | None:
    """What an earlier start of the run has resolved; None where there was none, or the run names another model now."""
    return _pin_in(run_dir / PIN, model, lambda record: record)


def pin_of_commit(resume_from: str, model: ModelConfig) -> str | None:
    """What the checkpoint that the run goes on from was trained with, where the job names one."""
    if not resume_from.startswith("/"):
        return None
    return _pin_in(Path(resume_from) / MANIFEST, model, lambda manifest: manifest["baseOrigin"])


def _pin_in(path: Path, model: ModelConfig, record_of: Callable[[Any], Any]) -> str | None:
    try:
        record = record_of(json.loads(path.read_bytes()))
        return str(record["pin"]) if (record["name"], record["revision"]) == (model.name, model.revision) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def record_pin(run_dir: Path, model: ModelConfig, pin: str) -> None:
    """Durable before this returns. Raises OSError."""
    if recorded_pin(run_dir, model) != pin:
        make_directory(run_dir)
        write_durably(run_dir / PIN, json.dumps({"name": model.name, "revision": model.revision, "pin": pin}).encode())


def resolved_pin(config: RunConfig, say: Say) -> str:
    """For a first start. Raises ConfigError, TrainerError."""
    model = config.training.model
    earlier = pin_of_commit(config.training.checkpoint.resume_from, model)
    return earlier or pin_of(remote_of(model.name), model.revision, cache_folder(config.run_dir), say)


def in_folder(config: RunConfig, pin: str, folder: Path) -> RunConfig:
    """The run with the fetched folder as its model."""
    model = config.training.model
    origin = Origin(model.name, model.revision, pin)
    return replace(config, training=replace(config.training, model=replace(model, name=str(folder))), origin=origin)


def with_tokenizer_here(config: RunConfig, say: Say) -> RunConfig:
    """For a look at the data, by one process: the model's folder, where it is there, else one of its files without the weights."""
    model = config.training.model
    if is_folder(model.name):
        return config
    cache = cache_folder(config.run_dir)
    pin = recorded_pin(config.run_dir, model) or resolved_pin(config, say)
    if is_fetched(model.name, pin, cache):
        return in_folder(config, pin, target_in(cache, remote_of(model.name).kind, model.name, pin).folder)
    return in_folder(config, pin, fetch(remote_of(model.name), pin, cache, say, choose=texts_only(model.name), part=TEXTS).folder)


def described(adapter: Mapping[str, Any], origin: Origin | None) -> dict[str, Any]:
    """What a manifest says of an adapter, its base model by the hub's name where it has one: as PEFT finds it on any machine."""
    if origin is None or is_address(origin.name) or adapter.get("config") is None:
        return dict(adapter)
    return {**adapter, "config": {**adapter["config"], "base_model_name_or_path": origin.name, "revision": origin.pin}}


def fetched_near(start: Path, name: str, revision: str | None) -> Path | None:
    """The folder of a hub's model that some folder above `start` has in its cache; None where none has."""
    for parent in start.resolve().parents:
        for pin in _pins(parent / "cache", name, revision):
            with contextlib.suppress(TrainerError):
                if is_fetched(name, pin, parent / "cache"):
                    return target_in(parent / "cache", HubRepository(name).kind, name, pin).folder
    return None


def _pins(cache: Path, name: str, revision: str | None) -> list[str]:
    """Commits that may be in the cache: the revision's, or all of them."""
    kind = HubRepository(name).kind
    if revision:
        pins = [revision, remembered_revision(cache, kind, name, revision) or ""]
    else:
        folder = target_in(cache, kind, name, "x").folder.parent
        pins = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [pin for pin in pins if COMMIT.fullmatch(pin)]
