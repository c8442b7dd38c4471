"""Commits in one folder, or collected from several: with per-pod storage each volume has its own ranks' shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep_train.base.errors import ConfigError, TrainerError, refusal
from lockstep_train.checkpoint.format.layout import CHAIN, MANIFEST, CommitName, parse_commit
from lockstep_train.checkpoint.format.manifest import Manifest, ShardRecord, decode, shapes
from lockstep_train.checkpoint.format.readers import reading
from lockstep_train.checkpoint.format.volume import VolumeView, candidates, merge_views, read_view, shard_problem, size_problem


@dataclass(frozen=True)
class Commit:
    """One commit, wherever its files are."""

    name: CommitName
    folders: tuple[Path, ...]
    """Its folder on each volume that has one."""

    def manifest(self) -> Manifest:
        """Read the manifest. Raises ValueError, with every folder's reason, when none has one that can be read."""
        problems = []
        for folder in self.folders:
            try:
                manifest = decode((folder / MANIFEST).read_bytes())
                shapes(manifest.shards)
                return manifest
            except (OSError, ValueError) as error:
                problems.append(f"{folder / MANIFEST}: {getattr(error, 'strerror', None) or error}")
        raise ValueError("; ".join(problems) or "it has no folder")

    def shard(self, record: ShardRecord, *, checksum: bool = True) -> tuple[Path | None, str | None]:
        """Return where the shard is, undamaged, or why it is nowhere. Without `checksum` only sizes are compared."""
        problems = []
        for folder in self.folders:
            problem = shard_problem(folder, record) if checksum else size_problem(folder, record)
            if problem is None:
                return folder / record.file, None
            problems.append((folder / record.file, problem))
        reasons = [problem for path, problem in problems if path.exists()] or [problem for _, problem in problems]
        return None, reasons[0]

    def problems(self, manifest: Manifest, *, checksum: bool = True) -> dict[str, str | None]:
        """Problem of each shard, by its file; None where it is whole."""
        return {record.file: self.shard(record, checksum=checksum)[1] for record in manifest.shards}

    def shard_paths(self, manifest: Manifest) -> list[Path]:
        """Every shard, checked. Raises ConfigError naming what is missing or damaged."""
        shards = [self.shard(record) for record in manifest.shards]
        problems = [problem for _, problem in shards if problem is not None]
        if problems:
            raise refusal(f"{self.name} can't be read: {'; '.join(problems)}", "; ".join(problems))
        return [path for path, _ in shards if path is not None]

    @contextlib.contextmanager
    def held(self, reader: str) -> Iterator[None]:
        """Keep a running job's rotation away from it. Raises ConfigError when it is gone already."""
        with contextlib.ExitStack() as stack:
            try:
                for folder in self.folders:
                    stack.enter_context(reading(folder, reader))
            except FileNotFoundError as error:
                raise ConfigError(str(error)) from error
            yield


@dataclass(frozen=True)
class Collection:
    """The commits of one run, over all the folders that were given."""

    checkpoints: tuple[Path, ...]
    view: VolumeView
    named: tuple[Path, ...] = ()
    """The folders of one commit, where those were given."""

    def commit(self, name: CommitName) -> Commit:
        return Commit(name, tuple(folder for parent in self.checkpoints if (folder := parent / str(name)).is_dir()))

    def chain(self) -> list[Commit]:
        """Commits that a start would try, newest first; or the one commit that was named."""
        if self.named:
            return [Commit(_name_of(self.named[0]), self.named)]
        return [self.commit(name) for name in candidates(self.view.commits, self.view.records)]

    def off_chain(self) -> list[Commit]:
        """Commits that no start would choose: of an attempt that others have left behind."""
        on_chain = {commit.name for commit in self.chain()}
        return [] if self.named else [self.commit(name) for name in sorted(self.view.commits, reverse=True) if name not in on_chain]


def collect(paths: Sequence[Path]) -> Collection:
    """`paths`: runs' folders, checkpoints folders, or folders of one commit. Raises ConfigError when they are none of these, or mixed."""
    named = [path for path in paths if (path / MANIFEST).is_file() or (parse_commit(path.name) is not None and path.is_dir())]
    if named:
        names = {_name_of(path) for path in named}
        if len(named) != len(paths) or len(names) != 1:
            raise ConfigError(
                f"{', '.join(map(str, paths))} are not folders of one commit; give its folder on each volume, or the runs' folders"
            )
        return Collection((), VolumeView(), tuple(named))
    checkpoints = tuple(path / "checkpoints" if (path / "checkpoints").is_dir() else path for path in paths)
    absent = [path for path in checkpoints if not path.is_dir()]
    if absent:
        raise ConfigError(f"{absent[0]} is not a folder; give a run's folder (runs/<job>), its checkpoints folder, or a step-N.aM folder")
    strangers = [path for path in paths if not _is_run(path)]
    if strangers:
        raise ConfigError(
            f"{strangers[0]} is not a run's folder: it has neither checkpoints/ nor gang/ nor step-N.aM folders; give a run's folder"
            " (runs/<job>)"
        )
    return Collection(checkpoints, merge_views(map(read_view, checkpoints)))


def _is_run(folder: Path) -> bool:
    """Return True for a run's folder, also of one that has not saved yet, and for a checkpoints folder."""
    marks = (folder / "checkpoints", folder / "gang", folder / CHAIN)
    return folder.name == "checkpoints" or any(path.is_dir() for path in marks) or any(parse_commit(path.name) for path in folder.iterdir())


def _name_of(folder: Path) -> CommitName:
    """Name of a commit by its folder, or by its manifest where the folder was renamed. Raises ConfigError."""
    name = parse_commit(folder.name)
    if name is not None:
        return name
    try:
        manifest = decode((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise refusal(f"{folder / MANIFEST} can't be read: {error}", error) from error
    return CommitName(attempt=manifest.attempt, step=manifest.step)


def newest_whole(paths: Sequence[Path], purpose: str) -> tuple[Commit, Manifest, list[Path]]:
    """The newest commit that is whole and undamaged, its manifest and its shards' files. Raises ConfigError when there is none.

    A commit that was named is the only one that is tried.
    """
    problems: list[str] = []
    for commit in collect(paths).chain():
        try:
            manifest = commit.manifest()
            return commit, manifest, commit.shard_paths(manifest)
        except (ValueError, TrainerError) as error:
            problems.append(str(error))
    where = ", ".join(map(str, paths))
    reason = "; ".join(problems) if problems else "no commits are there"
    raise refusal(f"{where} holds no commit to {purpose} ({reason}); give a run's folder, or a step-N.aM folder on each volume", reason)
