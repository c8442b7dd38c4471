"""Models in the cache of a workspace: fetched there by name, and found there again."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lockstep_spec.modelnames import COMMIT, is_address
from lockstep_train.base.errors import TrainerError
from lockstep_train.base.limits import Say
from lockstep_train.fetch.choose import model_files
from lockstep_train.fetch.fetch import fetch
from lockstep_train.fetch.folders import remembered_revision, target_in, whole_record
from lockstep_train.fetch.hub import HubRepository
from lockstep_train.fetch.objects import ObjectFolder
from lockstep_train.fetch.remote import Remote


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
