"""What is told of a job: every transition once, in order, and never too much."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lockstep.api.objects import Object
from lockstep.plan.reconcile.events import JobEvent, SentEvents, events_between, worth_sending
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep_gang.contract.report import Cause, Failure, Restart, State
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, fresh, report, running, settled

BURST = 25
REFILL_SECONDS = 60.0
SILENCE_SECONDS = 600.0


def status(conditions: dict[str, str], **fields: Any) -> Object:
    """Conditions as `"False:Reason"`."""
    parts = {kind: text.partition(":") for kind, text in conditions.items()}
    return {
        "conditions": [{"type": kind, "status": s, "reason": r or kind, "message": f"{kind} is {s}"} for kind, (s, _, r) in parts.items()],
        **fields,
    }


def reasons(before: Object, now: Object) -> list[str]:
    return [event.reason for event in events_between(before, now)]


def test_a_job_s_whole_life_is_told_in_order() -> None:
    observed = fresh()
    plan = reconcile(observed, None, CONTEXT, NOW)
    told = [event.reason for event in plan.events]
    observed = running()
    for received in (None, report(), report(State.COMPLETE, ready=0)):
        plan = reconcile(observed, received, CONTEXT, NOW)
        told += [event.reason for event in plan.events]
        observed = after(observed, plan)
    assert told == ["Accepted", "PodsScheduled", "RanksReady", "AttemptStarted", "Complete"]


def test_an_operator_that_has_just_begun_tells_nothing_again() -> None:
    observed = settled(report())
    assert reconcile(observed, report(), CONTEXT, NOW + 30).events == ()
    assert reconcile(observed, None, CONTEXT, NOW + 30).events == ()


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"Accepted": "True"}, {"Accepted": "False:InvalidSpec"}, ["InvalidSpec"]),
        ({"PodsScheduled": "False:Scheduling"}, {"PodsScheduled": "False:Unschedulable"}, ["Unschedulable"]),
        ({}, {"PodsScheduled": "False:PodsNotCreated"}, []),
        ({"RanksReady": "False:Starting"}, {"RanksReady": "False:ImagePullFailed"}, ["ImagePullFailed"]),
        ({"RanksReady": "True"}, {"RanksReady": "False:WaitingForRanks"}, []),
        ({"Progressing": "True:Running"}, {"Progressing": "Unknown:NoReport"}, ["NoReport"]),
        ({"Suspended": "False:NotSuspended"}, {"Suspended": "False:Stopping"}, ["Stopping"]),
        ({"Suspended": "False:Stopping"}, {"Suspended": "True"}, ["Suspended"]),
        ({"Suspended": "True"}, {"Suspended": "False:NotSuspended"}, ["Resumed"]),
        ({"Suspended": "True"}, {"Suspended": "False:Finished"}, []),
        ({}, {"Suspended": "False:NotSuspended"}, []),
        ({"FabricVerified": "Unknown"}, {"FabricVerified": "True"}, ["FabricVerified"]),
        ({"FabricVerified": "Unknown"}, {"FabricVerified": "False:Degraded"}, ["Degraded"]),
        ({"Straggling": "False"}, {"Straggling": "True:SlowRank"}, ["SlowRank"]),
        ({"Straggling": "True"}, {"Straggling": "False:NoStraggler"}, ["StragglingEnded"]),
        ({"Failed": "False"}, {"Failed": "True:RanksFailed"}, ["Failed"]),
        ({"Failed": "True"}, {"Failed": "False:Retried"}, ["Retried"]),
        ({"NodesHealthy": "True"}, {"NodesHealthy": "False:NodeLost"}, ["NodeLost"]),
        ({"NodesHealthy": "False:NodeLost"}, {"NodesHealthy": "True"}, ["NodesHealthy"]),
        ({}, {"NodesHealthy": "True", "Straggling": "False", "Failed": "False"}, []),
        ({"RanksReady": "False:Starting"}, {"RanksReady": "False:PreflightFailed"}, []),
    ],
)
def test_a_condition_that_turns_is_told_when_a_person_would_want_to_know(
    before: dict[str, str], now: dict[str, str], told: list[str]
) -> None:
    assert reasons(status(before), status(now)) == told


def history(*attempts: tuple[int, str]) -> list[Object]:
    return [{"attempt": n, "cause": cause, "message": "rank 1 ended", "lostSteps": 4} for n, cause in attempts]


def test_a_restart_is_told_with_its_cause_and_what_it_costs_once() -> None:
    before = status({}, attempts=2, restartHistory=history((1, "Hang")))
    now = status({}, attempts=3, restartHistory=history((1, "Hang"), (2, "NodeLost")), ranks={"desired": 8})
    assert events_between(before, now) == (
        JobEvent("Warning", "Restarting", "attempt 2 failed (NodeLost): rank 1 ended; 4 steps are done again"),
        JobEvent("Normal", "AttemptStarted", "attempt 3 starts with 8 ranks"),
    )
    assert reasons(status({}), status({}, attempts=2, restartHistory=history((1, "Hang")))) == ["RankHung", "AttemptStarted"]
    assert reasons(status({}), status({}, attempts=2, restartHistory=history((1, "UserCode")))) == ["Restarting", "AttemptStarted"]


def test_the_last_failure_is_told_once_as_the_job_s() -> None:
    failure = Failure("rank 1 on node 1 exited with 1", 1, 1, 1, cause=Cause.USER_CODE)
    end = report(State.FAILED, ready=0, failure=failure, history=(Restart(1, "2026-01-01T00:00:00Z", failure, 0),))
    assert [event.reason for event in reconcile(settled(report()), end, CONTEXT, NOW).events] == ["Failed"]


def test_checkpoints_are_told_first_and_then_once_an_hour() -> None:
    def committed(time: str, step: int) -> Object:
        return status({}, checkpoint={"lastCommittedStep": step, "lastCommitTime": time, "path": "/c"})

    one, two, three = committed("2026-01-01T10:01:00Z", 1), committed("2026-01-01T10:59:00Z", 2), committed("2026-01-01T11:00:00Z", 3)
    assert events_between(status({}), one) == (JobEvent("Normal", "CheckpointCommitted", "step 1: /c"),)
    assert (reasons(one, two), reasons(two, three)) == ([], ["CheckpointCommitted"])


def test_what_came_of_a_stop_and_then_a_new_size_are_told() -> None:
    saved = status({}, ranks={"desired": 4}, stop={"time": "1", "save": "Saved", "message": "saved at step 4"})
    assert reasons(status({}, ranks={"desired": 2}), saved) == ["SavedAndStopped", "Resized"]


def test_a_preflight_is_told_with_what_it_found() -> None:
    found = {"check": "FreeSpace", "message": "2 GB free", "fix": "delete runs", "nodeName": "n-1"}
    good = status({}, preflight={"time": "1", "ok": True, "checks": 40, "nodes": 2})
    assert events_between(status({}), good) == (JobEvent("Normal", "PreflightPassed", "40 checks passed on 2 nodes"),)
    assert reasons(good, good) == []
    bad = status({}, preflight={"time": "2", "ok": False, "checks": 40, "nodes": 2, "findings": [found]})
    assert events_between(good, bad) == (JobEvent("Warning", "PreflightFailed", "FreeSpace: 2 GB free on n-1; delete runs"),)


def test_a_message_has_at_most_1024_characters_and_a_reason_is_one_word() -> None:
    before, now = status({}), status({"Failed": "True"}, attempts=1, restartHistory=history((1, "Hang")))
    now["conditions"][0]["message"] = "x" * 5000
    for event in events_between(before, now):
        assert len(event.message) <= 1024
        assert re.fullmatch(r"[A-Z][A-Za-z]+", event.reason)


def test_a_flapping_condition_is_told_once_in_ten_minutes() -> None:
    flap = (JobEvent("Warning", "NoReport", "node 0 has not reported"),)
    told, first = worth_sending(SentEvents(), flap, NOW)
    told, second = worth_sending(told, flap, NOW + SILENCE_SECONDS - 1)
    told, third = worth_sending(told, flap, NOW + SILENCE_SECONDS + 1)
    assert (first, second, third) == (flap, (), flap)


def test_a_job_has_a_bounded_number_of_events_and_its_end_is_always_told() -> None:
    many = tuple(JobEvent("Normal", "AttemptStarted", f"attempt {n} starts") for n in range(3 * BURST))
    told, found = worth_sending(SentEvents(), many, NOW)
    assert len(found) == BURST
    told, later = worth_sending(told, many, NOW + 2 * REFILL_SECONDS)
    assert len(later) == 2
    for end in ("Complete", "Failed", "IdleWarning", "IdleReleased"):
        assert worth_sending(told, (JobEvent("Warning", end, "why"),), NOW + 2 * REFILL_SECONDS)[1] != ()
