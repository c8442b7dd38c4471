"""Whether the nodes see one volume at the run's folder, or each its own: found out, not believed.

A folder of a node's own that poses as shared costs a run: the shards of a commit would lie on several disks, and nobody would look
there. So at every start node 0 writes a file with a name that nobody can know, and the others look for it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path

from lockstep_train.base.config import Storage
from lockstep_train.base.durable import make_directory
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.together import refused_together

SHARED_SECONDS = 30.0
"""Network file systems show a new name late, when they have cached that it isn't there."""
GLANCE_SECONDS = 0.5
POLL_SECONDS = 0.1


def nodes_share(ranks: Ranks, run_dir: Path, storage: Storage | None, shared_seconds: float = SHARED_SECONDS) -> bool:
    """Whether all nodes see the same `run_dir`. Raises ConfigError, on every rank, when they don't but `storage` says they do."""
    if ranks.nodes == 1:
        return True
    patience = shared_seconds if storage is Storage.SHARED else GLANCE_SECONDS
    mark = run_dir / f".volume-{secrets.token_hex(16)}"
    if ranks.first:
        make_directory(run_dir)
        mark.touch()
    name = ranks.publish("storage/mark", mark.name)
    seen = not ranks.first_of_node or _appears(run_dir, name, patience)
    answers = ranks.gather("storage/seen", [ranks.node, seen])
    blind: list[int] = ranks.publish("storage/blind", sorted({node for node, saw in answers or [] if not saw}))
    if ranks.first:
        with contextlib.suppress(OSError):
            mark.unlink()
    if blind and storage is Storage.SHARED:
        listed = ", ".join(map(str, blind))
        with refused_together(ranks, "storage"):
            raise ConfigError(
                f"storage is Shared, but node {listed} does not see within {shared_seconds:.0f} s what node 0 wrote to {run_dir}: that folder is on a "
                "volume of its own there; mount the same volume on all nodes, or set storage.mode to PerPod"
            )
    return not blind


def _appears(folder: Path, name: str, patience_seconds: float) -> bool:
    """By listing, since looking for one name may be answered from a cache."""
    end = time.monotonic() + patience_seconds
    while True:
        with contextlib.suppress(OSError):
            if any(entry.name == name for entry in folder.iterdir()):
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_SECONDS)
