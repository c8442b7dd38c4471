"""A rank whose own work takes longer than that of the others."""

from __future__ import annotations

import functools
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from cases_stop import RANK, before_micro_batch

from lockstep_train import __main__ as trainer
from lockstep_train import steps
from lockstep_train.base import ranks as engine_ranks
from lockstep_train.base.runfile import rank_environment
from lockstep_train.engine.clock import Waits
from lockstep_train.report import agent


def straggle(rank: int, times: float) -> int:
    """Every rank tells its pace with every step; `rank` sleeps in each so that it takes so many times as long, however busy the machine
    is.
    """
    work = [0.1]
    slept = [0.0]

    class Remembering(agent.PaceTeller):
        def step(self, step: int, own_seconds: float) -> None:
            work.append(own_seconds - slept[-1])
            super().step(step, own_seconds)

    def sleep(at: int) -> None:
        if os.environ[RANK] == str(rank):
            slept.append((times - 1) * statistics.median(work))
            time.sleep(slept[-1])

    agent.PACE_SECONDS = 0.0
    steps.PaceTeller = Remembering  # type: ignore[misc]
    before_micro_batch(sleep)
    return trainer.main([])


def count_waits() -> None:
    """With events of a GPU pretended: a synchronous operation is timed where it is issued, an asynchronous one where it is waited for."""
    engine_ranks.join(rank_environment())
    torch.cuda.Event = PretendedEvent  # type: ignore[assignment,misc]
    waits = Waits(torch.device("cuda"))
    waits.install()
    for name, operation in operations(torch.ones(4)).items():
        waits.begin()
        operation(async_op=False)
        assert counted(waits) == 2, name
        waits.begin()
        work = operation(async_op=True)
        assert counted(waits) == 0, name
        work.wait()
        assert counted(waits) == 1, name
    waits.taken()
    dist.all_reduce(torch.ones(4))
    assert counted(waits) == 1, "after the step nothing is counted"
    engine_ranks.leave()


class PretendedEvent:
    def __init__(self, **options: Any) -> None: ...
    def record(self) -> None: ...


def counted(waits: Waits) -> int:
    return len(waits._events)


def operations(tensor: torch.Tensor) -> dict[str, Any]:
    """Those that DeepSpeed uses."""
    other = torch.zeros(4)
    return {
        "all_reduce": functools.partial(dist.all_reduce, tensor),
        "reduce": functools.partial(dist.reduce, tensor, 0),
        "broadcast": functools.partial(dist.broadcast, tensor, 0),
        "all_gather": functools.partial(dist.all_gather, [other], tensor),
        "all_gather_into_tensor": functools.partial(dist.all_gather_into_tensor, other, tensor),
        "reduce_scatter_tensor": functools.partial(dist.reduce_scatter_tensor, other, tensor),
    }
