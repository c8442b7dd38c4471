"""Steps of a run, one after the other: batches, learning rate, update, report."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from lockstep_train.base import limits
from lockstep_train.base.errors import NonFinite
from lockstep_train.checkpoint.zero import zero_access
from lockstep_train.data.sequences.batches import Batch, collate, global_batch, rank_micro_batches
from lockstep_train.engine.clock import Clock, Waits
from lockstep_train.engine.optimizer import learning_rate
from lockstep_train.engine.step import Stepper, StepResult
from lockstep_train.nonfinite import explain_nonfinite
from lockstep_train.report.agent import PaceTeller
from lockstep_train.report.speed import across_ranks, measure_speed, peak_memory_bytes, peak_reserved_bytes
from lockstep_train.run import Run
from lockstep_train.watch.watchdog import StopSignal

MEASURED_STEPS = 50


class Steps:
    """Stepper of a run, which remembers how long the last steps took."""

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
        self._speed = measure_speed(run.engine.module, training, run.ranks.world_size, run.reporter)
        self._clock = Clock(run.ranks.device)
        self._durations: deque[float] = deque(maxlen=MEASURED_STEPS)
        self._computing = 0.0
        """Seconds of the last step's forward and backward passes; each rank tells the others in the next one."""
        self._skipped = 0

    @property
    def limit_seconds(self) -> float:
        """Limit of one step, or of one batch of an evaluation, which is less."""
        return limits.step_seconds(self._run.config.training.limits.step_timeout_seconds, self._durations)

    def take(self, step: int) -> StepResult:
        run, plan = self._run, self._run.plan
        run.reporter.activity("Step")
        run.watch.begin(f"Step {step}", self.limit_seconds)
        started = time.monotonic()
        self._clock.start()
        work = step_batches(run, step)
        rate = learning_rate(run.config.training.optimization, step, plan.total_steps)
        zero_access.set_learning_rate(run.engine, rate)
        on_gpu = run.ranks.device.type == "cuda"
        report = (peak_memory_bytes(on_gpu), self._computing, peak_reserved_bytes(on_gpu))
        try:
            result = self._stepper.take(step, work.batches, work.tokens, lambda: self._stop.requested, self._clock, report)
        except NonFinite as error:
            raise explain_nonfinite(run, step, error) from error
        self._computing = result.seconds["forward"] + result.seconds["backward"]
        self._durations.append(time.monotonic() - started)
        self._pace.step(step, result.own_seconds)
        self._report(step, rate, work, result)
        return result

    def _report(self, step: int, rate: float, work: StepBatches, result: StepResult) -> None:
        run, seconds = self._run, self._durations[-1]
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
    """Batches of a step: a pure function of the step and of the rank: nothing is drawn, nothing is remembered."""
    training, plan, ranks = run.config.training, run.plan, run.ranks
    examples = run.dataset.training
    cursor = plan.cursor(step)
    indices = global_batch(len(examples), training.seed, cursor, plan.global_batch_size, plan.total_samples)
    mine = rank_micro_batches(indices, ranks.rank, ranks.world_size, training.optimization.micro_batch_size, plan.accumulation)
    ghost = examples[indices[0]]
    return StepBatches(
        batches=[collate([examples[index] for index in micro], ghost, run.tokenizer.pad, ranks.device) for micro in mine],
        tokens=examples.learned_tokens(indices),
        documents=examples.documents(indices),
        epoch=plan.cursor(step + 1) / len(examples),
        sources=[examples.source(index) for index in indices],
    )
