"""A run that is ready to train, the report of its saves, and what its manifests say of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep_spec import length
from lockstep_spec.choices import Batches
from lockstep_spec.settings import Recomputed
from lockstep_spec.training import OptimizationConfig, TrainingConfig
from lockstep_train.balance import Shares
from lockstep_train.base.limits import Watch
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.runfile import RunConfig
from lockstep_train.checkpoint import resume
from lockstep_train.checkpoint.format.identity import Identity, parameters_digest, training_settings
from lockstep_train.checkpoint.format.manifest import Manifest
from lockstep_train.checkpoint.save.save import Saved, Saver
from lockstep_train.data.dataset import Dataset, sequence_settings
from lockstep_train.data.tokens.tokenizer import Tokenizer
from lockstep_train.engine.experts import ExpertUsage
from lockstep_train.engine.loss import TokenLoss
from lockstep_train.model.base_files import BaseHash
from lockstep_train.report import Reporter
from lockstep_train.zero import zero_access


@dataclass
class Description:
    """Manifest of each step; the shards are added when they are written."""

    template: Manifest
    plan: length.Plan
    engine: Any

    def __call__(self, step: int) -> Manifest:
        consumed = self.plan.cursor(step + 1)
        return replace(
            self.template,
            step=step,
            samples_consumed=consumed,
            optimizer_step=zero_access.optimizer_step(self.engine),
            loss_scaler=zero_access.loss_scaler_state(self.engine),
        )

    def set_eval_loss_before(self, loss: str | None) -> None:
        self.template = replace(self.template, eval_loss_before=loss)

    def set_eval_loss(self, step: int, loss: float) -> None:
        """Set what the next commits say of how good they are; NaN is no answer, and would never compare."""
        if math.isfinite(loss):
            self.template = replace(self.template, eval_loss=loss, eval_step=step)


def run_identity(
    training: TrainingConfig,
    base: str,
    base_files: Mapping[str, str],
    dataset: Dataset,
    plan: length.Plan,
    shapes: dict[str, tuple[int, ...]],
) -> Identity:
    return Identity(
        base=base,
        parameters=parameters_digest(shapes),
        dataset=dataset.digest,
        seed=training.seed,
        global_batch_size=plan.global_batch_size,
        settings=training_settings(training) | sequence_settings(training.data, training.evaluation),
        base_files=base_files,
        data_files=dataset.files,
    )


def manifest_template(
    config: RunConfig, start: resume.Start, identity: Identity, adapter: dict[str, Any], ranks: Ranks, batches: Batches
) -> Manifest:
    training = config.training
    return Manifest(
        step=0,
        attempt=start.attempt,
        job=config.job_name,
        job_uid=config.job_uid,
        world_size=ranks.world_size,
        zero_stage=training.zero_stage.value,
        precision=training.precision.value,
        base_model=training.model.name,
        base_origin=None if config.origin is None else asdict(config.origin),
        identity=identity,
        samples_consumed=0,
        optimizer_step=0,
        eval_loss_before=start.source.manifest.eval_loss_before if start.source else None,
        adapter=adapter,
        shards=(),
        content=training.checkpoint.content.value,
        optimizer_settings=optimizer_settings(training.optimization),
        eval_loss=start.source.manifest.eval_loss if start.source else None,
        eval_step=start.source.manifest.eval_step if start.source else None,
        batches=batches,
    )


def optimizer_settings(optimization: OptimizationConfig) -> dict[str, float]:
    """Settings of the update that may change between attempts, by their paths below `training`. Learning rate and schedule are functions of
    the step.
    """
    return {
        "optimization.weightDecay": optimization.weight_decay,
        "optimization.beta1": optimization.beta1,
        "optimization.beta2": optimization.beta2,
        "optimization.epsilon": optimization.epsilon,
    }


def changed_settings(manifest: Manifest, training: TrainingConfig) -> list[str]:
    """Settings that a run may change and a commit was trained with otherwise, in words (pure)."""
    before = {"precision": manifest.precision, **manifest.optimizer_settings}
    now = {"precision": training.precision.value, **optimizer_settings(training.optimization)}
    return [f"training.{name} is {now[name]} and was {value}" for name, value in before.items() if now.get(name, value) != value]


class SaveReport:
    """Reports of how each save ended, at once and from any thread, and counts for the metrics of the next step."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._seconds: float | None = None
        self._failures = 0
        self._skipped = 0

    def __call__(self, saved: Saved) -> None:
        """Report a save. Only rank 0 knows of every save whether it is committed."""
        self._seconds = saved.seconds
        if saved.committed:
            self._reporter.checkpoint(saved.step, saved.folder, saved.bytes, saved.seconds, stall_seconds=saved.stall_seconds)
        elif saved.problem is not None:
            self._failures += 1
            self._reporter.save_failed(saved.step, saved.problem, saved.seconds)

    def skip(self, step: int, saving: int | None) -> None:
        self._skipped += 1
        line = (
            f"CHECKPOINT step {step} SKIPPED: step {saving} is still being written; the volume is slower than checkpoint.everySteps"
            " asks for"
        )
        self._reporter.event("saveSkipped", line=line, step=step, saving=saving)

    @property
    def metrics(self) -> dict[str, float | None]:
        return {"saveSeconds": self._seconds, "saveFailures": self._failures, "savesSkipped": self._skipped}


@dataclass(frozen=True)
class Run:
    """A run that is ready to take its next step."""

    config: RunConfig
    ranks: Ranks
    reporter: Reporter
    dataset: Dataset
    tokenizer: Tokenizer
    plan: length.Plan
    shares: Shares
    engine: Any
    loss: TokenLoss
    saver: Saver
    save_report: SaveReport
    eval_loss_before: str | None
    """Loss from the commit this run goes on from."""
    adapter: dict[str, Any]
    describe: Description
    usage: ExpertUsage | None
    """Counter of the tokens that each expert gets; None for a model without experts."""
    watch: Watch
    shared: bool
    """True if all nodes see the same run folder."""
    base: BaseHash
    resumed_from: resume.VerifiedCommit | None
    recomputed: Recomputed
    """Parts of layers that the backward pass computes again."""
