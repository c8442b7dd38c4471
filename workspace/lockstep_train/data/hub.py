"""Datasets of the Hugging Face hub: downloaded once a volume at a revision that is written down, and read from there ever after."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_train.checkpoint.durable import make_directory, sync_directory, write_durably
from lockstep_train.config import SourceConfig
from lockstep_train.data.arrays import remove_abandoned
from lockstep_train.data.read import AnySample, Broken, sample_of
from lockstep_train.errors import ConfigError, first_line

RECORD = "lockstep.json"
ROWS = "rows"

Download = Callable[[str, str, str | None, Path], str]
"""(name, split, revision or None for the newest, folder to save the rows in) → the revision's commit."""


@dataclass(frozen=True)
class HubDataset:
    """A dataset on this volume."""

    name: str
    split: str
    revision: str
    folder: Path

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.name, self.split, self.revision]).encode()).hexdigest()

    def samples(self, broken: Broken) -> Iterator[AnySample]:
        """A sample a row, rows counted from 1 as lines are."""
        import datasets

        for number, row in enumerate(datasets.load_from_disk(str(self.folder / ROWS)), start=1):
            try:
                yield sample_of({key: without_nulls(value) for key, value in row.items()}, number)
            except ValueError as error:
                broken.add(number, str(error))


def without_nulls(value: Any) -> Any:
    """Of an object all keys that have a value. Tables give each object of a column the keys of all of them, and a template would render those
    as if somebody had written null. What stands in a list keeps its place."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def download(name: str, split: str, revision: str | None, folder: Path) -> str:
    """The revision is pinned before anything is read: what is newest may change meanwhile."""
    import datasets
    from huggingface_hub import HfApi

    commit = HfApi().dataset_info(name, revision=revision).sha
    if commit is None:
        raise ConfigError(f"the hub tells no revision of the dataset {name}; state training.data.revision")
    rows = datasets.load_dataset(name, split=split, revision=commit, cache_dir=str(folder / "downloads"))
    rows.save_to_disk(str(folder / ROWS))
    shutil.rmtree(folder / "downloads", ignore_errors=True)
    return str(commit)


def hub_dataset(source: SourceConfig, cache: Path, say: Callable[[str], None], fetch: Download = download) -> HubDataset:
    """The dataset on this volume, downloaded now if it never was. Raises ConfigError when it isn't here and can't be fetched."""
    name = source.name or ""
    asked = hashlib.sha256(json.dumps([name, source.split, source.revision]).encode()).hexdigest()[:32]
    folder = cache / "hub" / asked
    remove_abandoned(folder)
    commit = recorded_revision(folder)
    if commit is None:
        say(f"Downloading the dataset {name}, split {source.split}, into {folder}")
        commit = _fetch(source, folder, fetch)
    say(f"Dataset {name}, split {source.split}, revision {commit}")
    return HubDataset(name, source.split, commit, folder)


def recorded_revision(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / RECORD).read_bytes())["revision"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _fetch(source: SourceConfig, folder: Path, fetch: Download) -> str:
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    make_directory(temporary)
    try:
        commit = fetch(source.name or "", source.split, source.revision, temporary)
        record: dict[str, Any] = {"name": source.name, "split": source.split, "asked": source.revision, "revision": commit}
        write_durably(temporary / RECORD, json.dumps(record).encode())
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)  # it has no readable record
        temporary.rename(folder)
        sync_directory(folder.parent)
    except ConfigError:
        raise
    except Exception as error:  # the libraries raise a dozen kinds for a network, a name, a split and a token
        reason = first_line(error) or type(error).__name__
        raise ConfigError(
            f"the dataset {source.name} (split {source.split}) is not on this volume yet and can't be fetched from the hub: {reason}; "
            "check the name, and HF_TOKEN if it is private; without a network put its rows into a JSONL file and set training.data.path"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return commit
