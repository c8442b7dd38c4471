"""Loop of a run: train, evaluate, save, stop when asked, export at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lockstep_spec.choices import Method
from lockstep_train.balance import renew
from lockstep_train.base import limits
from lockstep_train.base.errors import Stopped, TrainerError, reason_of
from lockstep_train.base.ranks import vote
from lockstep_train.card import make_whole, provenance_of
from lockstep_train.checkpoint.format.views import TOKENIZER
from lockstep_train.engine.experts import usage_fields
from lockstep_train.evaluate import Leaving, evaluate
from lockstep_train.export import write_adapter, write_model
from lockstep_train.logprobs import LOGPROBS, put_beside, record
from lockstep_train.model.weight_files import PRECISIONS
from lockstep_train.run import Run
from lockstep_train.steps import Steps
from lockstep_train.watch.watchdog import StopSignal
from lockstep_train.zero import zero_access

NOTHING_TO_SAVE = "asked to stop before the first step: the state is the one it started from"


def train(run: Run, stop: StopSignal) -> dict[str, str | None]:
    """Train to the end and return the result: the adapter's or the model's folder, and the evaluation losses before and after.

    Raises Stopped when the ranks were asked to stop (the state is committed), NonFinite, or TrainerError when a stop's save failed.
    """
    nothing_left = _nothing_left(run)
    if nothing_left is not None:
        run.reporter.say(f"{nothing_left[0].upper()}{nothing_left[1:]}")
    run.watch.begin("Start of training", limits.LOAD_SECONDS)  # for the slowest rank to have loaded, too
    if vote(stop.requested, run.ranks):
        raise Stopped(NOTHING_TO_SAVE)
    run.watch.loaded()
    steps = Steps(run, stop)
    before = run.eval_loss_before
    if run.plan.done.steps == 0 and run.dataset.evaluation:
        before = _evaluate(run, 0, stop, steps)
        if before is None:
            raise Stopped(NOTHING_TO_SAVE)
        run.describe.set_eval_loss_before(before)
    after, recorded = before, None
    every = run.config.training.evaluation.every_steps if run.dataset.evaluation and run.config.training.evaluation else None
    for step in range(run.plan.done.steps + 1, run.plan.total_steps + 1):
        result = steps.take(step)
        last, stopping = step == run.plan.total_steps, result.stop
        if every is not None and (last or step % every == 0) and not stopping:
            loss = _evaluate(run, step, stop, steps)
            after, stopping = loss or after, loss is None
            recorded = record(run, step, steps.limit_seconds) if loss is not None else None
        if last or stopping or step % run.config.training.checkpoint.every_steps == 0:
            _report_experts(run, step)
            run.watch.begin(f"Save of step {step}", limits.SAVE_SECONDS)
            save_at_border(run, step, must=stopping or last, saving=result.saving)
            if not (last or stopping):
                renew(run.shares, step, run.ranks, run.reporter)
        if stopping:
            raise Stopped(f"asked to stop: step {step} of {run.plan.total_steps} is saved")
    if run.plan.done.steps >= run.plan.total_steps and run.dataset.evaluation:
        after = _evaluate(run, run.plan.total_steps, stop, steps)
        if after is None:
            raise Stopped("asked to stop after the last step, which is saved already")
    if every is None or run.plan.done.steps >= run.plan.total_steps:
        recorded = record(run, run.plan.total_steps, steps.limit_seconds)
    return {**export_outcome(run, recorded), "evalLossBefore": before, "evalLossAfter": after, "note": nothing_left}


def _nothing_left(run: Run) -> str | None:
    """Note on a run whose steps an earlier one has done, and how to train all the same."""
    source, total = run.resumed_from, run.plan.total_steps
    if source is None or run.plan.done.steps < total or source.manifest.job_uid == run.config.job_uid:
        return None
    return (
        f"nothing was left to do: step {run.plan.done.steps} of {total} is in {source.folder}; to train anew, set"
        " training.checkpoint.resumeFrom to None (lockstep run: --fresh); to train on, raise training.optimization.epochs or maxSteps"
    )


def _evaluate(run: Run, step: int, stop: StopSignal, steps: Steps) -> str | None:
    """Evaluate; None when the evaluation was left, because the ranks are asked to stop."""
    run.reporter.activity("Evaluate")
    leaving = Leaving(run.ranks, lambda: stop.requested)

    def leave(turn: int) -> bool:
        run.watch.begin(f"Evaluation at step {step}, batch {turn + 1}", steps.limit_seconds)
        return leaving(turn)

    rows = run.shares.most_rows(run.config.training.optimization.micro_batch_size)
    loss = evaluate(run.engine, run.loss, run.dataset.evaluation, rows, run.tokenizer.pad, run.ranks, leave)
    if loss is None:
        run.reporter.say(f"The evaluation at step {step} ends early: the run was asked to stop")
        return None
    run.describe.set_eval_loss(step, loss)
    if run.ranks.first:
        run.reporter.evaluation(step, loss)
    return f"{loss:.4f}"


def _report_experts(run: Run, step: int) -> None:
    """Report the experts' tokens with every commit, so that a run that goes on from it counts each step once. A small collective."""
    if run.usage is not None:
        layers = run.usage.collect()
        run.reporter.experts(step, {str(item.layer): item.counts for item in layers}, **usage_fields(layers))


