"""Facts for a plan from files on this machine and from the hub: a model's shape, the number of samples, an earlier run's speed."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lockstep.api.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.api.training import BaseModelSource, Training
    from lockstep.plan.ahead.forecast import Pace, RunFacts
    from lockstep.plan.render.resolved import Resolved


def moved_targets_here(training: Training, named: Path | None = None) -> str:
    """Return why the model's adapter can't have the job's targets, by a config.json on this machine; "" if it can, or there is none.
    `named`: its folder, where that isn't the job's.
    """
    from lockstep.plan.ahead.forecast import moved

    try:
        return moved(training, _config(training.model, named, offline=True)[0].get("model_type"))
    except (UnknownSizes, ConfigError):
        return ""


FIRST_STEPS = 2
"""Steps at the beginning of a run that only warm it up: left out where there are more."""


def known_facts(
    resolved: Resolved,
    model_config: Path | None = None,
    samples: str | None = None,
    tokens_per_second: str | None = None,
    *,
    offline: bool = False,
) -> RunFacts:
    """Return what is known of a run. `samples` is a number or a file to count them in, `tokens_per_second` one or a log that has it.

    `offline`: the hub isn't asked for a model's sizes. Raises ConfigError for what was named and can't be used; what wasn't named and isn't
    here stays unknown.
    """
    from lockstep.plan.ahead.forecast import Pace, RunFacts

    if resolved.training is None:
        return RunFacts()
    facts = _with_model(RunFacts(), resolved.training, model_config, offline)
    if samples is not None and samples.isdecimal() and int(samples):
        facts = replace(facts, samples=int(samples), samples_source="--samples")
    else:
        facts = _with_samples(facts, resolved.training, None if samples is None else Path(samples))
    if tokens_per_second is None:
        return facts
    try:
        pace = Pace(float(tokens_per_second), "--tokens-per-second")
    except ValueError:
        return replace(facts, pace=read_pace(Path(tokens_per_second)))
    if not 0 < pace.tokens_per_second < inf:
        raise ConfigError(f"--tokens-per-second is {tokens_per_second}; it must be more than 0, or a run's logs/train_log.jsonl")
    return replace(facts, pace=pace)


def _with_model(facts: RunFacts, training: Training, named: Path | None, offline: bool) -> RunFacts:
    from lockstep.plan.ahead.forecast import with_config

    try:
        return with_config(facts, *_config(training.model, named, offline))
    except UnknownSizes as unknown:
        return replace(facts, shape_source=str(unknown))


class UnknownSizes(Exception):
    """Raised where a model's sizes can't be read; the message says why, and what would help."""


def _config(model: BaseModelSource, named: Path | None, offline: bool) -> tuple[dict[str, Any], str]:
    """config.json and where it is: a file here, or the hub's. Raises ConfigError for a file that was named, else UnknownSizes."""
    from lockstep.platforms.jobs.hubconfig import hub_config
    from lockstep_spec.modelnames import is_hub_name

    help_ = "--model-config FILE names the model's config.json"
    of_hub = named is None and is_hub_name(model.name)
    path = named if named is not None else Path(model.name)
    try:
        path = _in_hub_cache(model) if of_hub else path
        path = path / "config.json" if path.is_dir() else path
        is_here = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # (no right to look there, a name that no path can have, or no home)
        why = getattr(error, "strerror", None) or error
        raise (ConfigError if named else UnknownSizes)(f"{path} can't be looked at ({why}): {help_}") from None
    if is_here:
        return _json(path), str(path)
    shapes = _shapes()
    built_in = shapes.get(_title(str(named or model.name)))
    if built_in is not None:
        return built_in[1], f"built-in sizes of {built_in[0]}"
    if named is not None:
        what = "a model's config.json, its folder, or a model whose sizes are built in (docs/how-to/plan.md)"
        raise ConfigError(f"--model-config {named}: there is no such file; it must be {what}")
    if of_hub and offline:
        raise UnknownSizes(f"{model.name} is a model of the hub, which --offline doesn't ask: {help_}")
    if of_hub:
        try:
            return hub_config(model.name, model.revision)
        except ConfigError as error:
            raise UnknownSizes(f"{model.name} is a model of the hub, and {error}: {help_}") from None
    alike = {title.rpartition("/")[2]: f", or --model-config {one} takes the sizes of that model" for title, (one, _) in shapes.items()}
    raise UnknownSizes(f"{model.name} is not on this machine: {help_}{alike.get(_title(path.name), '')}")


