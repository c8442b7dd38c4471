"""A refusal that all ranks share ends them all by it, and none by the loss of its peers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from lockstep_train.base.errors import TrainerError
from lockstep_train.base.ranks import Ranks

PATIENCE = timedelta(seconds=10)


@contextlib.contextmanager
def refused_together(ranks: Ranks, key: str) -> Iterator[None]:
    """Around what raises a TrainerError on every rank alike. Rank 0 has the store: it goes last, when the others have read from it."""
    try:
        yield
    except TrainerError:
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
            ranks.store.set(f"{key}/refused/{ranks.rank}", "1")
            if ranks.first:
                ranks.store.wait([f"{key}/refused/{rank}" for rank in range(ranks.world_size)], PATIENCE)
        raise
