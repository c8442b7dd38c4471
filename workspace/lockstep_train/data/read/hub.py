"""Datasets of the Hugging Face hub, and data of object stores: the files of a split, fetched once a volume at a commit that is written down, and read from there ever after.

Nothing is converted: rows come straight from the files as they were published, so a dataset is on the volume once, beside its tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep_spec.modelnames import FETCHED, folder_name, is_address
from lockstep_spec.training import SourceConfig
from lockstep_train.base.arrays import remove
from lockstep_train.base.durable import make_directory, write_durably
from lockstep_train.base.errors import TrainerError
from lockstep_train.base.limits import Say
from lockstep_train.data.read.files import DataFiles, default_split, rows_of_files, split_files
from lockstep_train.data.read.remote import data_remote, is_folder_like, remote_name
from lockstep_train.data.read.splits import CARD, DatasetLayout, layout_of, left_out, split_names
from lockstep_train.fetch.fetch import fetch, pin_of
from lockstep_train.fetch.folders import remember_revision, remembered_revision, target_in
from lockstep_train.fetch.hub import DATASETS
from lockstep_train.fetch.remote import Remote, RemoteFile


@dataclass(frozen=True)
class HubDataset:
    """A split of a dataset, or objects of a store, on this volume."""

    name: str
    config: str | None
    split: str | None
    """None: all rows of single objects."""
    revision: str
    """The commit."""
    files: DataFiles

    @property
    def title(self) -> str:
        config = f"/{self.config}" if self.config is not None else ""
        return f"{self.name}{config}" + (f"[{self.split}]" if self.split is not None else "")

    @property
    def pinned(self) -> str:
        return f"{self.title}@{self.revision}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.name, self.config, self.split, self.revision]).encode()).hexdigest()


def hub_dataset(source: SourceConfig, cache: Path, say: Say) -> HubDataset:
    """The dataset on this volume, fetched now if it never was. Its commit is that of the first time, unless a revision is stated that is one.

    Raises ConfigError for a name, config or split that the hub doesn't have, TrainerError for a network or a volume with which it may work later.
    """
    name = remote_name(source) or ""
    remote = data_remote(name)
    commit = _commit(remote, source, cache, say)
    if not is_folder_like(source):
        folder = fetch(remote, commit, cache, say).folder
        paths = sorted(path for path in folder.iterdir() if path.name != FETCHED)
        say(f"Data {name}, {len(paths):,} files, as they were at {commit}")
        files = rows_of_files(paths, source, say)
        return HubDataset(name, None, None if files.is_whole else source.split, commit, files)
    layout, folder = _fetched(remote, commit, source, cache, say)
    remember_revision(cache, DATASETS, name, source.revision, commit)
    split = source.split or default_split(layout)
    say(f"Dataset {name}{f', config {layout.config}' if layout.config else ''}, split {split}, revision {commit}")
    return HubDataset(name, layout.config, split, commit, split_files(layout, folder, source, say))


def _commit(remote: Remote, source: SourceConfig, cache: Path, say: Say) -> str:
    """The hub's commit, or what stands for an object store's listing: stated by who has agreed on it, or looked up now."""
    if is_address(remote.name):
        return source.revision or pin_of(remote, None, cache, say)
    return remembered_revision(cache, DATASETS, remote.name, source.revision) or pin_of(remote, source.revision, cache, say)


def _fetched(remote: Remote, commit: str, source: SourceConfig, cache: Path, say: Say) -> tuple[DatasetLayout, Path]:
    """Fetch a split; the layout of all files, and the folder with those of the split. Each config and split has a folder of its own."""
    splits = sorted(split_names(source.split)) if source.split is not None else None
    part = "-" + hashlib.sha256(json.dumps([source.config, splits]).encode()).hexdigest()[:16]
    note = cache / DATASETS / folder_name(remote.name) / "layouts" / f"{commit}{part}.json"
    what = f"the {'folder' if is_address(remote.name) else 'dataset'} {remote.name}"

    def choose(files: Sequence[RemoteFile], read: Callable[[str], bytes]) -> list[RemoteFile]:
        names = [file.path for file in files]
        layout = layout_of(what, names, read(CARD) if CARD in names else None, source.config)
        for line in left_out(layout, names):
            say(line)
        chosen = {file for split in split_names(source.split or default_split(layout)) for file in layout.files(split)}
        make_directory(note.parent)
        write_durably(note, json.dumps(asdict(layout), indent=1).encode())
        return [file for file in files if file.path in chosen]

    if _noted(note, what) is None:
        remove(target_in(cache, DATASETS, remote.name, commit, part).folder)
    fetched = fetch(remote, commit, cache, say, choose=choose, part=part, revision=source.revision)
    layout = _noted(note, what)
    if layout is None:
        raise TrainerError(f"{note} can't be read, though it was just written; check the volume and start again")
    return layout, fetched.folder


def _noted(note: Path, what: str) -> DatasetLayout | None:
    """The layout as it was when the files were chosen; None where the note is gone."""
    try:
        value: dict[str, Any] = json.loads(note.read_bytes())
        splits = {str(split): tuple(files) for split, files in value["splits"].items()}
        return DatasetLayout(what, value["config"], splits, value["separator"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
