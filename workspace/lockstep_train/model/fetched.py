"""The base model of a run: a folder, or a name whose files are fetched into the workspace's cache, pinned for all starts of the run.

It is fetched once on every volume, by one rank while the others wait at the store: before anything is loaded, and in no collective, so
that hours of it are fine as long as bytes come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep_spec.files import make_directory, write_durably
from lockstep_spec.modelnames import is_address, is_folder
from lockstep_spec.training import ModelConfig
from lockstep_train.base import limits
from lockstep_train.base.cache import cache_folder
from lockstep_train.base.errors import refusal
from lockstep_train.base.limits import UNWATCHED, Say, Watch
from lockstep_train.base.ranks import Ranks, refused_together
from lockstep_train.base.runfile import Origin, RunConfig
from lockstep_train.base.volumes import BuildProgress, once_per_volume
from lockstep_train.checkpoint.format.layout import MANIFEST
from lockstep_train.fetch.fetch import fetch, fetch_problem, pin_of
from lockstep_train.fetch.folders import target_in
from lockstep_train.fetch.model import fetch_model, is_fetched, model_remote, texts_only
from lockstep_train.report import Reporter

TOPIC = "model"
PIN = "model.json"
"""File in the run's folder: the commit of its model. Written before anything is fetched, so that a branch that moves changes no run."""
TEXTS = "-texts"


def with_model_here(config: RunConfig, ranks: Ranks, reporter: Reporter, watch: Watch = UNWATCHED) -> RunConfig:
    """Give the run a folder as its model, which every node sees. Raises, on every rank alike, ConfigError or TrainerError."""
    model = config.training.model
    if is_folder(model.name):
        return config
    reporter.activity("Fetch")
    watch.begin("Fetch of the model", limits.LOAD_SECONDS)
    cache = cache_folder(config.run_dir)
    with refused_together(ranks, TOPIC):
        pin = _agreed_pin(config, ranks, reporter.say)
        remote = model_remote(model.name)
        progress = BuildProgress(ranks, watch, reporter.say, TOPIC, "Fetch of the model")
        once_per_volume(ranks, cache, TOPIC, progress, lambda: _fetch_here(config, pin, progress.report))
    folder = target_in(cache, remote.kind, model.name, pin).folder
    reporter.startup.done("fetch")
    reporter.say(f"Base model {model.name} at {pin} in {folder}")
    return with_model_folder(config, pin, folder)


def _fetch_here(config: RunConfig, pin: str, say: Say) -> None:
    """Fetch the model to this volume. Raises ConfigError, TrainerError."""
    model, cache = config.training.model, cache_folder(config.run_dir)
    try:
        record_pin(config.run_dir, model, pin)
        if not is_fetched(model.name, pin, cache):
            say(f"Fetching {model.name} at {pin} into {cache}")
        fetch_model(model.name, pin, cache, say, revision=model.revision)
    except OSError as error:
        raise refusal(fetch_problem(error, config.run_dir), error) from error


def _agreed_pin(config: RunConfig, ranks: Ranks, say: Say) -> str:
    """Pin of an earlier start on any volume, else what the name stands for now, by the word of rank 0."""
    own = recorded_pin(config.run_dir, config.training.model) if ranks.first_of_node else None
    pins = ranks.gather(f"{TOPIC}/pins", own)
    earlier = next((pin for pin in pins or [] if pin is not None), None)
    return str(ranks.decide(f"{TOPIC}/pin", lambda: earlier or resolved_pin(config, say)))


def recorded_pin(run_dir: Path, model: ModelConfig) -> str | None:
    """Pin that an earlier start of the run has resolved; None where there was none, or the run names another model now."""
    return _pin_in(run_dir / PIN, model, lambda record: record)


def pin_of_commit(resume_from: str, model: ModelConfig) -> str | None:
    """Pin that the checkpoint that the run goes on from was trained with, where the job names one."""
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
    """Record the pin durably. Raises OSError."""
    if recorded_pin(run_dir, model) != pin:
        make_directory(run_dir)
        write_durably(run_dir / PIN, json.dumps({"name": model.name, "revision": model.revision, "pin": pin}).encode())


def resolved_pin(config: RunConfig, say: Say) -> str:
    """Resolve the pin for a first start. Raises ConfigError, TrainerError."""
    model = config.training.model
    earlier = pin_of_commit(config.training.checkpoint.resume_from, model)
    return earlier or pin_of(model_remote(model.name), model.revision, cache_folder(config.run_dir), say)


def with_model_folder(config: RunConfig, pin: str, folder: Path) -> RunConfig:
    """The run with the fetched folder as its model."""
    model = config.training.model
    origin = Origin(model.name, model.revision, pin)
    return replace(config, training=replace(config.training, model=replace(model, name=str(folder))), origin=origin)


def with_tokenizer_here(config: RunConfig, say: Say) -> RunConfig:
    """Give the run a tokenizer for a look at the data, by one process: the model's folder, where it is there, else one of its files without
    the weights.
    """
    model = config.training.model
    if is_folder(model.name):
        return config
    cache = cache_folder(config.run_dir)
    pin = recorded_pin(config.run_dir, model) or resolved_pin(config, say)
    if is_fetched(model.name, pin, cache):
        return with_model_folder(config, pin, target_in(cache, model_remote(model.name).kind, model.name, pin).folder)
    return with_model_folder(
        config, pin, fetch(model_remote(model.name), pin, cache, say, choose=texts_only(model.name), part=TEXTS).folder
    )


def with_base_name(adapter: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Description of an adapter in a manifest, with its base model by the hub's name, as PEFT finds it on any machine, or as the job names
    its folder.
    """
    base, origin = {}, config.origin
    if origin is not None and not is_address(origin.name):
        base = {"base_model_name_or_path": origin.name, "revision": origin.pin}
    elif is_folder(config.stated_model):
        base = {"base_model_name_or_path": config.stated_model}
    return dict(adapter) if adapter.get("config") is None else {**adapter, "config": {**adapter["config"], **base}}
