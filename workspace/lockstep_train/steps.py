"""Steps of a run, one after the other: batches, learning rate, update, report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import DistError

from lockstep_spec.choices import Method
from lockstep_train.balance import Shares
from lockstep_train.base import limits
from lockstep_train.base.errors import ConfigError, NonFinite, TrainerError
from lockstep_train.base.ranks import Ranks
from lockstep_train.data.sequences.batches import Batch, collate, global_batch
from lockstep_train.data.tokens.encode import Example
from lockstep_train.engine.clock import Clock, Waits
from lockstep_train.engine.optimizer import learning_rate
from lockstep_train.engine.step import Stepper, StepResult
from lockstep_train.report.agent import PaceTeller
from lockstep_train.report.speed import across_ranks, measure_speed, peak_memory_bytes, peak_reserved_bytes
from lockstep_train.run import Run
from lockstep_train.watch.watchdog import StopSignal
from lockstep_train.zero import zero_access
from lockstep_train.zero.parameters import own_values


class Steps:
    """Stepper of a run."""

    def __init__(self, run: Run, stop: StopSignal) -> None:
        training = run.config.training
        self._run = run
        self._stop = stop
        waits = Waits(run.ranks.device)
        waits.install()
        self._pace = PaceTeller(run.reporter.agent)
        self._stepper = Stepper(
            run.engine,
            run.loss,
            run.ranks,
            run.saver,
            run.watch,
            seed=training.seed,
            policy=training.optimization.non_finite,
            looking=run.usage.look_at if run.usage else lambda batch: None,
            waits=waits,
        )
        self._speed = measure_speed(run.engine.module, training, run.recomputed, run.ranks.world_size, run.reporter)
        self._clock = Clock(run.ranks.device)
        self._computing = 0.0
        """Seconds of the last step's forward and backward passes; each rank tells the others in the next one."""
        self._own = 0.0
        """Seconds of the last step without what was waited for others; told in the next one, too."""
        self._skipped = 0

    @property
    def limit_seconds(self) -> float:
        """Limit of one step, or of one batch of an evaluation, which is less."""
        return limits.step_seconds(self._run.config.timeouts.step_seconds, self._speed.last_seconds)

    def take(self, step: int) -> StepResult:
        run, plan = self._run, self._run.plan
        run.reporter.activity("Step")
        run.watch.begin(f"Step {step}", self.limit_seconds)
        started = time.monotonic()
        self._clock.start()
        work = step_batches(run, step)
        zero_access.set_counters(run.engine, step - 1, len(work.batches), plan.global_batch_size)
        rate = learning_rate(run.config.training.optimization, step, plan.total_steps)
        zero_access.set_learning_rate(run.engine, rate)
        on_gpu = run.ranks.device.type == "cuda"
        report = (peak_memory_bytes(on_gpu), self._computing, peak_reserved_bytes(on_gpu), self._own)
        try:
            result = self._stepper.take(step, work.batches, work.tokens, lambda: self._stop.requested, self._clock, report)
        except NonFinite as error:
            raise explain_nonfinite(run, step, error) from error
        self._computing = result.seconds["forward"] + result.seconds["backward"]
        seconds = time.monotonic() - started
        self._own = result.own_seconds
        run.shares.see([row[3] for row in result.reports])
        self._pace.step(step, result.own_seconds / run.shares.expected[run.ranks.rank])
        self._report(step, rate, work, result, seconds)
        return result

    def _report(self, step: int, rate: float, work: StepBatches, result: StepResult, seconds: float) -> None:
        run = self._run
        if result.skipped is not None:
            self._skipped += 1
            line = f"Step {step} left out: {result.skipped}"
            run.reporter.event("stepSkipped", line=line, step=step, reason=result.skipped, samples=work.sources)
        values = {
            "loss": result.loss,
            "learningRate": rate,
            "gradientNorm": result.gradient_norm,
            **self._speed.step(seconds, work.documents),
            **across_ranks(result.reports),
            "skippedSteps": self._skipped,
            **run.save_report.metrics,
            **{f"{part}Seconds": value for part, value in result.seconds.items()},
        }
        remaining = self._speed.remaining_seconds(run.plan.total_steps - step)
        run.reporter.step(step, run.plan.total_steps, work.epoch, remaining, values)


@dataclass(frozen=True)
class StepBatches:
    """Batches that one step trains on."""

    batches: list[Batch]
    """This rank's micro-batches."""
    tokens: int
    """Learned tokens of the whole global batch, over all ranks."""
    documents: list[int]
    """Lengths in tokens of the global batch's documents."""
    epoch: float
    """Passes over the data once this step is done."""
    sources: list[str]
    """Places of the global batch's samples: file:line."""


