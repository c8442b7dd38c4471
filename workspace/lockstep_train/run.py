"""A run that is ready to train, and the report of its saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep_spec import length
from lockstep_train.base.limits import Watch
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.runfile import RunConfig
from lockstep_train.checkpoint import resume
from lockstep_train.checkpoint.save.save import Saved, Saver
from lockstep_train.data.dataset import Dataset
from lockstep_train.data.tokens.tokenizer import Tokenizer
from lockstep_train.describe import Description
from lockstep_train.engine.experts import ExpertUsage
from lockstep_train.engine.loss import TokenLoss
from lockstep_train.model.base_files import BaseHash
from lockstep_train.report import Reporter


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
        line = f"CHECKPOINT step {step} SKIPPED: step {saving} is still being written; the volume is slower than checkpoint.everySteps asks for"
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
