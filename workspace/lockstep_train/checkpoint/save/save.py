"""A save: the copy beside the next step, then writing, commit and upkeep beside the steps after it. No collective anywhere.

The training thread only starts a save and, before the update, waits for what is left of the copy. One save at a time: the
host buffer is one, and a slow volume must not pile up snapshots.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep_spec.files import why_unwritten
from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.layout import MANIFEST, CommitName
from lockstep_train.checkpoint.format.manifest import Manifest, ShardRecord, encode
from lockstep_train.checkpoint.format.volume import discard
from lockstep_train.checkpoint.save import commit
from lockstep_train.checkpoint.save.snapshot import FileImage, HostMemory, Snapshot, lay_out, write_shard
from lockstep_train.checkpoint.save.upkeep import Upkeep
from lockstep_train.zero import zero_access
from lockstep_train.zero.kinds import FULL, WEIGHTS


@dataclass(frozen=True)
class Saved:
    """End of a save. Ranks that don't wait for the commit know neither that it is committed nor why it isn't."""

    step: int
    folder: Path
    bytes: int
    """Size of this rank's shard."""
    seconds: float
    """Seconds from the call to the commit."""
    stall_seconds: float
    """Seconds that training waited for it."""
    committed: bool
    problem: str | None


@dataclass(frozen=True)
class Job:
    """A save that was asked for."""

    step: int
    snapshot: Snapshot
    wait: bool
    """True if every rank waits for the commit, not only rank 0."""
    started: float


@dataclass(frozen=True)
class Writing:
    """A save whose copy is made."""

    job: Job
    folder: Path
    manifest: Manifest
    """Manifest without its shards."""

    @property
    def tag(self) -> str:
        return f"commit/{self.folder.name}"


