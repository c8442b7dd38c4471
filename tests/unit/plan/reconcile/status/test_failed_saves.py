"""Saves that fail while training goes on: heard from rank 0, told in status, events and `lockstep why`, over with the next commit."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.plan.observed import Observed
from lockstep.plan.pages.table import describe
from lockstep.plan.pages.why import answer_page, why
from lockstep.plan.reconcile.reconcile import Plan, reconcile
from lockstep_gang.contract.messages import Checkpoint, SaveFailed, Step
from lockstep_gang.contract.report import Cause, CheckpointReport, FailedSaves, TrainerReport
from lockstep_gang.lifecycle.causes import rank_cause
from lockstep_gang.lifecycle.tracebacks import Raised
from unit.gang.story import Story, started
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, condition, report, settled

FULL = "rank 1 on node 1: /workspace/runs/x/checkpoints/step-50.a1 can't be written: No space left on device"
FAILED = FailedSaves(50, FULL, "2026-01-01T00:00:00Z", 2)
COMMIT = CheckpointReport(40, "/workspace/runs/x/checkpoints/step-40.a1", "2026-01-01T00:00:00Z")


def saving() -> Story:
    return started().reports(0, Step(0, 40), Checkpoint(0, 40, "/c"), Step(0, 50), SaveFailed(0, 50, FULL))


def test_saves_that_fail_are_counted_until_one_is_committed() -> None:
    story = saving()
    since = story.report.failed_saves.since
    story.waits(30).reports(0, SaveFailed(0, 60, FULL))
    assert story.report.failed_saves == FailedSaves(60, FULL, since, 2)
    assert story.report.checkpoint.step == 40
    story.reports(0, Checkpoint(0, 70, "/c"))
    assert story.report.failed_saves is None


def failing(**fields: Any) -> tuple[Observed, Plan]:
    before = settled(report(checkpoint=COMMIT))
    said = report(checkpoint=COMMIT, failed_saves=FAILED, trainer=TrainerReport("Step", 55, 120), **fields)
    plan = reconcile(before, said, CONTEXT, NOW + 5)
    return after(before, plan), plan


def test_a_save_that_fails_is_a_condition_an_event_and_in_why_with_what_a_failure_would_cost() -> None:
    observed, plan = failing()
    status, reason, message = condition(plan, "SavesFailing")
    assert (status, reason) == ("True", "SaveFailed")
    for part in ("rank 1 on node 1 (node-1): /workspace", "No space left on device", "since 2026-01-01T00:00:00Z", "commit is step 40"):
        assert part in message
    assert condition(plan, "Progressing")[:2] == ("True", "Running")
    assert "SavesFailing" in condition(plan, "Progressing")[2]
    assert [(note.type, note.reason) for note in plan.events] == [("Warning", "SaveFailed")]
    assert plan.status is not None and plan.status["failedSaves"]["count"] == 2
    said = answer_page(why(observed, (), NOW + 6))
    assert "saves        2 saves in a row" in said and "(15 steps by now)" in said
    assert any(line.startswith("Saves ") for line in describe(observed.job, [], NOW + 6, "in namespace ns"))


def test_the_next_commit_ends_it_and_says_so() -> None:
    observed, _ = failing()
    plan = reconcile(observed, report(checkpoint=COMMIT), CONTEXT, NOW + 20)
    assert condition(plan, "SavesFailing")[:2] == ("False", "SavesWork")
    assert [(note.type, note.reason) for note in plan.events] == [("Normal", "SavesWork")]
    assert plan.status is not None and "failedSaves" not in plan.status


def test_an_operator_that_has_just_begun_to_lead_says_what_the_one_before_heard() -> None:
    observed, _ = failing()
    plan = reconcile(observed, None, CONTEXT, NOW + 20)
    assert plan.status is None or condition(plan, "SavesFailing")[0] == "True"
    assert plan.events == ()


@pytest.mark.parametrize("words", ["No space left on device", "Permission denied", "Read-only file system", "Disk quota exceeded"])
def test_a_last_save_that_fails_is_a_fault_of_the_storage(words: str) -> None:
    said = f"step 60 could not be saved: rank 0 on node 0: /workspace/runs/x can't be written: {words}"
    assert rank_cause(True, 1, None, Raised("TrainerError", said), said) is Cause.STORAGE
