"""The commits of a run's hub datasets, and what stands for the listings of its object stores: the same on every volume and in all starts of the run.

That of an earlier start on any volume counts, else what the name stands for now, by the word of rank 0: a branch that moves between two nodes' looks
would give each other data. A hub's commit is the volume's, for all runs; an object store is looked at anew for each run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep_spec.modelnames import is_address
from lockstep_spec.training import TrainingConfig
from lockstep_train.base.durable import make_directory, write_durably
from lockstep_train.base.limits import Say
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.runfile import RunConfig
from lockstep_train.data.read.remote import data_remote, remote_name
from lockstep_train.fetch.fetch import pin_of
from lockstep_train.fetch.folders import remember_revision, remembered_revision
from lockstep_train.fetch.hub import DATASETS

RemoteSource = tuple[str, str | None]
"""A dataset's name or an address, and the revision that the job states."""
PINS = "data.json"
"""File in the run's folder: what each stands for in this run. Written before anything is fetched."""


def remote_sources(training: TrainingConfig) -> list[RemoteSource]:
    """Sources that the run takes from elsewhere, each once."""
    own = training.evaluation.data if training.evaluation is not None else None
    sources: list[Any] = [training.data, *training.data.sources, *([own] if own is not None else [])]
    named = [(remote_name(source), source.revision) for source in sources]
    return list(dict.fromkeys((name, revision) for name, revision in named if name is not None))


def agreed_commits(config: RunConfig, ranks: Ranks, cache: Path, say: Say) -> dict[RemoteSource, str]:
    """The commit of each, on every rank. Raises, on all of them alike, ConfigError or TrainerError."""
    sources = remote_sources(config.training)
    if not sources:
        return {}
    own = [_earlier(each, config.run_dir, cache) for each in sources] if ranks.first_of_node else None
    answers = ranks.gather("data/commits", own)
    earlier = [answer for answer in answers or [] if answer is not None]
    commits = ranks.decide(
        "data/agreed", lambda: [_commit(*each, [commits[number] for commits in earlier], cache, say) for number, each in enumerate(sources)]
    )
    return dict(zip(sources, commits, strict=True))


def _commit(name: str, revision: str | None, commits: list[str | None], cache: Path, say: Say) -> str:
    earlier = next((commit for commit in commits if commit is not None), None)
    return earlier or pin_of(data_remote(name), None if is_address(name) else revision, cache, say)


def _earlier(source: RemoteSource, run_dir: Path, cache: Path) -> str | None:
    """Commit that an earlier start of this run had, or for a dataset of the hub any run on this volume."""
    recorded = _recorded(run_dir).get(source)
    return recorded if recorded is not None or is_address(source[0]) else remembered_revision(cache, DATASETS, *source)


def _recorded(run_dir: Path) -> dict[RemoteSource, str]:
    try:
        return {(str(name), revision): str(commit) for name, revision, commit in json.loads((run_dir / PINS).read_bytes())}
    except (OSError, ValueError, TypeError):
        return {}


def remember_commits(commits: Mapping[RemoteSource, str], run_dir: Path, cache: Path) -> None:
    """Record commits on this volume, for later starts. Raises OSError."""
    recorded = _recorded(run_dir)
    pins = {**recorded, **commits}
    if pins != recorded:
        make_directory(run_dir)
        write_durably(run_dir / PINS, json.dumps([[*source, commit] for source, commit in pins.items()]).encode())
    for (name, revision), commit in commits.items():
        if not is_address(name):
            remember_revision(cache, DATASETS, name, revision, commit)


def at_commits(config: RunConfig, commits: Mapping[RemoteSource, str]) -> RunConfig:
    """The run with these commits as the revisions of its data."""

    revisions: Mapping[Any, str] = commits

    def pinned(source: Any) -> Any:
        return replace(source, revision=revisions.get((remote_name(source), source.revision), source.revision))

    training = config.training
    data = pinned(replace(training.data, sources=tuple(map(pinned, training.data.sources))))
    evaluation = training.evaluation
    if evaluation is not None and evaluation.data is not None:
        evaluation = replace(evaluation, data=pinned(evaluation.data))
    return replace(config, training=replace(training, data=data, evaluation=evaluation))
