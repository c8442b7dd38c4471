"""Suspend, resize, and what came of the stop: state transitions of one job. No cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.objects import Object
from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.reconcile.reconcile import Plan, reconcile
from lockstep_gang.contract.report import CheckpointReport, Save, State, StopReport
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, asked, condition, gone, pod, replicas, report, settled

SAVED = StopReport(1, "2027-01-15T08:00:20Z", Save.SAVED, "saved at step 43 and stopped", 43, 0)
COMMIT = CheckpointReport(43, "/workspace/runs/x/checkpoints/step-43.a1", "2027-01-15T08:00:19Z")


def leaving(node: int) -> Object:
    item = pod(node)
    return {**item, "metadata": {**item["metadata"], "deletionTimestamp": "2027-01-15T08:03:00Z"}}


def going(observed: Observed, *, ran: bool = True) -> Observed:
    """After the operator has scaled to zero, and the pods were told to go."""
    told = after(observed, reconcile(observed, report() if ran else None, CONTEXT, NOW + 1))
    assert told.replicas == 0
    return replace(told, pods=tuple(leaving(int(p["metadata"]["name"][-1])) for p in told.pods))


def stopped_report(stop: StopReport = SAVED, **fields: Any) -> ReceivedReport:
    return report(State.WAITING, ready=0, stop=stop, checkpoint=COMMIT, **fields)


def status(plan: Plan) -> Object:
    assert plan.status is not None
    return plan.status


def test_a_suspended_job_says_that_its_work_is_saved() -> None:
    observed = going(asked(settled(report()), suspend=True))
    plan = reconcile(observed, stopped_report(), CONTEXT, NOW + 20)
    assert (status(plan)["stop"]["save"], status(plan)["stop"]["step"], status(plan)["stop"]["lostSteps"]) == ("Saved", 43, 0)
    assert ("Normal", "SavedAndStopped", SAVED.message) in [(note.type, note.reason, note.message) for note in plan.events]
    asleep = reconcile(gone(after(observed, plan)), stopped_report(), CONTEXT, NOW + 21)
    assert condition(asleep, "Suspended") == (
        "True", "Suspended", "saved at step 43 and stopped; no pods; to go on from the last checkpoint: lockstep resume x -n ns",
    )  # fmt: skip


def test_the_last_word_counts_although_its_pod_is_gone_before_it_is_read() -> None:
    observed = gone(going(asked(settled(report()), suspend=True)))
    found = status(reconcile(observed, stopped_report(), CONTEXT, NOW + 20))
    assert found["stop"]["save"] == "Saved"
    assert found["checkpoint"]["lastCommittedStep"] == 43


def test_lost_steps_are_a_warning_with_their_reason() -> None:
    message = "stopped without a save: 12 steps since the commit of step 31 are lost: rank 1 exited with 1"
    lost = StopReport(1, SAVED.time, Save.NOT_SAVED, message, 31, 12)
    observed = going(asked(settled(report()), suspend=True))
    plan = reconcile(observed, stopped_report(lost), CONTEXT, NOW + 20)
    assert ("Warning", "StoppedWithoutSave", message) in [(note.type, note.reason, note.message) for note in plan.events]


def test_a_stop_that_nobody_reported_is_called_unknown_once() -> None:
    observed = gone(going(asked(settled(report(checkpoint=COMMIT)), suspend=True)))
    plan = reconcile(observed, report(checkpoint=COMMIT), CONTEXT, NOW + 20)
    assert (status(plan)["stop"]["save"], status(plan)["stop"]["step"]) == ("Unknown", 43)
    assert "node 0 did not say how the stop went" in status(plan)["stop"]["message"]
    assert [note.reason for note in plan.events] == ["StopNotConfirmed", "Suspended"]
    assert reconcile(after(observed, plan), None, CONTEXT, NOW + 40).status is None


def test_a_job_that_never_ran_has_no_stop_to_tell_of() -> None:
    observed = gone(going(asked(settled(), suspend=True), ran=False))
    assert "stop" not in status(reconcile(observed, None, CONTEXT, NOW + 20))


def test_the_end_of_a_job_is_no_stop() -> None:
    observed = settled(report())
    done = after(observed, reconcile(observed, report(State.COMPLETE, ready=0), CONTEXT, NOW + 1))
    again = reconcile(gone(done), report(State.COMPLETE, ready=0), CONTEXT, NOW + 5)
    assert "stop" not in (again.status or done.status)


def test_a_single_pod_that_is_left_is_told_in_the_singular() -> None:
    observed = asked(settled(report()), nodes=1)
    plan = reconcile(replace(observed, pods=observed.pods[:1]), report(), CONTEXT, NOW + 1)
    assert condition(plan, "Progressing")[2].endswith("1 pod is still there")


def test_a_new_number_of_nodes_stops_the_gang_then_starts_it_anew() -> None:
    observed = asked(settled(report()), nodes=1)
    plan = reconcile(observed, report(), CONTEXT, NOW + 1)
    assert replicas(plan) == [0]
    assert condition(plan, "Progressing")[:2] == ("True", "Resizing")
    assert condition(plan, "Progressing")[2] == "from 2 to 1 nodes: ranks save and stop; 2 pods are still there"
    assert [note.reason for note in plan.events] == ["Resizing"]
    waits = reconcile(going(observed), stopped_report(), CONTEXT, NOW + 10)
    assert replicas(waits) == []
    started = reconcile(gone(going(observed)), stopped_report(), CONTEXT, NOW + 20)
    assert replicas(started) == [1]
    assert condition(started, "Progressing")[1] == "PodsNotCreated"
    assert status(started)["ranks"]["desired"] == 1
    assert status(started)["checkpoint"]["lastCommittedStep"] == 43


def test_growing_is_a_resize_too() -> None:
    assert replicas(reconcile(asked(settled(report()), nodes=3), report(), CONTEXT, NOW + 1)) == [0]


def test_the_old_size_again_before_the_stop_is_over_lets_it_end_and_starts_whole() -> None:
    observed = asked(going(asked(settled(report()), nodes=1)), nodes=2)
    plan = reconcile(observed, stopped_report(), CONTEXT, NOW + 5)
    assert replicas(plan) == []
    assert condition(plan, "Progressing")[:2] == ("True", "Stopping")
    half = replace(observed, pods=(leaving(1),))
    assert replicas(reconcile(half, stopped_report(), CONTEXT, NOW + 6)) == []
    assert replicas(reconcile(gone(observed), stopped_report(), CONTEXT, NOW + 7)) == [2]


def test_the_old_size_again_before_anything_was_sent_leaves_the_gang_alone() -> None:
    observed = asked(asked(settled(report()), nodes=1), nodes=2)
    plan = reconcile(observed, report(), CONTEXT, NOW + 1)
    assert (plan.apply, plan.create, plan.delete) == ((), (), ())


def test_two_resizes_in_a_row_start_at_the_last_size() -> None:
    observed = asked(going(asked(settled(report()), nodes=1)), nodes=3)
    assert condition(reconcile(observed, stopped_report(), CONTEXT, NOW + 5), "Progressing")[2].startswith("from 2 to 3 nodes")
    assert replicas(reconcile(gone(observed), stopped_report(), CONTEXT, NOW + 6)) == [3]


def test_a_resize_while_suspended_waits_for_the_resume() -> None:
    asleep = asked(gone(going(asked(settled(report()), suspend=True))), nodes=1)
    assert replicas(reconcile(asleep, stopped_report(), CONTEXT, NOW + 5)) == []
    assert replicas(reconcile(asked(asleep, suspend=False), stopped_report(), CONTEXT, NOW + 6)) == [1]


def test_a_suspend_during_a_resize_wins() -> None:
    observed = asked(going(asked(settled(report()), nodes=1)), suspend=True)
    assert condition(reconcile(observed, stopped_report(), CONTEXT, NOW + 5), "Progressing")[:2] == ("False", "Stopping")
    assert replicas(reconcile(gone(observed), stopped_report(), CONTEXT, NOW + 6)) == []


def test_a_resize_between_two_attempts_needs_no_save() -> None:
    failing = report(State.BACKING_OFF, ready=0)
    observed = settled(report())
    observed = after(observed, reconcile(observed, failing, CONTEXT, NOW + 1))
    plan = reconcile(asked(observed, nodes=1), failing, CONTEXT, NOW + 2)
    assert replicas(plan) == [0]
    assert condition(plan, "Restarting")[0] == "False"


@pytest.mark.parametrize("impossible", ["cluster", "account"])
def test_a_size_that_the_job_cant_have_leaves_the_gang_running_and_says_why(impossible: str) -> None:
    observed = asked(settled(report()), nodes=3)
    if impossible == "cluster":
        (profile,) = observed.profiles
        observed = replace(observed, profiles=({**profile, "spec": {**profile["spec"], "nodes": {"gpuNodes": ["a", "b"]}}},))
    else:
        observed = replace(observed, service_accounts=frozenset())
    plan = reconcile(observed, report(), CONTEXT, NOW + 1)
    assert replicas(plan) == []
    if impossible == "cluster":
        assert condition(plan, "Accepted")[:2] == ("False", "NotEnoughNodes")
    assert condition(plan, "Progressing")[:2] == ("True", "Running")


def test_a_profile_s_new_default_size_waits_for_the_next_start() -> None:
    observed = settled(report())
    spec = {key: value for key, value in observed.job["spec"].items() if key != "nodes"}
    (profile,) = observed.profiles
    fewer = {**profile, "spec": {**profile["spec"], "gpus": {"defaultNodes": 1}}}
    plan = reconcile(replace(observed, job={**observed.job, "spec": spec}, profiles=(fewer,)), report(), CONTEXT, NOW + 1)
    assert replicas(plan) == []
    assert status(plan)["run"]["pending"] is True


def test_a_job_that_completes_during_the_stop_is_complete() -> None:
    observed = going(asked(settled(report()), nodes=1))
    plan = reconcile(observed, report(State.COMPLETE, ready=0), CONTEXT, NOW + 5)
    assert condition(plan, "Complete")[0] == "True"
    assert replicas(reconcile(gone(after(observed, plan)), None, CONTEXT, NOW + 6)) == []


def test_the_stop_before_is_remembered_when_the_operator_has_just_been_started() -> None:
    observed = going(asked(settled(report()), suspend=True))
    told = after(observed, reconcile(observed, stopped_report(), CONTEXT, NOW + 20))
    assert status(reconcile(gone(told), None, CONTEXT, NOW + 30))["stop"]["save"] == "Saved"


def test_a_commit_that_status_did_not_have_yet_is_told_though_the_pods_are_gone() -> None:
    observed = settled(report())
    told = report(checkpoint=COMMIT)  # status has progress every 15 s only
    lost = replace(observed, pods=(), objects={})
    plan = reconcile(lost, told, CONTEXT, NOW + 3)
    assert (status(plan)["stop"]["save"], status(plan)["stop"]["step"]) == ("Unknown", 43)
    assert "the newest checkpoint that was reported is step 43" in status(plan)["stop"]["message"]
    assert status(plan)["checkpoint"]["lastCommittedStep"] == 43
    assert condition(plan, "CheckpointCommitted")[:2] == ("True", "Committed")
    late = reconcile(after(lost, plan), stopped_report(), CONTEXT, NOW + 5)
    assert status(late)["stop"]["message"] == SAVED.message


def ended(node: int, code: int, **metadata: Any) -> Object:
    item = pod(node, status={"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": code}}}]})
    return {**item, "metadata": {**item["metadata"], **metadata}}


@pytest.mark.parametrize(
    "stopped",
    [ended(1, 75), ended(1, 75, deletionTimestamp="2027-01-15T08:03:00Z"), ended(1, 137, deletionTimestamp="2027-01-15T08:03:00Z")],
    ids=["saved", "saved and going", "killed while going"],
)
def test_how_a_pod_ends_that_was_told_to_go_is_no_trouble(stopped: Object) -> None:
    plan = reconcile(replace(settled(report()), pods=(pod(0), stopped)), report(), CONTEXT, NOW + 5)
    assert [note for note in plan.events if note.type == "Warning"] == []
    crashed = reconcile(replace(settled(report()), pods=(pod(0), ended(1, 1))), report(), CONTEXT, NOW + 5)
    assert "ContainerFailed" in [note.reason for note in crashed.events]
