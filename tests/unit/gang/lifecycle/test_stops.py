"""What is said of a stop: whether the work until then is saved, and if not, why."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.contract.messages import Checkpoint, End, Error, Exited, Leaving, RankExit, RankReport, Started, Step, Stopped
from lockstep_gang.contract.report import Save, State, StopReport
from lockstep_gang.coordinator import coordinator
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.log_lines import log_lines
from lockstep_gang.lifecycle.decide import Decision
from unit.gang.cases import KEY
from unit.gang.story import Story, all_stopped, failed_before, hello, started

TRAINING: dict[str, Any] = {"training": {}}


def training(step: int | None = None, commit: int | None = None, **changes: Any) -> Story:
    """Two ranks of the trainer (or of a script) that have come so far."""
    story = started(**TRAINING | changes)
    if commit is not None:
        story.reports(0, Checkpoint(0, commit, f"/c/step-{commit}.a1"))
    if step is not None:
        story.reports(0, Step(0, step, 100))
    return story


def stopping(story: Story) -> Story:
    """All nodes are asked to stop, as when the pods are deleted."""
    return story.hears(0, Leaving()).hears(1, Leaving())


def ended(story: Story, *codes: int | None, **changes: Any) -> StopReport:
    for rank, code in enumerate(codes):
        story.hears(rank, Exited(story.gang.attempt, replace(RankExit(rank, code, None, ordered=True), **changes)))
    all_stopped(story)
    stop = story.report.stop
    assert isinstance(stop, StopReport)
    return stop


def said(stop: StopReport) -> tuple[Save, str, int | None, int | None]:
    return stop.save, stop.message, stop.step, stop.lost_steps


def test_a_commit_of_the_last_step_is_a_save() -> None:
    story = stopping(training(step=43, commit=40))
    story.reports(0, Checkpoint(0, 43, "/c/step-43.a1"))
    assert said(ended(story, 75, 75)) == (Save.SAVED, "saved at step 43 and stopped", 43, 0)
    assert story.records[-1] == "Stopped"


def test_what_the_last_commit_doesnt_have_is_counted_and_the_rank_that_failed_is_named() -> None:
    story = stopping(training(step=43, commit=31))
    story.reports(1, Error(1, "OSError", "No space left on device"))
    save, message, step, lost = said(ended(story, 75, 1))
    assert (save, step, lost) == (Save.NOT_SAVED, 31, 12)
    assert (
        message
        == "stopped without a save: 12 steps since the commit of step 31 are lost: rank 1 exited with 1: OSError: No space left on device"
    )


@pytest.mark.parametrize(("stated", "seconds"), [({"save_grace_seconds": 150}, 150), ({}, 120)], ids=["stated", "not stated"])
def test_ranks_that_were_killed_when_their_time_was_over_are_named(stated: dict[str, Any], seconds: int) -> None:
    story = stopping(training(step=43, commit=42, **stated))
    story.now += seconds - 1
    stop = ended(story, None, None, signal="SIGKILL")
    assert (
        stop.message == "stopped without a save: 1 step since the commit of step 42 is lost:"
        f" ranks 0, 1 still ran after the {seconds} s that a save may take, and were killed"
    )


def test_a_rank_that_is_killed_early_is_not_said_to_have_taken_too_long() -> None:
    story = stopping(training(step=43))
    story.now += 118.9
    stop = ended(story, None, None, signal="SIGKILL")
    assert stop.message == "stopped without a save: 43 steps since the start are lost: rank 0 was ended by SIGKILL"


def test_a_node_that_goes_without_a_word_is_named() -> None:
    story = stopping(training(step=5))
    story.hears(0, Exited(1, RankExit(0, 75, None, ordered=True)), Stopped(1))
    story.loses(1)
    assert story.report.stop.message.endswith("lost: node 1 was gone before it said how its ranks ended")


@pytest.mark.parametrize(
    ("commit", "message"),
    [
        (None, "stopped before the first step of attempt 1"),
        (40, "stopped before the first step of attempt 1; the newest commit is step 40"),
    ],
)
def test_before_the_first_step_there_is_nothing_to_save(commit: int | None, message: str) -> None:
    stop = ended(stopping(training(commit=commit)), 75, 75)
    assert said(stop) == (Save.NOTHING_TO_SAVE, message, commit, 0)


@pytest.mark.parametrize(
    ("step", "code", "message"),
    [(None, 0, "stopped: its ranks exited with 0 or exited with 75"), (7, 75, "stopped at step 7: its ranks exited with 75")],
    ids=["nothing", "steps"],
)
def test_of_a_script_that_reports_no_checkpoint_it_isnt_known_whether_it_saved(step: int | None, code: int, message: str) -> None:
    stop = ended(stopping(training(step=step, training=None)), 75, code)
    words = f"{message}; the script reports no checkpoint, so only it knows what was saved"
    assert said(stop) == (Save.UNKNOWN, words, None, None)


ASKED, BY_ITSELF = (0, True), (0, False)
LEAVES: dict[str, tuple[int, ...]] = {"suspend, resize, deadline, Ctrl-C": (0, 1), "drain, a join's SIGTERM": (1,)}


@pytest.mark.parametrize("leaving", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize(
    ("spec", "reported", "exits", "outcome"),
    [
        ({}, (), (ASKED, ASKED), "Stopped"),
        ({}, (Step(0, 62, 2000),), (ASKED, ASKED), "Stopped"),
        ({}, (Step(0, 62),), (ASKED, ASKED), "Stopped"),
        ({}, (Step(0, 0, 0),), (ASKED, ASKED), "Stopped"),
        ({}, (), (BY_ITSELF, ASKED), "Stopped"),  # one is done, the other was stopped
        ({}, (), (BY_ITSELF, (75, True)), "Stopped"),
        ({}, (), (BY_ITSELF, BY_ITSELF), "Complete"),  # in the moment in which it was to be stopped
        ({}, (Step(0, 2000, 2000),), (ASKED, ASKED), "Complete"),
        ({}, (Step(1, 2000, 2000),), (ASKED, ASKED), "Stopped"),  # it is rank 0 whose steps are the job's
        ({}, (End(0),), (ASKED, BY_ITSELF), "Complete"),
        ({}, (End(0),), (ASKED, (75, True)), "Stopped"),
        (TRAINING, (End(0, {"adapter": "/a"}),), (ASKED, ASKED), "Complete"),
        (TRAINING, (Step(0, 62, 2000),), (ASKED, ASKED), "Stopped"),
    ],
)
def test_ranks_that_exit_with_0_after_a_stop_are_stopped_unless_the_end_was_reported(
    spec: dict[str, Any], reported: tuple[RankReport, ...], exits: tuple[tuple[int, bool], ...], outcome: str, leaving: tuple[int, ...]
) -> None:
    story = started(**spec)
    for report in reported:
        story.reports(report.rank, report)
    for node in leaving:
        story.hears(node, Leaving())
    for rank, (code, ordered) in enumerate(exits):
        story.exits(rank, code, ordered=ordered)
    all_stopped(story)
    assert (story.records[-1] if outcome == "Stopped" else story.records[-2:]) == (outcome if outcome == "Stopped" else ["end", outcome])
    assert (story.report.state, story.report.stop is None) == ((State.WAITING, False) if outcome == "Stopped" else (State.COMPLETE, True))


def test_a_drained_node_s_successor_goes_on_though_all_ranks_exited_with_0_and_an_earlier_attempt_had_reported_an_end() -> None:
    story = started(restart=replace(started().run.restart, max_restarts=1)).reports(0, Step(0, 9, 9), End(0))
    story.exits(1, 1)
    all_stopped(story).waits(60)
    for attempt in (2, 3):
        assert story.gang.attempt == attempt
        story.hears(0, Started(attempt)).hears(1, Started(attempt), Leaving()).exits(0, ordered=True).exits(1, ordered=True)
        all_stopped(story).loses(1).hears(1, hello(1, instance=f"successor of {attempt}"))
    assert (story.gang.attempt, story.report.restarts_counted) == (4, 1)
    assert story.records == ["begin", "Failed", "begin", "Stopped", "begin", "Stopped", "begin"]


def test_ranks_that_a_signal_ended_are_told_in_the_plural() -> None:
    stop = ended(stopping(training(training=None)), None, None, signal="SIGTERM")
    assert stop.message.startswith("stopped: its ranks were ended by SIGTERM; ")


def test_a_script_that_reports_its_commits_is_judged_by_them() -> None:
    stop = ended(stopping(training(step=7, commit=5, training=None)), 75, 1)
    assert stop.message == "stopped without a save: 2 steps since the commit of step 5 are lost: rank 1 exited with 1"


def test_a_stop_between_two_attempts_costs_nothing_more_and_is_told_once() -> None:
    story = failed_before(training(step=43, commit=40, restart=replace(started().run.restart, max_restarts=3, backoff_seconds=60)))
    story.exits(1, 1)
    all_stopped(story)
    assert (story.report.state, story.report.stop) == (State.BACKING_OFF, None)
    story.now += 5
    stop = stopping(story).report.stop
    assert said(stop) == (Save.NOTHING_TO_SAVE, "stopped while no rank ran: the newest commit is step 40", 40, 0)
    story.now += 5
    assert story.decide().report.stop == stop


def test_the_stop_before_stays_in_the_report_of_the_next_attempt() -> None:
    story = stopping(training(step=43, commit=43))
    stop = ended(story, 75, 75)
    for node in (0, 1):
        story.hears(node, hello(node, known=1, instance=f"new-{node}"))
    assert (story.gang.attempt, story.report.stop) == (2, stop)
    assert stop.attempt == 1


def test_the_log_says_once_what_came_of_the_stop() -> None:
    story = stopping(training(step=43, commit=43))
    before = story.gang
    ended(story, 75, 75)
    assert list(log_lines(before, story.gang, story.run)).count("saved at step 43 and stopped") == 1


async def test_node_0_waits_for_a_slower_node_as_long_as_a_save_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "SETTLE_SECONDS", 0.01)
    story = stopping(training(step=7, run_dir=str(tmp_path)))
    story.hears(0, Exited(1, RankExit(0, 75, None, ordered=True)), Stopped(1))
    hosted = Coordinator(story.run, KEY, Output(lambda line: None, lambda: (), lambda line: None))
    hosted._ledger.write(Decision(story.gang, begin=True), story.run, hosted._now())
    hosted.gang = replace(story.gang, stop_began=hosted._now())
    settling = asyncio.ensure_future(hosted.settle())
    await asyncio.sleep(0.1)
    assert not settling.done()
    hosted.heard(1, Exited(1, RankExit(1, 3, None, ordered=True)))
    hosted.heard(1, Stopped(1))
    await settling
    assert hosted.gang.stopped.message == "stopped without a save: 7 steps since the start are lost: rank 1 exited with 3"


async def test_a_node_that_does_not_answer_in_time_is_not_waited_for_any_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "SETTLE_SECONDS", 0.01)
    story = stopping(training(step=7, commit=7, run_dir=str(tmp_path), save_grace_seconds=0))
    story.hears(0, Exited(1, RankExit(0, 75, None, ordered=True)), Stopped(1))
    hosted = Coordinator(story.run, KEY, Output(lambda line: None, lambda: (), lambda line: None))
    hosted._ledger.write(Decision(story.gang, begin=True), story.run, hosted._now())
    hosted.gang = replace(story.gang, stop_began=hosted._now())
    await hosted.settle()
    stop = hosted.gang.stopped
    assert (stop.save, stop.message) == (Save.SAVED, "saved at step 7 and stopped")
