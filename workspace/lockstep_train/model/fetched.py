"""The base model fetched once on every volume, by the first rank of the first node that sees it, while the others wait at the store.

Before anything is loaded, and in no collective, so that hours of it are fine as long as bytes come.
"""

from __future__ import annotations

import json
from typing import Any

from lockstep_spec.modelnames import is_folder
from lockstep_train.base import limits
from lockstep_train.base.cache import cache_folder
from lockstep_train.base.config import RunConfig
from lockstep_train.base.errors import Problem, TrainerError, gravest, problem_of, refusal
from lockstep_train.base.limits import UNWATCHED, Watch
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.together import refused_together
from lockstep_train.base.volumes import BuildProgress, once_per_volume
from lockstep_train.fetch.fetch import Say, fetch_problem
from lockstep_train.fetch.folders import target_in
from lockstep_train.fetch.model import fetch_model, in_folder, is_fetched, record_pin, recorded_pin, remote_of, resolved_pin
from lockstep_train.report import Reporter

TOPIC = "model"


def with_model_here(config: RunConfig, ranks: Ranks, reporter: Reporter, watch: Watch = UNWATCHED) -> RunConfig:
    """The run with a folder as its model, which every node sees. Raises, on every rank alike, ConfigError or TrainerError."""
    model = config.training.model
    if is_folder(model.name):
        return config
    reporter.activity("Fetch")
    watch.begin("Fetch of the model", limits.LOAD_SECONDS)
    cache = cache_folder(config.run_dir)
    with refused_together(ranks, TOPIC):
        pin = _agreed_pin(config, ranks, reporter.say)
        remote = remote_of(model.name)
        progress = BuildProgress(ranks, watch, TOPIC, "Fetch of the model")

        def say(line: str) -> None:
            reporter.say(line)
            progress.report(line)

        outcomes, _ = once_per_volume(ranks, cache, TOPIC, progress, lambda: _attempt(config, pin, say))
        problem = gravest(Problem(*outcome["problem"]) for outcome in outcomes.values() if "problem" in outcome)
        if problem is not None:
            raise problem.error()
    folder = target_in(cache, remote.kind, model.name, pin).folder
    reporter.startup.done("fetch")
    reporter.say(f"Base model {model.name} at {pin} in {folder}")
    return in_folder(config, pin, folder)


def _attempt(config: RunConfig, pin: str, say: Say) -> dict[str, Any]:
    """Nothing, or why the model can't be had on this volume."""
    model, cache = config.training.model, cache_folder(config.run_dir)
    try:
        record_pin(config.run_dir, model, pin)
        if not is_fetched(model.name, pin, cache):
            say(f"Fetching {model.name} at {pin} into {cache}")
        fetch_model(model.name, pin, cache, say, revision=model.revision)
    except TrainerError as error:
        return {"problem": problem_of(error)}
    except OSError as error:
        return {"problem": problem_of(refusal(fetch_problem(error, config.run_dir), error))}
    return {}


def _agreed_pin(config: RunConfig, ranks: Ranks, say: Say) -> str:
    """That of an earlier start on any volume, else what the name stands for now, by the word of rank 0."""
    own = recorded_pin(config.run_dir, config.training.model) if ranks.first_of_node else None
    pins = ranks.gather(f"{TOPIC}/pins", own)
    if pins is not None:
        ranks.store.set(f"{TOPIC}/pin", json.dumps(_chosen_pin(config, pins, say)))
    ranks.wait_for(f"{TOPIC}/pin")
    answer = json.loads(ranks.store.get(f"{TOPIC}/pin"))
    if "problem" in answer:
        raise Problem(*answer["problem"]).error()
    return str(answer["pin"])


def _chosen_pin(config: RunConfig, pins: list[str | None], say: Say) -> dict[str, Any]:
    try:
        return {"pin": next((pin for pin in pins if pin is not None), None) or resolved_pin(config, say)}
    except TrainerError as error:
        return {"problem": problem_of(error)}
