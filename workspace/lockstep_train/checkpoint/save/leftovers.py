"""Shards of saves that came to no commit. They are as large as a commit's, and a volume that is sized for commits has no room for them.

One rank a volume removes them, in the background of the save in which it has become sure that nobody writes there any more.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch.distributed as dist

from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.layout import MANIFEST
from lockstep_train.checkpoint.format.volume import discard
from lockstep_train.checkpoint.save import commit


class Leftovers:
    """Of one attempt on one volume."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._failed: list[tuple[Path, str, bool]] = []
        """(folder, tag, whether a manifest was to be written)."""
        self._still = False
        """No rank writes any more, neither in the folder of the last save that was decided nor in one before it."""

    def decided(self, folder: Path, tag: str, decision: commit.Decision) -> None:
        """Once this node has written the manifest, or could not, or has nothing to write."""
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
