"""The evaluation loss: the same number for any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep_train.base.ranks import Ranks
from lockstep_train.data.sequences.batches import collate
from lockstep_train.data.tokens.encode import Example
from lockstep_train.engine.loss import TokenLoss

AGREE_SECONDS = 2.0
MOST_TURNS = 64
"""Most batches between two agreements, which are about AGREE_SECONDS apart."""


def evaluate(
    engine: Any,
    loss: TokenLoss,
    examples: Sequence[Example],
    size: int,
    pad: int,
    ranks: Ranks,
    leave: Callable[[int], bool] = lambda turn: False,
) -> float | None:
    """Mean loss over the learned tokens of `examples`, or None when the ranks have left it before its end.

    Ranks without a batch left compute a ghost, because under Stage3 every forward pass is a collective; then one all-reduce.
    `leave(turn)` is asked before each forward pass and has one answer on all ranks (see `Leaving`).
    """
    count = len(examples)  # groups are fixed: what is in a batch doesn't depend on the number of ranks
    batches = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
    rounds = -(-len(batches) // ranks.world_size)
    total, tokens, left = 0.0, 0, False
    engine.eval()
    with torch.no_grad():
        for turn in range(rounds):
            left = leave(turn)
            if left:
                break
            index = turn * ranks.world_size + ranks.rank
            chosen = [examples[item] for item in batches[index]] if index < len(batches) else []
            total += float(loss(collate(chosen, examples[0], pad, ranks.device)))
            tokens += sum(example.learned_tokens for example in chosen)
    engine.train()
    if left:
        return None
    sums = torch.tensor([total, tokens], dtype=torch.float64, device=ranks.device)
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def turns_between(turns: int, seconds: float) -> int:
    """Turns until the ranks agree again, where the last `turns` took the slowest rank `seconds`: about 2 seconds' worth (pure)."""
    if turns == 0:
        return 1  # nothing is measured yet
    return max(1, min(MOST_TURNS, int(AGREE_SECONDS * turns / max(seconds, 1e-6))))


class Leaving:
    """Agreement of the ranks to leave an evaluation that one of them was asked to stop in: by a small all-reduce every few turns.

    A stop comes to the ranks at different moments, and with a copy of the weights on each node (hpZ) one node may be many turns ahead of
    another: whoever left by what it has seen itself would be waited for in a gather. So all decide at the same turns, and when they agree
    next follows from what they have exchanged, the time of the slowest rank.
    """

    def __init__(self, ranks: Ranks, requested: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks = ranks
        self._requested = requested
        self._clock = clock
        self._last, self._since = 0, clock()
        self._next = 0

    def __call__(self, turn: int) -> bool:
        """Return True if all ranks leave before this turn. `turn` counts up from 0, on every rank."""
        if turn < self._next:
            return False
        exchanged = torch.tensor([self._requested(), self._clock() - self._since], dtype=torch.float64, device=self._ranks.device)
        dist.all_reduce(exchanged, dist.ReduceOp.MAX)
        requested, seconds = exchanged.tolist()
        self._next = turn + turns_between(turn - self._last, seconds)
        self._last, self._since = turn, self._clock()
        return bool(requested > 0)
