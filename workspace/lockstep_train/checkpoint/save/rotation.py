"""Rotation of commits. Names, the chain and the manifests decide which are deleted; never a clock or an mtime."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep_spec.files import sync_directory
from lockstep_train.checkpoint.format.layout import MANIFEST, TRASH, CommitName
from lockstep_train.checkpoint.format.manifest import decode
from lockstep_train.checkpoint.format.readers import ReaderWatch
from lockstep_train.checkpoint.format.volume import read_chain

NEVER_ROTATED = 2


@dataclass(frozen=True)
class Quality:
    """Quality of a commit by its manifest: the evaluation loss, and how many steps before the commit it was measured."""

    loss: float
    age: int


def best_commit(chain: Sequence[CommitName], qualities: Mapping[CommitName, Quality | None]) -> CommitName | None:
    """Commit with the lowest loss; of equals the one measured closest to its commit, then the newest (`chain` is newest first)."""
    measured = [
        (quality.loss, quality.age, place, name) for place, name in enumerate(chain) if (quality := qualities.get(name)) is not None
    ]
    return min(measured)[3] if measured else None


def doomed_commits(
    chain: Sequence[CommitName], keep: int, qualities: Mapping[CommitName, Quality | None], being_read: Collection[CommitName]
) -> list[CommitName]:
    """Commits that `keep` leaves no room for; never the newest two, the best, or one that is being read. `chain` is newest first."""
    best = best_commit(chain, qualities)
    return [name for name in chain[max(keep, NEVER_ROTATED) :] if name != best and name not in being_read]


class Rotation:
    """Rotation of one checkpoints folder. Several nodes may rotate at once on a shared volume: what is gone already is no error."""

    def __init__(self, checkpoints: Path, keep: int, watch: ReaderWatch | None = None) -> None:
        self._checkpoints = checkpoints
        self._keep = keep
        self._watch = watch or ReaderWatch(checkpoints)
        self._qualities: dict[CommitName, Quality | None] = {}

    def rotate(self) -> list[CommitName]:
        """Delete and return what may go."""
        chain = read_chain(self._checkpoints)
        for name in chain:
            if name not in self._qualities:
                self._qualities[name] = read_quality(self._checkpoints / str(name))
        doomed = doomed_commits(chain, self._keep, self._qualities, self._watch.held())
        return [name for name in doomed if self._delete(name)]

    def _delete(self, name: CommitName) -> bool:
        """Delete a commit: first the name goes, so that a half-deleted folder never looks like a commit; then readers are looked for once
        more.
        """
        folder, trash = self._checkpoints / str(name), self._checkpoints / f"{TRASH}{name}"
        with contextlib.suppress(FileNotFoundError):
            folder.rename(trash)
            if name in self._watch.held():
                trash.rename(folder)
                return False
            sync_directory(self._checkpoints)
        shutil.rmtree(trash, ignore_errors=True)
        return True


def read_quality(commit: Path) -> Quality | None:
    """Read a commit's quality; None when it says none, or can't be read: then it is not the best."""
    with contextlib.suppress(OSError, ValueError):
        manifest = decode((commit / MANIFEST).read_bytes())
        if manifest.eval_loss is not None and manifest.eval_step:  # the evaluation before step 1 measures no commit
            return Quality(manifest.eval_loss, manifest.step - manifest.eval_step)
    return None
