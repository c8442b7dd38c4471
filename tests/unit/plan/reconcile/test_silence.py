"""A gang that says nothing: every leader notices, whoever led when it last spoke and whatever it said then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from lockstep.plan.observed import ReceivedReport
from lockstep.plan.reconcile.measures import gauges
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.times import timestamp
from lockstep.platforms.operator.metrics import Jobs
from lockstep.platforms.operator.report_server import Reports
from lockstep_gang.contract.report import State
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, asked, condition, pod, report, running, settled

SILENT_SECONDS = 60.0

NEW_LEADER = replace(CONTEXT, listening_since=NOW)
DAY = 86_400.0


def started(at: float, index: int) -> Any:
    status = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {"startedAt": timestamp(at)}}}]}
    return pod(index, status=status)


LEFT = {
    "all ranks ran": report(),
    "ranks started": report(State.STARTING, ready=1),
    "a restart was under way": report(State.BACKING_OFF, ready=0),
    "it has never been heard": None,
}
"""What a gang said last to an earlier leader."""


@pytest.mark.parametrize("said", LEFT.values(), ids=LEFT)
def test_a_gang_that_a_new_leader_never_hears_is_silent_a_minute_after_that_leader_began_to_listen(said: ReceivedReport | None) -> None:
    observed = settled(said)
    early = reconcile(observed, None, NEW_LEADER, NOW + SILENT_SECONDS - 10)
    assert "NoReport" not in str(early.status)
    assert early.again_seconds == pytest.approx(11)
    late = reconcile(after(observed, early), None, NEW_LEADER, NOW + SILENT_SECONDS + 1)
    assert condition(late, "Progressing")[:2] == ("Unknown", "NoReport")
    assert "NoReport" in [note.reason for note in late.events]
    heard = reconcile(observed, said, NEW_LEADER, NOW + SILENT_SECONDS + 1)
    assert condition(heard, "Progressing")[:2] == ("Unknown", "NoReport")


def test_a_leader_that_takes_over_a_silent_gang_goes_on_to_call_it_silent_until_it_speaks() -> None:
    observed = settled(report())
    observed = after(observed, reconcile(observed, None, NEW_LEADER, NOW + 100))
    third = replace(CONTEXT, listening_since=NOW + 200)
    assert reconcile(observed, None, third, NOW + 201).status is None
    heard = replace(report(), received=NOW + 202)
    assert condition(reconcile(observed, heard, third, NOW + 202), "Progressing")[:2] == ("True", "Running")


def test_pods_that_have_just_been_started_have_a_minute_of_their_own() -> None:
    observed = replace(running(), pods=(started(NOW + 500, 0), started(NOW + 500, 1)))
    observed = after(observed, reconcile(observed, None, NEW_LEADER, NOW + 501))
    assert condition(observed, "Progressing")[1] == "Starting"
    late = reconcile(observed, None, NEW_LEADER, NOW + 500 + SILENT_SECONDS + 1)
    assert condition(late, "Progressing")[:2] == ("Unknown", "NoReport")


def test_a_node_whose_clock_is_ahead_prolongs_no_silence() -> None:
    observed = settled(report())
    observed = replace(observed, pods=(started(NOW + DAY, 0), pod(1)))
    assert condition(reconcile(observed, None, NEW_LEADER, NOW + SILENT_SECONDS + 1), "Progressing")[1] == "NoReport"


@pytest.mark.parametrize("kind", ["a pod is missing", "suspended", "finished"])
def test_nothing_is_called_silent_that_has_nothing_to_say(kind: str) -> None:
    observed = settled(report())
    match kind:
        case "a pod is missing":
            observed = replace(observed, pods=(pod(0),))
        case "suspended":
            observed = asked(observed, suspend=True)
        case "finished":
            observed = after(observed, reconcile(observed, report(State.COMPLETE, ready=0), CONTEXT, NOW))
    assert "NoReport" not in str(reconcile(observed, None, NEW_LEADER, NOW + DAY).status)


def test_the_metric_of_a_gang_that_a_new_leader_has_not_heard_counts_from_when_it_began_to_listen() -> None:
    reports = Reports()
    reports.since = 1000.0
    job = settled(report()).job
    registry = CollectorRegistry()
    registry.register(Jobs(lambda: True, lambda: [job], reports.time, lambda: 0))
    age = registry.get_sample_value("lockstep_job_report_age_seconds", {"job_namespace": "ns", "job_name": "x"})
    assert age is not None
    assert age > DAY


def test_a_change_of_the_leader_makes_no_alert_of_a_silence_go_away() -> None:
    observed = settled(report())
    status = after(observed, reconcile(observed, None, NEW_LEADER, NOW + 100)).status
    assert gauges(status, NOW + 1000, 5.0)["report_age_seconds"] == 900


def test_a_gang_that_was_never_heard_has_the_metric_too_once_it_is_called_silent() -> None:
    observed = settled(None)
    assert "report_age_seconds" not in gauges(observed.status, NOW, 5.0)
    status = after(observed, reconcile(observed, None, NEW_LEADER, NOW + 100)).status
    assert gauges(status, NOW + 200, 300.0)["report_age_seconds"] == 300
