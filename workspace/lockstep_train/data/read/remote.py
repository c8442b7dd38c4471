"""Data that lie elsewhere: a dataset of the Hugging Face hub, a folder of an object store, or single objects of one. The files of a split
are fetched once a volume at a commit that is written down, and read from there ever after.

Nothing is converted: rows come straight from the files as they were published, so a dataset is on the volume once, beside its tokens.

The commits of a run's hub datasets, and what stands for the listings of its object stores, are the same on every volume and in all starts
of the run. That of an earlier start on any volume counts, else what the name stands for now, by the word of rank 0: a branch that moves
between two nodes' looks would give each other data. A hub's commit is the volume's, for all runs; an object store is looked at anew for
each run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from lockstep_spec.files import make_directory, write_durably
from lockstep_spec.modelnames import FETCHED, folder_name, is_address
from lockstep_spec.training import SamplesConfig, TrainingConfig
from lockstep_train.base.arrays import remove
from lockstep_train.base.errors import ConfigError, TrainerError
from lockstep_train.base.limits import Say
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.runfile import RunConfig
from lockstep_train.data.read.files import WILD, DataFiles, DataSource, default_split, rows_of_files, split_files
from lockstep_train.data.read.splits import CARD, DatasetLayout, layout_of, left_out, split_names
from lockstep_train.data.read.streams import JSON, TABLES, TEXT, suffix_of
from lockstep_train.fetch.fetch import fetch, pin_of
from lockstep_train.fetch.folders import remember_revision, remembered_revision, target_in
from lockstep_train.fetch.hub import DATASETS, HubRepository
from lockstep_train.fetch.objects import ObjectFolder, refuse_password
from lockstep_train.fetch.remote import Remote, RemoteFile


def remote_name(source: SamplesConfig) -> str | None:
    """The dataset's name, or the address in `path`; None for files of this machine."""
    return source.name if source.path is None else source.path if is_address(source.path) else None


def data_remote(name: str) -> Remote:
    """Remote of a dataset's name or of an address. Raises ConfigError for a pattern that can't be looked for, or an address with a
    password.
    """
    if not is_address(name):
        return HubRepository(name, DATASETS)
    return ObjectFiles(name) if names_objects(name) else ObjectFolder(name, DATASETS)


def names_objects(address: str) -> bool:
    """Return True if an address is of objects, by a data file's name or a pattern at its end, and not of a folder."""
    return bool(WILD & set(address)) or suffix_of(PurePosixPath(address)) in {*JSON, *TABLES, TEXT}


class ObjectFiles(ObjectFolder):
    """The objects of one folder whose names are that of `address`, or match it: s3://bucket/texts/*.parquet. No others are looked at."""

    def __init__(self, address: str) -> None:
        refuse_password(address)
        folder, _, self._pattern = address.rpartition("/")
        if WILD & set(folder) or folder.endswith("/"):
            raise ConfigError(
                f"{address} is not a valid pattern: only the last part of an address may contain *, ? or [, as in"
                " s3://bucket/folder/*.parquet"
            )
        super().__init__(folder, DATASETS)
        self.name = address

    def _infos(self, system: Any, root: str) -> Sequence[Any]:
        from pyarrow import fs

        if WILD & set(self._pattern):
            infos = system.get_file_info(fs.FileSelector(root))
            hidden = self._pattern.startswith(".")  # only a pattern that names such files matches them, as in a shell
            matches = [info for info in infos if info.is_file and fnmatchcase(info.base_name, self._pattern)]
            matches = [info for info in matches if hidden or not info.base_name.startswith(".")]
        else:
            matches = [info for info in system.get_file_info([f"{root}/{self._pattern}"]) if info.is_file]
        if not matches:
            raise FileNotFoundError(self.name)
        return matches


Samples = TypeVar("Samples", bound=SamplesConfig)
RemoteSource = tuple[str, str | None]
"""A dataset's name or an address, and the revision that the job states."""
PINS = "data.json"
"""File in the run's folder: what each stands for in this run. Written before anything is fetched."""


def remote_sources(training: TrainingConfig) -> list[RemoteSource]:
    """Sources that the run takes from elsewhere, each once."""
    own = training.evaluation.data if training.evaluation is not None else None
    sources: list[SamplesConfig] = [training.data, *training.data.sources, *([own] if own is not None else [])]
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

    def pinned(source: Samples) -> Samples:
        return replace(source, revision=commits.get((remote_name(source) or "", source.revision), source.revision))

    training = config.training
    data = pinned(replace(training.data, sources=tuple(map(pinned, training.data.sources))))
    evaluation = training.evaluation
    if evaluation is not None and evaluation.data is not None:
        evaluation = replace(evaluation, data=pinned(evaluation.data))
    return replace(config, training=replace(training, data=data, evaluation=evaluation))


def _data_source(source: SamplesConfig, config: str | None, split: str | None, commit: str, files: DataFiles) -> DataSource:
    """A split of a dataset, or objects of a store, at a commit; without a split all rows of single objects."""
    name = remote_name(source) or ""
    title = name + (f"/{config}" if config is not None else "") + (f"[{split}]" if split is not None else "")
    facts = [name, config, split, commit, *([source.columns] if source.columns is not None else [])]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return DataSource(title, digest, files.plain_text, source.weight, files.samples, f"{title}@{commit}")


def hub_dataset(source: SamplesConfig, cache: Path, say: Say) -> DataSource:
    """The dataset on this volume, fetched now if it never was. Its commit is that of the first time, unless a revision is stated that is
    one.

    Raises ConfigError for a name, config or split that the hub doesn't have, TrainerError for a network or a volume with which it may work
    later.
    """
    name = remote_name(source) or ""
    remote = data_remote(name)
    commit = _stated_commit(remote, source, cache, say)
    if source.path is not None and names_objects(source.path):  # unlike hub datasets and folders, it has no splits
        folder = fetch(remote, commit, cache, say).folder
        paths = sorted(path for path in folder.iterdir() if path.name != FETCHED)
        say(f"Data {name}, {len(paths):,} files, as they were at {commit}")
        files = rows_of_files(paths, source, say)
        return _data_source(source, None, None if files.is_whole else source.split, commit, files)
    layout, folder = _fetched(remote, commit, source, cache, say)
    remember_revision(cache, DATASETS, name, source.revision, commit)
    split = source.split or default_split(layout)
    say(f"Dataset {name}{f', config {layout.config}' if layout.config else ''}, split {split}, revision {commit}")
    return _data_source(source, layout.config, split, commit, split_files(layout, folder, source, say))


def _stated_commit(remote: Remote, source: SamplesConfig, cache: Path, say: Say) -> str:
    """The hub's commit, or what stands for an object store's listing: stated by who has agreed on it, or looked up now."""
    if is_address(remote.name):
        return source.revision or pin_of(remote, None, cache, say)
    return remembered_revision(cache, DATASETS, remote.name, source.revision) or pin_of(remote, source.revision, cache, say)


def _fetched(remote: Remote, commit: str, source: SamplesConfig, cache: Path, say: Say) -> tuple[DatasetLayout, Path]:
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
