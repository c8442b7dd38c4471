"""Examples to tensors: padded on the right to the longest of the micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep_train.data.tokenize import IGNORED, Example


@dataclass(frozen=True)
class Batch:
    """Tensors of shape [batch, sequence]."""

    ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


def collate(examples: Sequence[Example], ghost: Example, pad: int, device: torch.device) -> Batch:
    """A micro-batch; an empty one becomes a ghost: a real example in which nothing is learned."""
    rows = list(examples) or [Example(ghost.ids, (IGNORED,) * len(ghost.ids), ghost.source)]
    longest = max(len(row.ids) for row in rows)

    def padded(values: Sequence[int], fill: int) -> list[int]:
        return [*values, *[fill] * (longest - len(values))]

    return Batch(
        ids=torch.tensor([padded(row.ids, pad) for row in rows], device=device),
        attention_mask=torch.tensor([padded([1] * len(row.ids), 0) for row in rows], device=device),
        labels=torch.tensor([padded(row.labels, IGNORED) for row in rows], device=device),
    )
