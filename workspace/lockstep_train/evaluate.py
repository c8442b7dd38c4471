"""The evaluation loss: the same number for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep_train.data.collate import collate
from lockstep_train.data.tokenize import Example
from lockstep_train.engine.loss import TokenLoss
from lockstep_train.engine.ranks import Ranks


def evaluation_batches(count: int, size: int) -> list[list[int]]:
    """Fixed groups of `size` indices: what is in a batch doesn't depend on the number of ranks."""
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


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
    `leave(turn)` is asked before each forward pass (see `Leaving`).
    """
    batches = evaluation_batches(len(examples), size)
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
            total += float(loss(collate(chosen, examples[0], pad, ranks.device)))  # waits for the device, as `Leaving` needs
            tokens += sum(example.learned_tokens for example in chosen)
    engine.train()
    sums = torch.tensor([total, tokens, left], dtype=torch.float64, device=ranks.device)
    dist.all_reduce(sums)
    return None if sums[2] > 0 else float(sums[0] / sums[1])


@dataclass
class Leaving:
    """How ranks agree, without a collective, to leave an evaluation that one of them was asked to stop in.

    The first to ask writes the turn after its own into the store, and all leave at that turn. Under Stage3 nobody can be
    past it: to finish its forward pass of the asker's turn, a rank needs the asker's shards, which come after the asker's
    word. In the other stages forward passes need no one, so a rank that is past that turn just leaves when it sees the word.
    """

    ranks: Ranks
    key: str
    asked: Callable[[], bool]

    def __call__(self, turn: int) -> bool:
        store = self.ranks.store
        if store.check([self.key]):
            return turn >= int(store.get(self.key))
        if self.asked():
            return turn >= int(store.compare_set(self.key, "", str(turn + 1)))
        return False
