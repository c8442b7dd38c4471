"""One optimizer step: the same update whatever the number of ranks and micro-batches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lockstep_train.data.collate import Batch
from lockstep_train.data.tokenize import IGNORED
from lockstep_train.engine.ranks import Ranks
from lockstep_train.errors import NonFinite


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Mean over all learned tokens of the global batch."""
    gradient_norm: float
    stop: bool
    """Some rank was asked to stop; all ranks see the same answer."""
    saving: bool
    """Some rank still writes the last save; all ranks see the same answer, so that all skip the next one or none does."""


class Saving(Protocol):
    """What a step must know of the saves that run beside it."""

    @property
    def busy(self) -> bool: ...
    def before_update(self) -> None:
        """Returns when masters and moments may change."""


def summed_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Cross-entropy summed over the learned tokens, in FP32. `model` is an engine or a module."""
    logits = model(**batch.inputs).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def seed_micro_batch(seed: int, step: int, micro: int, rank: int) -> None:
    """Dropout depends on (seed, step, micro-batch, rank) alone: a resumed step draws what the first run drew."""
    digest = hashlib.sha256(f"{seed}:{step}:{micro}:{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "big"))


def train_step(
    engine: Any,
    batches: Sequence[Batch],
    ranks: Ranks,
    *,
    tokens: int,
    seed: int,
    step: int,
    stopping: Callable[[], bool],
    saving: Saving,
    looking: Callable[[Batch], None] | None = None,
) -> StepResult:
    """Forward and backward over this rank's micro-batches, one small all-reduce, one update. `looking` sees each batch before its forward.

    Each sum of losses is divided by `tokens`, the learned tokens of the whole global batch, and multiplied by the number of
    ranks because DeepSpeed averages over them; a mean of means is up to 48 % off on uneven lengths.
    Raises NonFinite on every rank alike, before the update.
    """
    total = 0.0
    for micro, batch in enumerate(batches):
        seed_micro_batch(seed, step, micro, ranks.rank)
        if looking is not None:
            looking(batch)
        loss = summed_loss(engine, batch)
        engine.backward(loss * (ranks.world_size / tokens), scale_wrt_gas=False)
        total += float(loss.detach())
        if micro < len(batches) - 1:
            engine.step()  # not at the accumulation boundary: only counts
    losses, (stop, busy) = exchange(total, (stopping(), saving.busy), ranks)
    wrong = [rank for rank, value in enumerate(losses) if not math.isfinite(value)]
    if wrong:
        raise NonFinite(
            f"the loss of step {step} is not finite on rank {', '.join(map(str, wrong))}; the step was not applied and nothing of it was saved"
        )
    saving.before_update()
    engine.step()
    norm = engine.get_global_grad_norm()
    gradient_norm = float(norm) if norm is not None else 0.0
    if not math.isfinite(gradient_norm):
        raise NonFinite(f"the gradient norm of step {step} is not finite; nothing of that step was saved (seen on rank {ranks.rank})")
    return StepResult(loss=math.fsum(losses) / tokens, gradient_norm=gradient_norm, stop=stop, saving=busy)


def exchange(loss: float, flags: Sequence[bool], ranks: Ranks) -> tuple[list[float], list[bool]]:
    """Every rank's loss, and for each flag whether any rank has set it, in one all-reduce; a slot a rank, so that a NaN names its rank."""
    slots = torch.zeros(ranks.world_size + len(flags), dtype=torch.float64, device=ranks.device)
    slots[ranks.rank] = loss
    slots[ranks.world_size :] = torch.tensor(flags, dtype=torch.float64)
    dist.all_reduce(slots)
    values: list[float] = slots.tolist()
    return values[: ranks.world_size], [value > 0 for value in values[ranks.world_size :]]
