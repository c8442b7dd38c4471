"""The batches of one optimizer step, on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_train.data.sequences.collate import Batch, collate
from lockstep_train.data.sequences.sampler import global_batch, rank_micro_batches
from lockstep_train.run import Run


@dataclass(frozen=True)
class StepBatches:
    """What one step trains on."""

    batches: list[Batch]
    """This rank's micro-batches."""
    tokens: int
    """Learned tokens of the whole global batch, over all ranks."""
    documents: list[int]
    """Lengths in tokens of the global batch's documents."""
    epoch: float
    """Passes over the data once this step is done."""
    sources: list[str]
    """Where the global batch's samples stand: file:line."""


def step_batches(run: Run, step: int) -> StepBatches:
    """A pure function of the step and of who this rank is: nothing is drawn, nothing is remembered."""
    training, plan, ranks = run.config.training, run.plan, run.ranks
    examples = run.dataset.training
    cursor = plan.cursor(step)
    indices = global_batch(len(examples), training.seed, cursor, plan.global_batch_size, plan.total_samples)
    mine = rank_micro_batches(indices, ranks.rank, ranks.world_size, training.optimization.micro_batch_size, plan.accumulation)
    ghost = examples[indices[0]]
    return StepBatches(
        batches=[collate([examples[index] for index in micro], ghost, run.tokeniser.pad, ranks.device) for micro in mine],
        tokens=examples.learned_tokens(indices),
        documents=examples.documents(indices),
        epoch=plan.cursor(step + 1) / len(examples),
        sources=[examples.source(index) for index in indices],
    )
