"""Data that lie elsewhere: a dataset of the hub, a folder of an object store, or single objects of one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from lockstep_spec.modelnames import is_address
from lockstep_spec.training import SourceConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.data.read.files import WILD
from lockstep_train.data.read.streams import JSON, TABLES, TEXT, suffix_of
from lockstep_train.fetch.hub import DATASETS, HubRepository
from lockstep_train.fetch.objects import READERS, ObjectFolder, refuse_password, remote_file
from lockstep_train.fetch.remote import Remote, RemoteFile


def remote_name(source: Any) -> str | None:
    """The dataset's name, or the address in `path`; None for files of this machine."""
    return source.name if source.path is None else source.path if is_address(source.path) else None


def data_remote(name: str) -> Remote:
    """Remote of a dataset's name or of an address. Raises ConfigError for a pattern that can't be looked for, or an address with a password."""
    if not is_address(name):
        return HubRepository(name, DATASETS)
    return ObjectFiles(name) if names_objects(name) else ObjectFolder(name, DATASETS)


def names_objects(address: str) -> bool:
    """Return True if an address is of objects, by a data file's name or a pattern at its end, and not of a folder."""
    return bool(WILD & set(address)) or suffix_of(PurePosixPath(address)) in {*JSON, *TABLES, TEXT}


def is_folder_like(source: SourceConfig) -> bool:
    """Return True if a source is divided into splits: hub datasets and folders are."""
    return source.path is None or not names_objects(source.path)


class ObjectFiles(ObjectFolder):
    """The objects of one folder whose names are that of `address`, or match it: s3://bucket/texts/*.parquet. No others are looked at."""

    def __init__(self, address: str) -> None:
        refuse_password(address)
        folder, _, self._pattern = address.rpartition("/")
        if WILD & set(folder) or folder.endswith("/"):
            raise ConfigError(
                f"{address} is not a valid pattern: only the last part of an address may contain *, ? or [, as in s3://bucket/folder/*.parquet"
            )
        super().__init__(folder, DATASETS)
        self._address = address

    @property
    def name(self) -> str:
        return self._address

    def _list(self) -> list[RemoteFile]:
        system, root = self._system()
        try:
            infos = self._infos(system, root)
            if not infos:
                raise FileNotFoundError(self._address)
            with ThreadPoolExecutor(READERS) as pool:
                return sorted(pool.map(lambda info: remote_file(system, root, info), infos), key=lambda file: file.path)
        except OSError as error:
            raise self._problem(error) from error

    def _infos(self, system: Any, root: str) -> Sequence[Any]:
        from pyarrow import fs

        if WILD & set(self._pattern):
            infos = system.get_file_info(fs.FileSelector(root))
            hidden = self._pattern.startswith(".")  # only a pattern that names such files matches them, as in a shell
            matches = [info for info in infos if info.is_file and fnmatchcase(info.base_name, self._pattern)]
            return [info for info in matches if hidden or not info.base_name.startswith(".")]
        return [info for info in system.get_file_info([f"{root}/{self._pattern}"]) if info.is_file]
