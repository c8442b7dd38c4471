"""Splits and configurations of a folder or of a hub's repository: by the rules of `datasets`, from the files' names alone.

`datasets` is asked with a folder of empty files that have these names, and the README.md, whose head may name configurations. So the same
rules hold for a folder, for a repository before anything of it is fetched, and for an object store.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep_spec.words import listed
from lockstep_train.base.errors import ConfigError, first_line
from lockstep_train.data.read.streams import JSON, TABLES, suffix_of

CARD = "README.md"
READABLE = {"parquet", "arrow", "csv", "json", "text"}
"""Builders of `datasets` whose files Lockstep reads."""
NO_DATA = {"state.json"}
"""Files that `save_to_disk` of `datasets` puts beside the data, and its own rules don't leave out."""
ABOUT_DATA = {*NO_DATA, "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
"""Files that are named as data are, and hold none."""


@dataclass(frozen=True)
class DatasetLayout:
    """Splits of one configuration."""

    what: str
    """Name in messages: `the dataset org/name`, `the folder /datasets/x`."""
    config: str | None
    splits: Mapping[str, tuple[str, ...]]
    """Split → its files, in the order in which they are read."""
    separator: str | None = None
    """Separator of CSV files, where the README.md states it."""

    def files(self, split: str) -> tuple[str, ...]:
        """Files of a split by name. Raises ConfigError, naming those that there are."""
        if split not in self.splits:
            of = f" (config {self.config})" if self.config is not None else ""
            raise ConfigError(f"{self.what}{of} has no split {split}; it has {one_of(self.splits)}")
        return self.splits[split]


def layout_of(what: str, names: Sequence[str], card: bytes | None, config: str | None) -> DatasetLayout:
    """`names`: paths below the root; `card`: the content of README.md. Raises ConfigError."""
    script = f"{PurePosixPath(what.rsplit(maxsplit=1)[-1]).name}.py"
    if script in names:
        raise ConfigError(
            f"{what} needs a loading script of its own ({script}), and such scripts are no longer run; use the hub's Parquet copy:"
            " revision: refs/convert/parquet, and config: the name of one of the copy's folders"
        )
    with tempfile.TemporaryDirectory(prefix="lockstep-layout-") as folder:
        root = Path(folder).resolve() / "data"
        root.mkdir()
        for name in names:
            if PurePosixPath(name).name not in NO_DATA:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).touch()
        if card is not None:
            (root / CARD).write_bytes(card)
        return _layout_in(what, root, config, Path(folder) / "cache")


def left_out(layout: DatasetLayout, names: Sequence[str]) -> list[str]:
    """Warn of files that look like data and are of no split, in a line or none; none where a configuration was chosen, for the others are
    meant to be left out.
    """
    used = {file for files in layout.splits.values() for file in files}
    others = [name for name in names if name not in used and _looks_like_data(PurePosixPath(name))] if layout.config is None else []
    if not others:
        return []
    return [
        f"WARNING: {layout.what}: left out {len(others):,} files that look like data and are of no split: {one_of(others)}; "
        "by the rules of Hugging Face datasets, a folder's files are of one kind, and their suffixes in lower case"
    ]


def _looks_like_data(path: PurePosixPath) -> bool:
    is_hidden = any(part.startswith((".", "__")) for part in path.parts)
    return not is_hidden and path.name not in ABOUT_DATA and suffix_of(path) in {*TABLES, *JSON}


def _layout_in(what: str, root: Path, config: str | None, cache: Path) -> DatasetLayout:
    import datasets

    datasets.logging.set_verbosity_error()  # it warns of settings of a README.md that concern no name
    try:
        configs = datasets.get_dataset_config_names(str(root))
        if config is None or config in configs:
            chosen = config or datasets.get_dataset_default_config_name(str(root))
            if chosen is None:
                raise ConfigError(f"{what} has several configs; set config to {one_of(configs)}")
            builder = datasets.load_dataset_builder(str(root), chosen, cache_dir=str(cache))
        elif (root / config).is_dir() and configs == ["default"]:
            builder = datasets.load_dataset_builder(str(root), data_dir=config, cache_dir=str(cache))
        else:
            raise ConfigError(f"{what} has no config {config}; it has {one_of(configs)}")
    except (FileNotFoundError, ValueError) as error:  # EmptyDatasetError, DataFilesNotFoundError, a README.md that isn't valid
        raise ConfigError(
            f"{what} has no data files that can be read (Parquet, Arrow, CSV, TSV, JSON or text): {first_line(error)}"
        ) from error
    kind = type(builder).__module__.rsplit(".", maxsplit=1)[-1]
    if kind not in READABLE:
        raise ConfigError(f"{what} holds {kind} files; Parquet, Arrow, CSV, TSV, JSON and text can be read")
    splits = {str(split): _below(what, root, paths) for split, paths in (builder.config.data_files or {}).items()}
    named = config if config is not None else None if configs == ["default"] else str(builder.config.name)
    return DatasetLayout(what, named, splits, _separator(builder.config))


def _below(what: str, root: Path, paths: Collection[Any]) -> tuple[str, ...]:
    try:
        return tuple(str(Path(path).relative_to(root)) for path in paths)
    except ValueError as error:
        raise ConfigError(
            f"the README.md of {what} names files elsewhere: {first_line(error)}; fetch them, and name them in data.path"
        ) from error


def _separator(config: Any) -> str | None:
    separator = getattr(config, "sep", None)
    return None if separator == "," else separator


def one_of(names: Collection[str]) -> str:
    """Names for a sentence, the first of them where there are many."""
    return listed(sorted(map(str, names)))


PART = re.compile(r"\s*(?P<name>\w+(\.\w+)*)\s*(?P<slice>\[[^\]]*\])?\s*")


def split_names(split: str) -> list[str]:
    """Splits that `train`, `train[:10%]`, `train+test` name. Raises ConfigError."""
    parts = [PART.fullmatch(part) for part in split.split("+")]
    if any(part is None for part in parts):
        raise ConfigError(f"the split {split} can't be understood; write train, train[:1000], train[10%:20%] or train+validation")
    return [part["name"] for part in parts if part is not None]
