"""A dev environment as the operator sees it: ready, running, warned, released, and back again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.pages.why import Where, why
from lockstep.plan.reconcile.reconcile import Plan, reconcile
from lockstep_gang.contract.interactive import Idleness, InteractiveReport
from lockstep_gang.contract.report import State
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, asked, condition, replicas, report, running

SPEC: dict[str, Any] = {"type": "Interactive", "script": None}
READY = InteractiveReport(ready=True)
RUNS = InteractiveReport(True, "a.py --epochs 3", "ada on node 0", "2027-01-15T07:00:00Z")
WARNED = InteractiveReport(True, idle_since="2027-01-15T00:00:00Z", idleness=Idleness.WARNED, release="2027-01-15T08:00:00Z")
OVER = replace(WARNED, idleness=Idleness.OVER)


def said(interactive: InteractiveReport) -> ReceivedReport:
    runs = bool(interactive.script)
    return report(State.RUNNING if runs else State.WAITING, ready=2 if runs else 0, interactive=interactive)


def step(observed: Observed, interactive: InteractiveReport | None) -> tuple[Plan, Observed]:
    plan = reconcile(observed, said(interactive) if interactive is not None else None, CONTEXT, NOW)
    return plan, after(observed, plan)


def environment(interactive: InteractiveReport = READY) -> Observed:
    return step(running(**SPEC), interactive)[1]


def released() -> Observed:
    """The release stands in status, and its pods have gone."""
    observed = environment(WARNED)
    for _ in range(2):
        _, observed = step(observed, OVER)
    return step(replace(observed, pods=()), None)[1]


def test_ready_is_its_one_word_and_the_message_says_how_to_run_something() -> None:
    status, reason, message = condition(environment(), "Progressing")
    assert (status, reason) == ("True", "Ready")
    assert "lockstep run --job x -n ns" in message
    assert why(environment(), (), NOW).state is Where.READY


def test_what_runs_since_when_and_for_whom_is_in_the_status() -> None:
    observed = environment(RUNS)
    assert observed.status["interactive"] == {"script": "a.py --epochs 3", "by": "ada on node 0", "since": "2027-01-15T07:00:00Z"}
    assert condition(observed, "Progressing")[1:] == (
        "Running",
        "a.py --epochs 3 runs since 2027-01-15T07:00:00Z, asked for by ada on node 0",
    )


def test_a_failed_preflight_of_one_run_is_nothing_that_is_wrong_with_the_environment() -> None:
    assert reconcile(environment(), said(READY), CONTEXT, NOW).events == ()


def test_a_warning_is_told_once_with_the_time_of_the_release() -> None:
    plan, observed = step(environment(), WARNED)
    (note,) = plan.events
    assert (note.type, note.reason) == ("Warning", "IdleWarning")
    assert "its GPUs are released at 2027-01-15T08:00:00Z" in note.message
    assert observed.status["interactive"]["releaseTime"] == "2027-01-15T08:00:00Z"
    assert step(observed, WARNED)[0].events == ()


def test_the_release_is_written_down_before_the_pods_go() -> None:
    plan, observed = step(environment(WARNED), OVER)
    assert plan.apply == ()
    assert [note.reason for note in plan.events] == ["IdleReleased"]
    plan, observed = step(observed, OVER)
    assert [item["spec"]["replicas"] for item in plan.apply] == [0]
    assert condition(observed, "Progressing")[1] == "Stopping"


def test_a_released_environment_says_how_it_comes_back() -> None:
    status, reason, message = condition(released(), "Suspended")
    assert (status, reason) == ("True", "Idle")
    assert message.endswith("bring it back with: lockstep resume x -n ns")
    assert "since 2027-01-15T00:00:00Z" in message
    assert why(released(), (), NOW).state is Where.SUSPENDED


def test_it_stays_released_until_resume_is_raised() -> None:
    observed = released()
    assert step(observed, None)[0].apply == ()
    raised = asked(observed, restart={"retry": 1})
    plan, back = step(raised, None)
    assert replicas(plan) == [2]
    assert "interactive" not in back.status


def test_a_resume_while_its_pods_still_end_is_not_undone_by_their_last_report() -> None:
    observed = environment(WARNED)
    for _ in range(2):
        _, observed = step(observed, OVER)
    raised = asked(observed, restart={"retry": 1})
    _, stopping = step(raised, OVER)
    assert "released" not in (stopping.status.get("interactive") or {})


def test_a_suspension_by_hand_takes_the_place_of_a_release() -> None:
    observed = released()
    suspended = asked(observed, suspend=True)
    _, observed = step(suspended, None)
    assert condition(observed, "Suspended")[1] == "Suspended"
    again = asked(observed, suspend=False)
    assert replicas(step(again, None)[0]) == [2]


def test_a_run_is_never_released() -> None:
    plan, observed = step(environment(WARNED), RUNS)
    assert plan.apply == ()
    assert "released" not in observed.status["interactive"]
