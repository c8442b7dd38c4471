"""The loop: train, evaluate, save, stop when asked, export at the end."""

from __future__ import annotations

import time
from pathlib import Path

from lockstep_train.assemble import Run
from lockstep_train.batches import step_batches
from lockstep_train.checkpoint import zero_access
from lockstep_train.engine.schedule import learning_rate
from lockstep_train.engine.step import StepResult, train_step
from lockstep_train.errors import Stopped
from lockstep_train.evaluate import evaluate
from lockstep_train.export import write_adapter
from lockstep_train.model.experts import usage_fields
from lockstep_train.report.speed import Speed, measure_speed, peak_memory_bytes
from lockstep_train.saving import save_at_border
from lockstep_train.stop import StopSignal


def train(run: Run, stop: StopSignal) -> dict[str, str | None]:
    """Train to the end and return the result: the adapter's folder and the evaluation losses before and after.

    Raises Stopped when the ranks were asked to stop (the state is committed), NonFinite, or TrainerError when a stop's save failed.
    """
    before = run.eval_loss_before
    if run.plan.done.steps == 0 and run.dataset.evaluation:
        before = _evaluate(run, 0)
        run.describe.set_eval_loss_before(before)
    after = before
    speed = measure_speed(run.engine.module, run.config.training, run.ranks.world_size, run.reporter)
    every = run.config.training.evaluation.every_steps if run.dataset.evaluation and run.config.training.evaluation else None
    for step in range(run.plan.done.steps + 1, run.plan.total_steps + 1):
        result = _step(run, step, stop, speed)
        last = step == run.plan.total_steps
        if every is not None and (last or step % every == 0) and not result.stop:
            after = _evaluate(run, step)
        if last or result.stop or step % run.config.training.checkpoint.every_steps == 0:
            _report_experts(run, step)
            save_at_border(run, step, must=result.stop or last, saving=result.saving)
        if result.stop and not last:
            raise Stopped(f"asked to stop: step {step} of {run.plan.total_steps} is saved")
    if run.plan.done.steps >= run.plan.total_steps and run.dataset.evaluation:
        after = _evaluate(run, run.plan.total_steps)
    return {"adapter": str(_export(run)), "evalLossBefore": before, "evalLossAfter": after}


def _step(run: Run, step: int, stop: StopSignal, speed: Speed) -> StepResult:
    """One optimizer step, reported."""
    run.reporter.activity("Step")
    started = time.monotonic()
    training, plan = run.config.training, run.plan
    work = step_batches(run, step)
    rate = learning_rate(training.optimization, step, plan.total_steps)
    zero_access.set_learning_rate(run.engine, rate)
    result = train_step(
        run.engine,
        work.batches,
        run.ranks,
        tokens=work.tokens,
        seed=training.seed,
        step=step,
        stopping=lambda: stop.requested,
        saving=run.saver,
        looking=run.usage.look_at if run.usage else None,
    )
    values = {
        "loss": result.loss,
        "learningRate": rate,
        "gradientNorm": result.gradient_norm,
        **speed.step(time.monotonic() - started, work.documents),
        "peakMemoryBytes": peak_memory_bytes(run.ranks.device.type == "cuda"),
        **run.save_report.metrics,
    }
    run.reporter.step(step, plan.total_steps, work.epoch, speed.remaining_seconds(plan.total_steps - step), values)
    return result


def _evaluate(run: Run, step: int) -> str:
    run.reporter.activity("Evaluate")
    micro = run.config.training.optimization.micro_batch_size
    loss = evaluate(run.engine, run.dataset.evaluation, micro, run.tokeniser.pad, run.ranks)
    run.describe.set_eval_loss(step, loss)
    if run.ranks.first:
        run.reporter.evaluation(step, loss)
    return f"{loss:.4f}"


def _report_experts(run: Run, step: int) -> None:
    """With every commit, so that a run that goes on from it counts each step once. A small collective."""
    if run.usage is not None:
        layers = run.usage.collect()
        run.reporter.experts(step, {str(item.layer): item.counts for item in layers}, **usage_fields(layers))


def _export(run: Run) -> Path:
    """The adapter in runDir/adapter, on each node's volume. A collective: masters are gathered, which is fine at the end."""
    run.reporter.activity("Export")
    folder = run.config.run_dir / "adapter"
    masters = {name: value.cpu() for name, value in zero_access.gather_masters(run.engine)}
    if run.ranks.first_of_node:
        write_adapter(folder, masters, run.adapter, run.config.training.precision.value)
    run.reporter.say(f"Adapter: {folder}")
    return folder