class Leftovers:
    """Shards of one attempt's saves on one volume that came to no commit.

    They are as large as a commit's, and a volume that is sized for commits has no room for them. One rank a volume removes them, in the
    background of the save in which it has become sure that nobody writes there any more.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._failed: list[tuple[Path, str, bool]] = []
        """(folder, tag, whether a manifest was to be written)."""
        self._still = False
        """No rank writes any more, neither in the folder of the last save that was decided nor in one before it."""

    def decided(self, folder: Path, tag: str, decision: commit.Decision) -> None:
        """Note a save once this node has written its manifest, or could not, or has nothing to write."""
        self._still = decision.answered
        if not (folder / MANIFEST).exists():
            self._failed.append((folder, tag, decision.manifest is not None))

    def clear(self) -> None:
        """Remove what nobody writes to and nobody needs: where another node's volume has the manifest, the shards here are its commit's."""
        if self._still:
            with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
                self._failed = [item for item in self._failed if not self._removed(*item)]

    def _removed(self, folder: Path, tag: str, promised: bool) -> bool:
        if promised and not commit.written_nowhere(self._ranks, tag):
            return False
        if not (folder / MANIFEST).exists():
            discard(folder)
        return True


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
        """`describe(step)` gives the manifest without its shards, and `tell` hears how each save ended: both on the background thread.
        Until `describe` returns, training makes no update."""
        self._ranks = replace(ranks, store=ranks.store.clone())  # a client that waits for a key lets no other thread use it
        self._checkpoints = checkpoints
        self._attempt = attempt
        self.upkeep = upkeep
        self._leftovers = Leftovers(self._ranks)
        self._describe = describe
        self._kinds = kinds
        self._tell = tell
        self._thread = ThreadPoolExecutor(1, "save")
        self._memory = HostMemory()
        self._source = StateLocator(kinds)
        self._copied = threading.Event()
        """Set when the state of the save under way may change."""
        self._ending: Future[Saved] | None = None
        self._stall_seconds = 0.0
        self.last_step: int | None = None

    @property
    def busy(self) -> bool:
        """True while a save is under way. It differs from rank to rank: ranks that act on it must agree first."""
        return self._ending is not None and not self._ending.done()

    def copy_bytes(self, engine: Any) -> int:
        """Size of this rank's state as a save writes it."""
        return self._source.image(engine).size

    def reserve(self, engine: Any) -> None:
        """Take the host memory of all saves. Raises MemoryError or OSError."""
        self._memory.reserve(self._source.image(engine))

    def start(self, engine: Any, step: int, wait: bool = False) -> Future[Saved]:
        """Begin to save `step`. Waits for an earlier save: ask `busy` first. Raises what the background thread did not expect."""
        started = time.monotonic()
        self.finish()
        self._copied.clear()
        job = Job(step, self._memory.begin(self._source.image(engine)), wait, started)
        self._ending = self._thread.submit(self._save, job)
        self.last_step = step
        self._stall_seconds = time.monotonic() - started
        return self._ending

    def before_update(self) -> None:
        """Wait until masters and moments may change: the snapshot has them. Raises what the background thread did not expect."""
        if self._ending is None:
            return
        if not self._copied.is_set():
            waiting = time.monotonic()
            self._copied.wait()
            self._stall_seconds += time.monotonic() - waiting
        if self._ending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if any. Raises what the background thread did not expect."""
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.result()

    def save(self, engine: Any, step: int) -> Saved:
        """Save `step` and wait, on every rank, until it is committed or has failed."""
        return self.start(engine, step, wait=True).result()

    def _save(self, job: Job) -> Saved:
        writing = self._copy(job)
        try:
            self._write(writing)
            ended, settled = self._commit(writing), True
        except (OSError, dist.DistStoreError, dist.DistNetworkError) as error:
            ended, settled = commit.Outcome(committed=False, problem=f"{type(error).__name__}: {error}"), False
        seconds = time.monotonic() - job.started
        saved = Saved(job.step, writing.folder, job.snapshot.image.size, seconds, self._stall_seconds, ended.committed, ended.problem)
        self._tell(saved)
        if settled and self._ranks.first:
            commit.forget(self._ranks, writing.tag)
        self.upkeep.committed(writing.folder)
        self._leftovers.clear()
        return saved

    def _copy(self, job: Job) -> Writing:
        """Do what must be done before the next update: the copy, and what the manifest says of the state."""
        folder = self._checkpoints / str(CommitName(attempt=self._attempt, step=job.step))
        try:
            job.snapshot.copy()
            return Writing(job, folder, self._describe(job.step))
        except BaseException:
            commit.acknowledge(self._ranks, f"commit/{folder.name}", None, "its state can't be copied")
            raise
        finally:
            self._copied.set()

    def _write(self, writing: Writing) -> None:
        """Write the shard. A full or failing disk must not end the training: it is said in the acknowledgement, and there is no commit."""
        folder = writing.folder
        try:
            shard = write_shard(folder, writing.job.snapshot, self._ranks.rank, self._ranks.world_size)
        except OSError as error:
            commit.acknowledge(self._ranks, writing.tag, None, f"{folder} can't be written: {why_unwritten(error, folder)}")
        else:
            commit.acknowledge(self._ranks, writing.tag, self.upkeep.copy(folder, shard), None)

    def _commit(self, writing: Writing) -> commit.Outcome:
        def whole(shards: Sequence[ShardRecord]) -> bytes:
            return encode(replace(writing.manifest, shards=tuple(shards)))

        ranks, tag, here = self._ranks, writing.tag, None
        decision = commit.decide(ranks, tag, whole) if ranks.first else None
        if ranks.first_of_node:
            decision = decision or commit.await_decision(ranks, tag)
            here = commit.write_manifest(ranks, tag, writing.folder, decision)
            if self.upkeep.mine:
                self._leftovers.decided(writing.folder, tag, decision)
        return commit.await_outcome(ranks, tag, here) if ranks.first or writing.job.wait else commit.Outcome(committed=False)


class StateLocator:
    """Location of the state: looked up once, since that takes longer than to start a save, and again only if it has moved."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self._kinds = kinds
        self._image: FileImage | None = None
        self._places: zero_access.Places | None = None

    def image(self, engine: Any) -> FileImage:
        if self._image is None or self._places is None or self._places.moved():
            self._image = lay_out(zero_access.fragments(engine, self._kinds))
            weights_of = [parameter for _, parameter in zero_access.trainable(engine)] if WEIGHTS in self._kinds else []
            self._places = zero_access.Places(engine, self._kinds, weights_of)
        return self._image
