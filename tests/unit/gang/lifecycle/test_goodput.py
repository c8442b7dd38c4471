"""What a gang's time is spent on: every moment of exactly one kind, whatever happens, over restarts of gang and coordinator alike."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_gang.contract.messages import (
    Activity,
    Beat,
    Checkpoint,
    Evaluate,
    Leaving,
    Reported,
    Started,
    Step,
    Stopped,
    rank_report_to_json,
)
from lockstep_gang.contract.preflight import Expected
from lockstep_gang.contract.report import Cause, Failure, Goodput, Loss, Spent, State
from lockstep_gang.contract.run import RestartPolicy, Run
from lockstep_gang.coordinator import coordinator
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.ledger import GoodputAccount
from lockstep_gang.coordinator.owner import Ownership
from lockstep_gang.coordinator.records import GoodputRecord, Records
from lockstep_gang.lifecycle.gang import Facts, new_gang
from lockstep_gang.lifecycle.goodput import accounted, with_absence
from unit.gang.cases import KEY, make_run
from unit.gang.story import Story, all_stopped, hello, started

ACCOUNT_SECONDS = 15.0

TRAINER = {"training": {}, "restart": RestartPolicy(3, 10), "gpus_per_node": 4}


def seconds(story: Story) -> dict[str, float]:
    """By kind, up to now, without those that nothing was spent on."""
    book = accounted(story.gang, story.run, story.now).goodput
    assert sum(book.spent.values()) == book.until - book.began
    return {kind: value / 1000 for kind, value in book.spent.items() if value}


def again(story: Story) -> Story:
    """The next attempt, once its backoff is over."""
    for node in range(story.run.nodes):
        story.hears(node, hello(node, known=story.gang.attempt))
    return story


def test_gpus_of_unlike_nodes_are_counted_one_by_one() -> None:
    run = make_run(nodes=3, ranks_per_node=4, gpus_per_node=4, node_ranks=(4, 1, 2))
    assert ([run.gpus_of(node) for node in range(3)], run.gpus, replace(run, gpus_per_node=0).gpus) == ([4, 1, 2], 7, 0)
    assert make_run(**TRAINER).gpus == 8


def test_waiting_for_nodes_is_queued_and_the_time_until_the_first_step_is_load() -> None:
    story = Story(make_run(**TRAINER))
    story.hears(0, hello(0)).waits(7).hears(1, hello(1)).waits(3)
    story.reports(0, Activity(0, "Load")).waits(2).reports(0, Activity(0, "Step")).waits(1).reports(0, Step(0, 1)).waits(4)
    assert seconds(story) == {"queued": 7, "load": 6, "train": 4}


def test_checks_before_the_first_attempt_are_preflight_and_after_a_failure_part_of_being_down() -> None:
    story = Story(make_run(**TRAINER, preflight=Expected()))
    story.hears(0, hello(0)).waits(4).hears(1, hello(1)).waits(3)
    assert story.gang.attempt == 0
    assert seconds(story) == {"queued": 4, "preflight": 3}
    story.gang = replace(story.gang, failure=Failure("gone", cause=Cause.FABRIC))
    assert seconds(story.waits(2)) == {"queued": 4, "preflight": 3, "down": 2}


def test_evaluations_and_saves_are_their_own_kinds() -> None:
    story = started(**TRAINER).reports(0, Step(0, 1)).waits(2).reports(0, Activity(0, "Evaluate")).waits(5)
    story.reports(0, Activity(0, "Save")).waits(1).reports(0, Activity(0, "Step")).waits(2).reports(0, Activity(0, "Export")).waits(3)
    assert seconds(story) == {"train": 4, "evaluate": 5, "save": 4}


def test_what_a_step_waited_for_a_save_is_not_training() -> None:
    story = started(**TRAINER).reports(0, Step(0, 1)).waits(10).reports(0, Step(0, 2, metrics={"saveWaitSeconds": "4.5"}))
    assert seconds(story) == {"train": 5.5, "save": 4.5}


@pytest.mark.parametrize("wait", ["nan", "inf", "-3", "soon", "1e9"])
def test_a_wait_that_cannot_be_brings_nothing_that_has_not_passed(wait: str) -> None:
    story = started(**TRAINER).reports(0, Step(0, 1)).waits(2).reports(0, Step(0, 2, metrics={"saveWaitSeconds": wait}))
    assert sum(seconds(story).values()) == 2


def test_after_a_failure_the_job_is_down_until_a_step_and_does_undone_steps_again() -> None:
    story = started(**TRAINER).reports(0, Step(0, 8)).waits(5).exits(1, 77).waits(1)
    all_stopped(story).waits(10)
    assert story.gang.attempt == 2
    story.waits(4).reports(0, Step(0, 5)).waits(3).reports(0, Step(0, 8)).waits(2)
    assert seconds(story) == {"train": 2, "down": 20, "lost": 3}
    assert accounted(story.gang, story.run, story.now).goodput.causes == {"OutOfMemory": Loss(23_000, 23_000 * 8)}


def test_steps_that_a_stop_did_not_save_are_done_again_because_of_it() -> None:
    story = started(**TRAINER).reports(0, Step(0, 8)).waits(5).hears(1, Leaving())
    for rank in (0, 1):
        story.hears(rank, Stopped(1))
    story.gang = replace(story.gang, facts=Facts())  # as a coordinator that was stopped too
    story.loses(1).hears(1, hello(1, known=1, instance="another")).waits(1).reports(0, Step(0, 5)).waits(3).reports(0, Step(0, 8))
    assert set(story.gang.goodput.causes) == {"Stopped"}


def test_what_comes_after_the_last_step_of_a_hang_is_down_and_not_training() -> None:
    story = started(**TRAINER).reports(0, Step(0, 1)).waits(3).reports(0, Step(0, 2)).waits(60)
    all_stopped(story.exits(1, 76).waits(1))
    assert seconds(story) == {"train": 3, "down": 61}
    assert story.gang.goodput.causes == {"Hang": Loss(61_000, 61_000 * 8)}


def test_the_step_that_a_start_goes_on_from_is_shown_and_is_no_progress() -> None:
    story = started(**TRAINER).waits(2).reports(0, Activity(0, "Resume", 40, 60)).waits(3)
    assert (story.report.trainer.step, story.report.trainer.total_steps) == (40, 60)
    assert seconds(story) == {"load": 5}
    assert story.gang.goodput.furthest_step == 0
    assert seconds(story.reports(0, Step(0, 41, 60)).waits(4)) == {"load": 5, "train": 4}


def test_a_report_tells_nothing_that_a_failure_could_take_back() -> None:
    story = started(**TRAINER).reports(0, Step(0, 1)).waits(3).reports(0, Step(0, 2)).waits(60).reports(0, Beat(0, "Step 3"))
    told = story.report.goodput
    assert (told.spent["train"], told.until - told.began) == (3000, sum(told.spent.values()))
    assert seconds(story)["train"] == 63
    all_stopped(story.exits(1, 76).waits(1))
    assert story.report.goodput.spent["train"] == 3000


def test_the_last_report_has_the_whole_account() -> None:
    story = started().reports(0, Step(0, 1)).waits(3).exits(0).waits(1).exits(1)
    assert story.report.state is State.COMPLETE
    assert story.report.goodput.spent["train"] == 4000


def test_an_evaluation_that_was_told_counts_though_a_failure_follows() -> None:
    story = started(**TRAINER).reports(0, Step(0, 1)).reports(0, Activity(0, "Evaluate")).waits(9).reports(0, Evaluate(0, 1))
    story.reports(0, Activity(0, "Step")).waits(2).exits(1, 1).waits(1)
    all_stopped(story)
    assert seconds(story) == {"evaluate": 9, "down": 3}


def test_a_stop_that_was_asked_for_keeps_what_was_trained() -> None:
    story = started(**TRAINER).reports(0, Step(0, 1)).waits(2).hears(0, Leaving())
    all_stopped(story.exits(0, 75).exits(1, 75))
    for node in range(2):
        story.hears(node, hello(node, known=1))
    story.hears(0, Started(2)).hears(1, Started(2)).exits(1, 1)
    assert seconds(all_stopped(story))["train"] == 2


def test_a_script_turns_out_to_have_been_loading_when_it_tells_its_first_step() -> None:
    story = started(restart=RestartPolicy(3, 10)).waits(76)
    assert seconds(story) == {"unknown": 76}
    story.reports(0, Step(0, 0, 30)).waits(3).reports(0, Step(0, 30, 30)).exits(0).exits(1)
    assert seconds(story) == {"load": 76, "train": 3}


def test_a_script_that_tells_no_steps_has_time_of_which_nobody_knows() -> None:
    story = started(restart=RestartPolicy(3, 10)).waits(5).exits(1, 1).waits(1)
    all_stopped(story).waits(10)
    for node in range(2):
        story.hears(node, hello(node, attempt=2))
    story.hears(0, Started(2)).hears(1, Started(2)).waits(6)
    assert seconds(story) == {"unknown": 11, "down": 11}


def test_a_stop_that_was_asked_for_saves_and_is_then_stopped_not_down() -> None:
    story = started(**TRAINER).reports(0, Step(0, 1)).waits(2).hears(0, Leaving())
    all_stopped(story.waits(3).exits(0, 75).exits(1, 75))
    fresh = replace(new_gang(story.run), attempt=1, goodput=story.gang.goodput)
    story.gang = with_absence(fresh, story.run, story.now + 50)
    assert seconds(story) == {"train": 2, "save": 3, "stopped": 50}


def test_a_drained_node_s_absence_is_queued() -> None:
    story = started(**TRAINER).reports(0, Step(0, 1)).hears(1, Leaving()).waits(2).exits(0, 75).exits(1, 75)
    all_stopped(story).waits(9)
    assert seconds(story) == {"save": 2, "queued": 9}


def test_the_account_ends_with_the_job() -> None:
    story = started().waits(2).exits(0).exits(1).waits(100)
    assert seconds(story) == {"unknown": 2}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["wait", "step", "evaluate", "save", "load", "fail", "stopped", "hello", "leave", "crash", "lose", "done"]),
        st.integers(0, 1),
        st.integers(0, 40_000),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(EVENTS)
def test_the_kinds_add_up_to_the_time_since_the_coordinator_first_began(events: list[tuple[str, int, int]]) -> None:
    run = make_run(**TRAINER)
    story = Story(run, accounted(new_gang(run), run, 1000.0))
    for kind, node, milliseconds in events:
        story.now += milliseconds / 1000
        happen(story, run, kind, node, milliseconds)
        before = story.gang.goodput
        story.gang = accounted(story.gang, run, story.now)
        book = story.gang.goodput
        assert sum(book.spent.values()) == book.until - book.began
        taken = {name: value - book.spent.get(name, 0) for name, value in before.spent.items() if value > book.spent.get(name, 0)}
        assert set(taken) <= {"train", "evaluate"}, "only what a failure has wasted is taken back"
        assert book.spent.get("down", 0) - before.spent.get("down", 0) >= sum(taken.values())
        assert set(book.spent) <= {kind.value for kind in Spent}
        if story.gang.ending is None:
            assert (book.began, book.until) == (1_000_000, int(story.now * 1000))


def happen(story: Story, run: Run, kind: str, node: int, number: int) -> None:
    if kind == "step":
        story.reports(0, Step(0, number % 50, metrics={"saveWaitSeconds": str(number / 9000)}))
    elif kind in ("evaluate", "save", "load"):
        story.reports(0, Activity(0, kind.capitalize()))
    elif kind == "fail":
        story.exits(node, 77)
    elif kind == "done":
        story.exits(node, 0)
    elif kind == "stopped":
        all_stopped(story)
    elif kind == "hello":
        story.hears(node, hello(node, known=story.gang.attempt, instance=f"{node}/{number}"))
    elif kind == "leave":
        story.hears(node, Leaving())
    elif kind == "lose":
        story.loses(node)
    elif kind == "crash" and story.gang.ending is None:
        fresh = replace(new_gang(run), attempt=story.gang.attempt, failure=story.gang.failure, history=story.gang.history)
        story.gang = with_absence(replace(fresh, goodput=story.gang.goodput), run, story.now)


def test_another_coordinator_goes_on_with_the_account_and_books_the_gap(tmp_path: Path) -> None:
    run, said = make_run(**TRAINER, run_dir=str(tmp_path)), list[str]()
    first = GoodputAccount(Records(run.run_dir), run, said.append)
    gang = first.opened(new_gang(run), 100.0)
    first.keep(accounted(gang, run, 130.0))
    after = GoodputAccount(Records(run.run_dir), run, said.append).opened(new_gang(run), 142.5)
    assert (after.goodput.began, after.goodput.until, after.goodput.spent) == (100_000, 142_500, {"queued": 42_500})
    other = replace(run, job=replace(run.job, uid="another"))
    assert GoodputAccount(Records(run.run_dir), other, said.append).opened(new_gang(other), 150.0).goodput == Goodput(150_000, 150_000)
    assert said == []


def test_an_account_that_cannot_be_read_or_written_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    run, said = make_run(**TRAINER, run_dir=str(tmp_path)), list[str]()
    (tmp_path / "gang").mkdir()
    (tmp_path / "gang" / "goodput.json").write_text("{")
    account = GoodputAccount(Records(run.run_dir), run, said.append)
    gang = account.opened(new_gang(run), 5.0)
    assert gang.goodput == Goodput(5000, 5000)
    assert "begins anew" in said[0]
    blocked = replace(run, run_dir=str(tmp_path / "file" / "x"))
    (tmp_path / "file").touch()
    account = GoodputAccount(Records(blocked.run_dir), blocked, said.append)
    account.keep(gang)
    account.keep(accounted(gang, run, 9.0))
    assert [line for line in said if line.startswith("cannot write down")] == said[1:]
    assert len(said) == 2


def test_while_its_coordinator_was_lost_the_job_was_down_and_after_a_stop_stopped(tmp_path: Path) -> None:
    run = make_run(**TRAINER, run_dir=str(tmp_path))
    account = GoodputAccount(Records(run.run_dir), run, print)
    account.keep(replace(new_gang(run), goodput=Goodput(0 + 1, 1001, {"train": 1000})))
    lost = replace(new_gang(run), attempt=1, failure=Failure("node 0 is gone", cause=Cause.NODE_LOST))
    after = account.opened(lost, 31.001).goodput
    assert (after.spent, after.causes) == ({"train": 1000, "down": 30_000}, {"NodeLost": Loss(30_000, 240_000)})
    assert account.opened(replace(new_gang(run), attempt=1), 31.001).goodput.spent == {"train": 1000, "stopped": 30_000}


def test_a_preflight_on_its_own_leaves_the_job_s_account_alone(tmp_path: Path) -> None:
    run = make_run(**TRAINER, run_dir=str(tmp_path))
    kept = replace(new_gang(run), goodput=Goodput(1, 2, {"train": 1}))
    GoodputAccount(Records(run.run_dir), run, print).keep(kept)
    alone = replace(run, job=replace(run.job, uid="another"), preflight=Expected(only=True))
    GoodputAccount(Records(run.run_dir), alone, print).keep(replace(kept, goodput=Goodput(5, 6, {"preflight": 1})))
    assert Records(run.run_dir).goodput(run.job.uid).goodput == kept.goodput


def test_a_volume_that_hangs_holds_up_one_writer_and_nobody_else(tmp_path: Path) -> None:
    run = make_run(**TRAINER, run_dir=str(tmp_path))
    reached, goes_on = threading.Event(), threading.Event()

    class Hanging(Records):
        def write_goodput(self, record: GoodputRecord) -> None:
            reached.set()
            assert goes_on.wait(10)
            super().write_goodput(record)

    account = GoodputAccount(Hanging(run.run_dir), run, print)
    first = replace(new_gang(run), goodput=Goodput(1, 2, {"train": 1}))
    writer = threading.Thread(target=account.keep, args=(first,))
    writer.start()
    assert reached.wait(10)
    account.keep(replace(first, goodput=Goodput(1, 3, {"train": 2})))  # returns at once
    goes_on.set()
    writer.join(10)
    assert Records(run.run_dir).goodput(run.job.uid).goodput == first.goodput


def test_a_replaced_coordinator_writes_nothing_over_its_successor_s_account(tmp_path: Path) -> None:
    story, said = started(**TRAINER, run_dir=str(tmp_path)), list[str]()
    owners = Ownership(story.run), Ownership(story.run)
    old, new = (Records(str(tmp_path), owner.check) for owner in owners)
    for owner in owners:
        owner.take()
    theirs = replace(story.gang, goodput=Goodput(1, 9, {"train": 8}))
    GoodputAccount(new, story.run, said.append).keep(theirs)
    GoodputAccount(old, story.run, said.append).keep(replace(story.gang, goodput=Goodput(1, 5, {"train": 4})))
    assert Records(str(tmp_path)).goodput("uid-1").goodput == theirs.goodput
    assert len(said) == 1
    assert f"has taken over {tmp_path}" in said[0]


def test_two_coordinators_that_write_at_once_have_a_draft_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts: list[Path] = []
    monkeypatch.setattr(Path, "replace", lambda draft, path: drafts.append(draft))
    for _ in range(2):
        Records(str(tmp_path)).write_goodput(GoodputRecord("uid-1"))
    assert len(set(drafts)) == 2


# The newest commit, beside the account


def test_the_newest_commit_is_kept_and_an_account_without_one_is_read_as_before(tmp_path: Path) -> None:
    story = started(**TRAINER, run_dir=str(tmp_path)).reports(0, Checkpoint(0, 40, "/c"))
    GoodputAccount(Records(str(tmp_path)), story.run, print).keep(story.gang)
    assert GoodputAccount(Records(str(tmp_path)), story.run, print).earlier().checkpoint == story.gang.checkpoint
    (tmp_path / "gang" / "goodput.json").write_text('{"jobUid": "uid-1", "goodput": {"began": 1, "until": 2}}')
    assert GoodputAccount(Records(str(tmp_path)), story.run, print).earlier() == GoodputRecord("uid-1", Goodput(1, 2))


async def test_a_coordinator_keeps_a_commit_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "COMMIT_SECONDS", 0.01)
    story = started(run_dir=str(tmp_path))
    hosted = Coordinator(story.run, KEY, Output(lambda line: None, lambda: (), lambda line: None))
    hosted.gang = story.gang
    hosting = asyncio.ensure_future(hosted._keep_account())
    await asyncio.sleep(0)
    hosted.heard(0, Reported(1, rank_report_to_json(Checkpoint(0, 40, "/c"))))
    deadline = time.monotonic() + ACCOUNT_SECONDS - 5
    while (found := Records(str(tmp_path)).goodput("uid-1").checkpoint) is None and time.monotonic() < deadline:  # noqa: ASYNC110 (a file)
        await asyncio.sleep(0.01)
    hosting.cancel()
    assert (found.step, found.path) == (40, "/c")
