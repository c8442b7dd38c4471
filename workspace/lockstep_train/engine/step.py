"""One optimizer step: the same update whatever the number of ranks and micro-batches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep_spec.choices import NonFinitePolicy
from lockstep_train.base.errors import NonFinite
from lockstep_train.base.limits import Watch
from lockstep_train.base.ranks import Ranks
from lockstep_train.checkpoint.save.save import Saver
from lockstep_train.data.sequences.batches import Batch
from lockstep_train.engine.clock import Clock, Waits
from lockstep_train.engine.loss import TokenLoss, targets
from lockstep_train.zero import zero_access

MOST_SKIPPED = 20
"""Steps left out in a row after which the run ends: it isn't learning any more."""


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Mean over all learned tokens of the global batch."""
    gradient_norm: float
    """Norm before clipping; infinite for a step that was left out."""
    stop: bool
    """True if some rank was asked to stop; all ranks see the same answer."""
    saving: bool
    """True if some rank still writes the last save; all ranks see the same answer, so that all skip the next one or none does."""
    skipped: str | None
    """Reason why the update was left out, on all ranks alike; None when it was applied."""
    seconds: Mapping[str, float]
    """Seconds of each part of the step on this rank (clock.PARTS)."""
    own_seconds: float
    """Seconds of data, forward and backward on this rank, without what it waited for others."""
    reports: list[list[float]]
    """Values that each rank reported of itself, in rank order."""


def seed_micro_batch(seed: int, step: int, micro: int, rank: int) -> None:
    """Seed dropout by (seed, step, micro-batch, rank) alone: a resumed step draws what the first run drew."""
    digest = hashlib.sha256(f"{seed}:{step}:{micro}:{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "big"))


class Stepper:
    """Stepper with one engine."""

    def __init__(
        self,
        engine: Any,
        loss: TokenLoss,
        ranks: Ranks,
        saving: Saver,
        progress: Watch,
        *,
        seed: int,
        policy: NonFinitePolicy,
        looking: Callable[[Batch], None] = lambda batch: None,
        waits: Waits | None = None,
    ) -> None:
        """`looking` sees each batch before its forward pass."""
        self._engine = engine
        self._loss = loss
        self._ranks = ranks
        self._saving = saving
        self._progress = progress
        self._seed = seed
        self._policy = policy
        self._looking = looking
        self._waits = waits or Waits(ranks.device)
        self._skipped_in_a_row = 0

    def take(
        self, step: int, batches: Sequence[Batch], tokens: int, stopping: Callable[[], bool], clock: Clock, report: Sequence[float] = ()
    ) -> StepResult:
        """Forward and backward over this rank's micro-batches, one small all-reduce, one update.

        `tokens`: the learned tokens of the whole global batch, over all ranks. `report`: values of this rank that the others get. Raises
        NonFinite, on every rank alike, before an update that would not be finite, unless the policy is to leave such updates out.
        """
        self._waits.begin()
        loss = self._gradients(step, batches, tokens, clock)
        waited = self._waits.taken()
        self._progress.at("waiting for the other ranks' losses")
        losses, reports, (stop, busy) = exchange(loss, report, (stopping(), self._saving.busy), self._ranks)
        clock.lap("wait")
        wrong = _wrong_loss(step, losses)
        skipped = self._skip(wrong) if wrong is not None else None
        self._progress.at("waiting for the last save's copy")
        self._saving.before_update()
        clock.lap("saveWait")
        self._progress.at("optimizer")
        norm = zero_access.apply_gradients(self._engine, step)
        clock.lap("optimizer")
        if not math.isfinite(norm):
            skipped = skipped or self._left_out(step)
        self._count(step, skipped)
        seconds = clock.seconds()
        own = max(0.0, sum(seconds[part] for part in ("data", "forward", "backward")) - waited.seconds)
        return StepResult(math.fsum(losses) / tokens, norm, stop, busy, skipped, seconds, own, reports)

    def _gradients(self, step: int, batches: Sequence[Batch], tokens: int, clock: Clock) -> torch.Tensor:
        """Compute this rank's summed loss; its gradients are left where DeepSpeed reduces them.

        Each sum of losses is divided by `tokens` and multiplied by the number of ranks because DeepSpeed averages over them;
        a mean of means is up to 48 % off on uneven lengths.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        batch_targets = [targets(batch.labels) for batch in batches]
        clock.lap("data")
        for micro, batch in enumerate(batches):
            self._progress.at(f"forward of micro-batch {micro + 1} of {len(batches)}")
            seed_micro_batch(self._seed, step, micro, self._ranks.rank)
            self._looking(batch)
            loss = self._loss(batch, batch_targets[micro])
            clock.lap("forward")
            self._progress.at(f"backward of micro-batch {micro + 1} of {len(batches)}")
            # A loss that isn't finite must not leave finite gradients, or DeepSpeed would apply them.
            scale = torch.where(loss.detach().isfinite(), self._ranks.world_size / tokens, math.nan)
            self._engine.backward(loss * scale, scale_wrt_gas=False)
            total += loss.detach()
            if micro < len(batches) - 1:
                self._engine.step()  # not at the accumulation boundary: only counts
            clock.lap("backward")
        return total

    def _left_out(self, step: int) -> str:
        scale = zero_access.loss_scale(self._engine)
        if zero_access.seeks_loss_scale(self._engine):  # a part of training in FP16, whatever the policy
            return f"the gradients of step {step} overflow FP16; the loss scale is lowered to {scale:.0f}"
        if scale is not None:
            fixed = f"{scale:.0f}, which training.deepspeed.fp16.loss_scale fixes"
            return self._skip(f"the gradients of step {step} are not finite in FP16 at the loss scale {fixed}")
        return self._skip(f"the gradient norm of step {step} is not finite")

    def _skip(self, wrong: str) -> str:
        if self._policy is NonFinitePolicy.STOP:
            raise NonFinite(f"{wrong}; the step was not applied and nothing of it was saved")
        return wrong

    def _count(self, step: int, skipped: str | None) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= MOST_SKIPPED and not zero_access.seeks_loss_scale(self._engine):
            raise NonFinite(
                f"{MOST_SKIPPED} steps in a row were left out, the last because {skipped}; lower the learning rate (step {step})"
            )


def _wrong_loss(step: int, losses: Sequence[float]) -> str | None:
    wrong = [rank for rank, value in enumerate(losses) if not math.isfinite(value)]
    return f"the loss of step {step} is not finite on rank {', '.join(map(str, wrong))}" if wrong else None


def exchange(
    loss: torch.Tensor, report: Sequence[float], flags: Sequence[bool], ranks: Ranks
) -> tuple[list[float], list[list[float]], list[bool]]:
    """Exchange every rank's loss, what each reports of itself, and for each flag whether any rank has set it, in one all-reduce.

    Every rank has slots of its own, so that a NaN names its rank.
    """
    each, world = 1 + len(report), ranks.world_size
    values = torch.zeros(each * world + len(flags), dtype=torch.float64)
    values[each * ranks.rank + 1 : each * (ranks.rank + 1)] = torch.tensor(report, dtype=torch.float64)
    values[each * world :] = torch.tensor(flags, dtype=torch.float64)
    slots = values.to(ranks.device)
    slots[each * ranks.rank] = loss
    dist.all_reduce(slots)
    summed: list[float] = slots.tolist()
    rows = [summed[start : start + each] for start in range(0, each * world, each)]
    return [row[0] for row in rows], [row[1:] for row in rows], [value > 0 for value in summed[each * world :]]
