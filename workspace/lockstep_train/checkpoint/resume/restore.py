"""The state of a verified commit, on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.format.load import ShardReader, direct, exchanged
from lockstep_train.checkpoint.format.readers import reading
from lockstep_train.checkpoint.resume.resume import Source
from lockstep_train.checkpoint.zero import zero_access, zero_restore


def restore(engine: Any, source: Source, ranks: Ranks, say: Callable[[str], None]) -> None:
    """Load it. A collective where a node's volume lacks a shard. The commit is held meanwhile: it may be one of a running job."""
    manifest = source.manifest
    reader = ShardReader(source.folder, manifest)
    with contextlib.ExitStack() as held:
        if ranks.first_of_node and source.folder.is_dir():
            held.enter_context(reading(source.folder, f"job {manifest.job}, resuming"))
        mine = zero_restore.needs(engine)
        fetch = direct(reader) if source.everywhere else exchanged(reader, source.holders, source.nodes, mine, ranks)
        zero_restore.restore(engine, fetch, 0 if reader.lite else manifest.optimizer_step)
        ranks.gather("load/done", True)
        ranks.publish("load/over")
    zero_access.restore_loss_scaler(engine, manifest.loss_scaler)
    if reader.lite:
        say(f"{source.folder} is Lite: its weights are loaded, the optimizer's moments begin afresh")