def _in_hub_cache(model: BaseModelSource) -> Path:
    """Return the folder that the hub's own cache on this machine has for a model of the hub, if it has one."""
    from lockstep_spec.files import expanded

    home = os.environ.get("HF_HOME") or expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    folder = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub") / f"models--{model.name.replace('/', '--')}"
    ref = folder / "refs" / (model.revision or "main")
    return folder / "snapshots" / (ref.read_text(encoding="utf-8").strip() if ref.is_file() else model.revision or "none")


_TUNED = re.compile(r"-(instruct|chat|thinking|base|pt|it)(?=-|$)")


def _title(name: str) -> str:
    """Return a model's name without what tells a tuned form from its base: both have one shape."""
    return _TUNED.sub("", name.lower())


def _shapes() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the built-in models and their sizes, by the title of each name that has them."""
    from lockstep.assets import asset

    shapes: dict[str, dict[str, Any]] = json.loads(asset("manifests/samples/models/shapes.json").read_text(encoding="utf-8"))
    return {_title(name): (model, config) for model, config in shapes.items() for name in (model, *config.get("also", ()))}


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object; it must be a model's config.json")
    return content


def _with_samples(facts: RunFacts, training: Training, named: Path | None) -> RunFacts:
    data = training.data
    if data.packing or data.overlong == "Split":
        why = "with packing or overlong: Split, the number of sequences depends on the tokens; --samples N states it"
        if named is not None:
            raise ConfigError(f"--samples FILE counts lines, but {why}")
        return replace(facts, samples_source=why)
    path = named if named is not None else None if data.path is None else Path(data.path)
    if path is None:
        return facts
    try:
        problem = "" if path.is_file() else "is not on this machine"
    except OSError as error:
        problem = f"can't be looked at ({error.strerror})"
    if problem:
        if named is not None:
            raise ConfigError(
                f"--samples {named}: it must be a number from 1, or a file whose samples are counted; as a file, it {problem}"
            )
        return replace(facts, samples_source=f"{path} {problem}: --samples FILE counts a copy, --samples N says how many")
    if path.suffix not in (".jsonl", ".json", ".ndjson") or data.format == "Text":
        return replace(facts, samples_source="the number of samples in plain text depends on its tokens; --samples N states it")
    with path.open("rb") as file:
        if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return replace(facts, samples_source=f"{path} is one JSON array, whose objects are not counted; --samples N says how many")
    with path.open("rb") as lines:
        return replace(facts, samples=sum(1 for line in lines if line.strip()), samples_source=f"lines of {path}")


def read_pace(path: Path) -> Pace:
    """The median of an earlier run's steps. Raises ConfigError."""
    from lockstep.plan.ahead.forecast import Pace

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
        steps = [(float(record["tokens"]), float(record["tokensPerSecond"])) for record in records if record.get("tokensPerSecond")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--tokens-per-second {path}: it must be a number, or a run's logs/train_log.jsonl; as that, it can't be read: {error}"
        ) from None
    if not steps:
        raise ConfigError(f"--tokens-per-second {path}: the file has no step with a speed")
    counted = steps[FIRST_STEPS:] or steps
    return Pace(median(speed for _, speed in counted), f"{path}, {len(counted)} steps", median(tokens for tokens, _ in counted))
