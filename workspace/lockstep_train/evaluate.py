"""The evaluation loss: the same number for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep_train.data.collate import collate
from lockstep_train.data.tokenize import Example
from lockstep_train.engine.ranks import Ranks
from lockstep_train.engine.step import summed_loss


def evaluation_batches(count: int, size: int) -> list[list[int]]:
    """Fixed groups of `size` indices: what is in a batch doesn't depend on the number of ranks."""
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def evaluate(engine: Any, examples: Sequence[Example], size: int, pad: int, ranks: Ranks) -> float:
    """Mean loss over the learned tokens of `examples`. Ranks without a batch left compute a ghost, because under Stage3 every
    forward pass is a collective; then one all-reduce."""
    batches = evaluation_batches(len(examples), size)
    rounds = -(-len(batches) // ranks.world_size)
    totals = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    engine.eval()
    with torch.no_grad():
        for turn in range(rounds):
            index = turn * ranks.world_size + ranks.rank
            chosen = [examples[item] for item in batches[index]] if index < len(batches) else []
            totals[0] += summed_loss(engine, collate(chosen, examples[0], pad, ranks.device)).double()
            totals[1] += sum(example.learned_tokens for example in chosen)
    engine.train()
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])