def save_at_border(run: Run, step: int, *, must: bool, saving: bool) -> None:
    """Start to save `step`; with `must`, wait until it is committed.

    `saving`: some rank was still at the save before when the ranks last met. Then all of them skip this one, rather than
    wait for a volume that can't keep up; but a save that must be waits. Raises TrainerError if that one fails.
    """
    if saving and not must:
        run.save_report.skip(step, run.saver.last_step)
        return
    run.reporter.activity("Save")
    if not must:
        run.saver.start(run.engine, step)
        return
    saved = run.saver.save(run.engine, step)
    if not saved.committed:
        raise TrainerError(f"step {step} could not be saved: {saved.problem}")


@contextlib.contextmanager
def finishing(run: Run) -> Iterator[None]:
    """Wait for the save under way when the run ends well, or in a way that all ranks share; not when this rank alone has failed."""
    try:
        yield
    except TrainerError:
        run.saver.finish()
        raise
    run.saver.finish()


def export_outcome(run: Run, recorded: Path | None) -> dict[str, str | None]:
    """Write the outcome on every volume and say where; beside it what the live model gives, where that was recorded. A collective: masters
    are gathered, which is fine at the end.
    """
    run.reporter.activity("Export")
    full = run.config.training.method is Method.FULL
    run.watch.begin(f"Export of the {'model' if full else 'adapter'}", limits.EXPORT_SECONDS)
    folder = run.config.run_dir / ("model" if full else "adapter")
    _export(run, folder, full=full)
    if run.ranks.first:
        try:
            put_beside(recorded, folder)
        except OSError as error:
            run.reporter.say(f"WARNING: {folder / LOGPROBS} is not written, so it can't be verified: {reason_of(error)}")
    run.reporter.say(f"{'Model' if full else 'Adapter'}: {folder}")
    return {"adapter": None if full else str(folder), "model": str(folder) if full else None}


def _export(run: Run, folder: Path, *, full: bool) -> None:
    """Write by one rank for each volume; the others take part in the gathering, one parameter at a time, and keep nothing."""
    precision = run.config.training.precision
    masters = zero_access.gather_masters(run.engine)
    if not (run.ranks.first if run.shared else run.ranks.first_of_node):
        for _ in masters:
            pass
    elif full:  # one parameter at a time: a rank needs the memory of a layer and of a file
        write_model(folder, Path(run.config.training.model.name), masters, precision.value)
        _make_whole(run, folder)
    else:
        _make_whole(run, folder)
        weights = {name: value.to(PRECISIONS[precision]).cpu() for name, value in masters}
        write_adapter(folder, weights, run.adapter, precision.value, run.describe.template.identity.base_files)


def _make_whole(run: Run, folder: Path) -> None:
    origin = provenance_of(replace(run.describe.template, step=run.plan.total_steps))
    make_whole(folder, origin, Path(run.config.training.model.name), [run.config.run_dir / TOKENIZER])