def step_batches(run: Run, step: int) -> StepBatches:
    """Return the batches of a step: a function of the step, of the rank and of the ranks' shares alone: nothing is drawn."""
    training, plan, ranks = run.config.training, run.plan, run.ranks
    examples = run.dataset.training
    cursor = plan.cursor(step)
    indices = global_batch(len(examples), training.seed, cursor, plan.global_batch_size, plan.total_samples)
    lengths = examples.lengths(indices)
    return StepBatches(
        batches=own_batches(run.shares, step, ranks, lengths, lambda place: examples[indices[place]], run.tokenizer.pad),
        tokens=examples.learned_tokens(indices),
        documents=examples.documents(indices),
        epoch=plan.cursor(step + 1) / len(examples),
        sources=[examples.source(index) for index in indices],
    )


def own_batches(shares: Shares, step: int, ranks: Ranks, lengths: Sequence[int], sample: Callable[[int], Example], pad: int) -> list[Batch]:
    """Return this rank's micro-batches of a step, given its samples' tokens and `sample`, which reads the one at a place. Where a rank has
    none, it computes the shortest.
    """
    division, ghost = shares.divide(lengths, step), sample(lengths.index(min(lengths)))
    mine = division.micro_batches[ranks.rank]
    return [collate([sample(place) for place in micro], ghost, pad, ranks.device, shares.sizes.batches) for micro in mine]


PATIENCE_SECONDS = 10.0
"""Wait for what all ranks find, together."""


def explain_nonfinite(run: Run, step: int, error: NonFinite) -> TrainerError:
    """Error to raise instead, on every rank alike: a ConfigError where the base model is at fault, which another attempt can't mend."""
    folder = run.config.training.model.name
    fault = _first(run, _base_changed(run) or _weight_at_fault(run, step))
    if fault is not None:
        return ConfigError(f"{error}; the cause is the base model: {fault}; put the right files into {folder}, then start again")
    if step == 1:
        return NonFinite(
            f"{error}; no update was made before it, so the learning rate is not the cause: check the base model {folder}, the samples of"
            " this step and the precision"
        )
    source = run.resumed_from
    if source is not None and not source.manifest.identity.base_files:
        return NonFinite(
            f"{error}; {source.folder} has no hashes of the base model's files: check that {folder} is still what it was trained on"
        )
    return error


def _base_changed(run: Run) -> str | None:
    """Name a changed file; None where a volume's fault hides it, for the weights in memory still tell."""
    try:
        return run.base.changed()
    except TrainerError:
        return None


def _weight_at_fault(run: Run, step: int) -> str | None:
    """Name a weight of the base model that is NaN or infinite, as far as this rank has it. Of weights that are trained only the first step
    can tell.
    """
    trained = run.config.training.method is Method.FULL and step == 1
    for name, parameter in run.engine.module.named_parameters():
        values = own_values(parameter)
        if (trained or not parameter.requires_grad) and values.is_floating_point() and not bool(torch.isfinite(values).all()):
            return f"its weight {name} holds NaN or infinite values"
    return None


def _first(run: Run, fault: str | None) -> str | None:
    """First fault that any rank has, by the store, since not every rank need come here. Rank 0 keeps the store until the others have
    read.
    """
    ranks, end = run.ranks, time.monotonic() + PATIENCE_SECONDS
    _tell(run, "nonfinite", json.dumps(fault))
    faults = [json.loads(answer) for rank in range(ranks.world_size) if (answer := _heard(run, f"nonfinite/{rank}", end)) is not None]
    _tell(run, "nonfinite-read", "")
    if ranks.rank == 0:
        for rank in range(1, ranks.world_size):
            _heard(run, f"nonfinite-read/{rank}", end)
    return next((one for one in (*faults, fault) if one is not None), None)


def _tell(run: Run, topic: str, text: str) -> None:
    with suppress(DistError):  # rank 0 ended meanwhile, by itself: its own error is reported
        run.ranks.store.set(f"{topic}/{run.ranks.rank}", text)


def _heard(run: Run, key: str, end: float) -> bytes | None:
    """Value of a key; None when that rank doesn't come here, or rank 0 has ended."""
    try:
        run.ranks.store.wait([key], timedelta(seconds=max(0.001, end - time.monotonic())))
        return bytes(run.ranks.store.get(key))
    except DistError:
        return None
