"""Volumes that nodes share: who sees the same one is found out by trying, and work that all need on one is done by one rank of it.

A folder of a node's own that poses as shared costs a run: the shards of a commit would lie on several disks, and nobody would look
there. So every node writes a file with a name that nobody can know, and looks for those of the others.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError

from lockstep_spec.choices import StorageMode
from lockstep_spec.files import make_directory
from lockstep_train.base import limits
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.limits import Say, Watch
from lockstep_train.base.ranks import Ranks, attempted, refused_together, results

SHARED_SECONDS = 30.0
"""Network file systems show a new name late, when they have cached that it isn't there."""
GLANCE_SECONDS = 0.5
POLL_SECONDS = 0.1
PATIENCE = timedelta(seconds=30)
"""Wait for the builders between two looks at how far they are."""
MARK = ".volume-"


def nodes_share(ranks: Ranks, run_dir: Path, storage: StorageMode | None, shared_seconds: float = SHARED_SECONDS) -> bool:
    """Return True if all nodes see the same `run_dir`. Raises ConfigError, on every rank, when they don't but `storage` says they do."""
    lowest = volume_groups(ranks, run_dir, "storage", shared_seconds if storage is StorageMode.SHARED else GLANCE_SECONDS)
    blind = [node for node, group in enumerate(lowest) if group != lowest[0]]
    if blind and storage is StorageMode.SHARED:
        listed = ", ".join(map(str, blind))
        with refused_together(ranks, "storage"):
            raise ConfigError(
                f"storage is Shared, but node {listed} does not see within {shared_seconds:.0f} s what node 0 wrote to {run_dir}: that"
                " folder is on a volume of its own there; mount the same volume on all nodes, or set storage.mode to PerPod"
            )
    return not blind


def volume_groups(ranks: Ranks, folder: Path, topic: str, patience_seconds: float = 0.0) -> list[int]:
    """Return for every node the lowest node that sees the same `folder`, on every rank. No collective; `topic`, of the store's keys, is
    used once.

    A node looks for the others' marks for up to `patience_seconds`.
    """
    if ranks.nodes == 1:
        return [0]
    mark = folder / f"{MARK}{ranks.node}-{secrets.token_hex(16)}"
    if ranks.first_of_node:
        make_directory(folder)
        mark.touch()
    marks = ranks.gather(f"{topic}/marks", mark.name if ranks.first_of_node else None)
    names: list[str] = ranks.publish(f"{topic}/all-marks", [name for name in marks if name is not None] if marks is not None else None)
    lowest = _lowest_seen(folder, names, patience_seconds, ranks.node) if ranks.first_of_node else None
    answers = ranks.gather(f"{topic}/lowest", [ranks.node, lowest])
    groups = {node: group for node, group in answers if group is not None} if answers is not None else {}
    agreed: list[int] = ranks.publish(f"{topic}/groups", [groups[node] for node in sorted(groups)])
    if ranks.first_of_node:
        with contextlib.suppress(OSError):
            mark.unlink()
    return agreed


def _lowest_seen(folder: Path, names: Sequence[str], patience_seconds: float, own: int) -> int:
    """Lowest node whose mark is seen; `own` where none is, for up to `patience_seconds`."""
    end = time.monotonic() + patience_seconds
    while True:
        present = _present(folder, names)
        if len(present) == len(names) or time.monotonic() >= end:
            return min((int(name.removeprefix(MARK).split("-")[0]) for name in present), default=own)
        time.sleep(POLL_SECONDS)


def _present(folder: Path, names: Sequence[str]) -> list[str]:
    """Names that are there, by a listing or by a look: a network file system may answer either from a cache."""
    listing: set[str] = set()
    with contextlib.suppress(OSError):
        listing = {entry.name for entry in folder.iterdir()}
    return [name for name in names if name in listing or (folder / name).exists()]


class BuildProgress:
    """Progress of what is prepared on a volume or fetched to it, known to all ranks: hours of it are fine as long as it moves.

    A load is begun anew with every line that a builder reports; only one in which nothing moves ends at its limit. All ranks begin as many
    parts, in the end as many as the builder that reported most: the watchdogs compare how many places each has come to.
    """

    def __init__(self, ranks: Ranks, watch: Watch, say: Say, topic: str = "data", activity: str = "Load") -> None:
        """`topic`: of the store's keys."""
        self._ranks = ranks
        self._topic = topic
        self._activity = activity
        self._watch = watch
        self._say = say
        self._parts = 0

    def report(self, line: str) -> None:
        """Say to people and to all ranks how far a builder's rank has come."""
        self._say(line)
        self._begin(self._parts + 1, line)
        self._ranks.store.set(self._key(self._ranks.node), json.dumps([self._parts, line]))

    def follow(self, builders: Iterable[int]) -> None:
        """Begin what these nodes have begun since the last look."""
        for builder in builders:
            if self._ranks.store.check([self._key(builder)]):
                parts, line = json.loads(self._ranks.store.get(self._key(builder)))
                self._begin(parts, line)

    def _begin(self, parts: int, line: str) -> None:
        """Begin parts under a new name each, since the agent restarts its clock only for another one."""
        while self._parts < parts:
            self._parts += 1
            self._watch.begin(f"{self._activity}, part {self._parts + 1}", limits.LOAD_SECONDS)
            self._watch.at(line)

    def _key(self, node: int) -> str:
        return f"{self._topic}/progress/{node}"


def once_per_volume(
    ranks: Ranks, folder: Path, topic: str, progress: BuildProgress, build: Callable[[], Any]
) -> tuple[dict[int, Any], Any]:
    """Run `build`, which gives JSON, on the first rank of the lowest node of each volume while all others wait; builder's node → result,
    and that of this volume.

    Raises, on all ranks alike, the gravest TrainerError that a builder has met.

    The ranks talk through the store, not by collectives, so nobody waits inside one for what may be hours. A builder that dies ends all
    ranks: that is the agent's to see.
    """
    builder_of = volume_groups(ranks, folder, topic)
    if ranks.first_of_node and ranks.node == builder_of[ranks.node]:
        ranks.store.set(f"{topic}/built/{ranks.node}", json.dumps(attempted(build)))
    builders = sorted(set(builder_of))
    built = dict(zip(builders, results(_await_outcomes(ranks, builders, topic, progress)), strict=True))
    return built, built[builder_of[ranks.node]]


def _await_outcomes(ranks: Ranks, builders: Sequence[int], topic: str, progress: BuildProgress) -> list[dict[str, Any]]:
    keys = [f"{topic}/built/{builder}" for builder in builders]
    while True:
        progress.follow(builders)
        try:
            ranks.store.wait(keys, PATIENCE)
        except DistStoreError:
            continue
        progress.follow(builders)  # the last of it, so that all ranks have come to the same place
        return [json.loads(ranks.store.get(key)) for key in keys]
