"""One save: snapshot, write, commit, rotate. No collective anywhere in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep_train.checkpoint import commit
from lockstep_train.checkpoint.layout import CommitName
from lockstep_train.checkpoint.manifest import Manifest, ShardRecord, encode
from lockstep_train.checkpoint.rotation import Rotation
from lockstep_train.checkpoint.snapshot import Snapshot, take_snapshot
from lockstep_train.checkpoint.write import write_shard
from lockstep_train.checkpoint.zero_access import fragments
from lockstep_train.engine.ranks import Ranks


@dataclass(frozen=True)
class Saved:
    """What a finished save reports. On ranks that don't wait for the commit, `problem` and `committed` say nothing yet."""

    folder: Path
    bytes: int
    seconds: float
    committed: bool
    problem: str | None


class Saver:
    """Saves of one attempt. The three steps of a save are methods of their own, so that the last two can leave this thread."""

    def __init__(self, ranks: Ranks, checkpoints: Path, attempt: int, keep: int, describe: Callable[[int], Manifest]) -> None:
        """`describe(step)` gives the manifest without its shards."""
        self._ranks = ranks
        self._checkpoints = checkpoints
        self._attempt = attempt
        self._rotation = Rotation(checkpoints, keep)
        self._describe = describe
        self._snapshot: Snapshot | None = None
        self.last_step: int | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is still under way."""
        return False

    def before_update(self) -> None:
        """Returns when the snapshot has what it needs of masters and moments."""

    def save(self, engine: Any, step: int, wait: bool) -> Saved:
        """Save `step`. With `wait`, every rank returns only when it is committed or has failed; else only rank 0 waits."""
        started = time.monotonic()
        manifest = self._describe(step)
        self._snapshot = take_snapshot(list(fragments(engine)), into=self._snapshot)
        folder = self._checkpoints / str(CommitName(attempt=self._attempt, step=step))
        self._write(folder, self._snapshot)
        ended = self._commit(folder, manifest, wait)
        self.last_step = step
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._snapshot.tensors.values())
        return Saved(folder, size, time.monotonic() - started, ended.committed, ended.problem)

    def _tag(self, folder: Path) -> str:
        return f"commit/{folder.name}"

    def _write(self, folder: Path, snapshot: Snapshot) -> None:
        """A full or failing disk must not end the training: it is said in the acknowledgement, and there is no commit."""
        try:
            shard = write_shard(folder, snapshot, self._ranks.rank, self._ranks.world_size)
        except OSError as error:
            commit.acknowledge(self._ranks, self._tag(folder), None, f"{folder} can't be written: {error.strerror}")
        else:
            commit.acknowledge(self._ranks, self._tag(folder), shard, None)

    def _commit(self, folder: Path, manifest: Manifest, wait: bool) -> commit.Outcome:
        tag = self._tag(folder)

        def whole(shards: Sequence[ShardRecord]) -> bytes:
            return encode(replace(manifest, shards=tuple(shards)))

        if self._ranks.first:
            commit.decide(self._ranks, tag, whole)
        if self._ranks.first_of_node:
            commit.finish(self._ranks, tag, folder)
        ended = commit.outcome(self._ranks, tag) if self._ranks.first or wait else commit.Outcome(committed=False)
        if self._ranks.first:
            commit.forget(self._ranks, tag)
        if self._ranks.first_of_node:
            self._rotation.rotate()
        return ended
