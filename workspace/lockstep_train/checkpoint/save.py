"""A save: the copy beside the next step, then writing, commit and upkeep beside the steps after it. No collective anywhere.

The training thread only starts a save and, before the update, waits for what is left of the copy. One save at a time: the
host buffer is one, and a slow volume must not pile up snapshots.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep_train.checkpoint import commit, zero_access
from lockstep_train.checkpoint.kinds import FULL, WEIGHTS
from lockstep_train.checkpoint.layout import CommitName
from lockstep_train.checkpoint.manifest import Manifest, ShardRecord, encode
from lockstep_train.checkpoint.snapshot import FileImage, HostMemory, Snapshot, lay_out
from lockstep_train.checkpoint.upkeep import Upkeep
from lockstep_train.checkpoint.write import write_shard
from lockstep_train.engine.ranks import Ranks


@dataclass(frozen=True)
class Saved:
    """How a save ended. Ranks that don't wait for the commit know neither that it is committed nor why it isn't."""

    step: int
    folder: Path
    bytes: int
    """Of this rank's shard."""
    seconds: float
    """From the call to the commit."""
    stall_seconds: float
    """How long training waited for it."""
    committed: bool
    problem: str | None


@dataclass(frozen=True)
class Job:
    """A save under way."""

    manifest: Manifest
    folder: Path
    snapshot: Snapshot
    wait: bool
    """Every rank waits for the commit, not only rank 0."""
    started: float
    copied: threading.Event

    @property
    def tag(self) -> str:
        return f"commit/{self.folder.name}"


class Saver:
    """Saves of one attempt. Its methods are the training thread's; each save runs on one background thread."""

    def __init__(
        self,
        ranks: Ranks,
        checkpoints: Path,
        attempt: int,
        upkeep: Upkeep,
        describe: Callable[[int], Manifest],
        kinds: tuple[str, ...] = FULL,
        tell: Callable[[Saved], None] = lambda saved: None,
    ) -> None:
        """`describe(step)` gives the manifest without its shards; `tell` hears how each save ended, on the background thread."""
        self._ranks = replace(ranks, store=ranks.store.clone())  # a client that waits for a key lets no other thread use it
        self._checkpoints = checkpoints
        self._attempt = attempt
        self.upkeep = upkeep
        self._describe = describe
        self._kinds = kinds
        self._tell = tell
        self._thread = ThreadPoolExecutor(1, "save")
        self._memory = HostMemory()
        self._source = Source(kinds)
        self._job: Job | None = None
        self._ending: Future[Saved] | None = None
        self._stall_seconds = 0.0
        self.last_step: int | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is under way. It differs from rank to rank: ranks that act on it must agree first."""
        return self._ending is not None and not self._ending.done()

    def start(self, engine: Any, step: int, wait: bool = False) -> Future[Saved]:
        """Begin to save `step`. Waits for an earlier save: ask `busy` first. Raises what the background thread did not expect."""
        started = time.monotonic()
        self.finish()
        folder = self._checkpoints / str(CommitName(attempt=self._attempt, step=step))
        snapshot = self._memory.begin(self._source.image(engine))
        self._job = Job(self._describe(step), folder, snapshot, wait, started, threading.Event())
        self._ending = self._thread.submit(self._save, self._job)
        self.last_step = step
        self._stall_seconds = time.monotonic() - started
        return self._ending

    def before_update(self) -> None:
        """Returns when masters and moments may change: the snapshot has them. Raises what the background thread did not expect."""
        self.raise_unexpected()
        if self._job is not None and not self._job.copied.is_set():
            waiting = time.monotonic()
            self._job.copied.wait()
            self._stall_seconds += time.monotonic() - waiting

    def finish(self) -> None:
        """Wait for the save under way, if any. Raises what the background thread did not expect."""
        ending, self._ending, self._job = self._ending, None, None
        if ending is not None:
            ending.result()

    def save(self, engine: Any, step: int) -> Saved:
        """Save `step` and wait, on every rank, until it is committed or has failed."""
        return self.start(engine, step, wait=True).result()

    def raise_unexpected(self) -> None:
        """Raise what has ended a save that nobody waits for, if it was no failure that a save can have."""
        if self._ending is not None and self._ending.done():
            self._ending.result()

    def _save(self, job: Job) -> Saved:
        try:
            job.snapshot.copy()
        except BaseException:
            commit.acknowledge(self._ranks, job.tag, None, "its state can't be copied")
            raise
        finally:
            job.copied.set()
        try:
            self._write(job)
            ended = self._commit(job)
        except (OSError, dist.DistStoreError, dist.DistNetworkError) as error:
            ended = commit.Outcome(committed=False, problem=f"{type(error).__name__}: {error}")
        seconds = time.monotonic() - job.started
        saved = Saved(job.manifest.step, job.folder, job.snapshot.image.size, seconds, self._stall_seconds, ended.committed, ended.problem)
        self._tell(saved)
        self.upkeep.committed(job.folder)
        return saved

    def _write(self, job: Job) -> None:
        """A full or failing disk must not end the training: it is said in the acknowledgement, and there is no commit."""
        try:
            shard = write_shard(job.folder, job.snapshot, self._ranks.rank, self._ranks.world_size)
        except OSError as error:
            commit.acknowledge(self._ranks, job.tag, None, f"{job.folder} can't be written: {error.strerror}")
        else:
            commit.acknowledge(self._ranks, job.tag, self.upkeep.copy(job.folder, shard), None)

    def _commit(self, job: Job) -> commit.Outcome:
        def whole(shards: Sequence[ShardRecord]) -> bytes:
            return encode(replace(job.manifest, shards=tuple(shards)))

        if self._ranks.first:
            commit.decide(self._ranks, job.tag, whole)
        if self._ranks.first_of_node:
            commit.finish(self._ranks, job.tag, job.folder)
        ended = commit.outcome(self._ranks, job.tag) if self._ranks.first or job.wait else commit.Outcome(committed=False)
        if self._ranks.first:
            commit.forget(self._ranks, job.tag)
        return ended


class Source:
    """Where the state lies: looked up once, since that takes longer than to start a save, and again only if it has moved."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self._kinds = kinds
        self._weights_of: list[torch.nn.Parameter] | None = None
        self._image: FileImage | None = None
        self._key: tuple[int, ...] | None = None

    def image(self, engine: Any) -> FileImage:
        if self._weights_of is None:
            read = zero_access.trainable(engine) if WEIGHTS in self._kinds else []
            self._weights_of = [parameter for _, parameter in read]
        key = zero_access.storage_key(engine, self._weights_of)
        if self._image is None or self._key != key:
            self._image, self._key = lay_out(zero_access.fragments(engine, self._kinds)), key
        return self._image
