"""A start in which no rank ever ran makes way for a corrected spec or cluster; any other waits for a person."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.objects import Object
from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.pages.why import why
from lockstep.plan.reconcile.events import JobEvent
from lockstep.plan.reconcile.reconcile import Plan, reconcile
from lockstep_gang.contract.preflight import Finding, PreflightReport
from lockstep_gang.contract.report import State
from lockstep_spec.choices import Severity
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, asked, condition, pod, replicas, report, running, settled, waiting
from unit.plan.reconcile.test_start import NO_ROOM


def crashing_init(node: int) -> Object:
    ended = {"exitCode": 1, "reason": "Error"}
    init = {"name": "agent", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}, "restartCount": 4}
    trainer = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    return pod(node, status={"phase": "Pending", "initContainerStatuses": [init], "containerStatuses": [trainer]})


def never_started(node: int) -> Object:
    """The image has no python3: the kubelet tried several times."""
    ended = {"exitCode": 128, "reason": "StartError", "message": 'exec: "python3": executable file not found in $PATH'}
    return waiting("CrashLoopBackOff", node=node, lastState={"terminated": ended}, restartCount=5)


TROUBLES = {
    "ImagePullBackOff": lambda node: waiting("ImagePullBackOff", node=node),
    "CreateContainerConfigError": lambda node: waiting("CreateContainerConfigError", message='secret "token" not found', node=node),
    "ContainerCreating": lambda node: waiting("ContainerCreating", node=node),
    "unplaced": lambda node: {**pod(node), **NO_ROOM},
    "crashing init": crashing_init,
    "no python": never_started,
}
CORRECTIONS: dict[str, Object] = {
    "image": {"image": "right:1"},
    "pull secret": {"imagePullSecrets": [{"name": "login"}]},
    "node selector": {"podTemplate": {"nodeSelector": {"disk": "ssd"}}},
    "command": {"script": {"path": "b.py"}},
    "env": {"env": [{"name": "A", "value": "1"}]},
    "env from": {"envFrom": [{"secretRef": {"name": "there"}}]},
    "volumes": {"podTemplate": {"volumes": [{"name": "more", "mountPath": "/more", "persistentVolumeClaim": {"claimName": "right"}}]}},
}


def starting(make: Any, status: Object | None = None, **spec: Any) -> Observed:
    observed = replace(running(**spec), pods=(make(0), make(1)))
    if status is not None:
        observed = replace(observed, job={**observed.job, "status": status})
    return after(observed, reconcile(observed, None, CONTEXT, NOW))


def is_replaced(plan: Plan) -> bool:
    return replicas(plan) == [0] and condition(plan, "Progressing")[1] == "StartReplaced"


def template(plan: Plan) -> Object:
    (made,) = (item for item in (*plan.create, *plan.apply) if item["kind"] == "StatefulSet")
    assert made["spec"]["replicas"] == 2
    return made["spec"]["template"]["spec"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_replaces_a_start_in_which_no_rank_ran(trouble: str, correction: str) -> None:
    observed = asked(starting(TROUBLES[trouble]), **CORRECTIONS[correction])
    plan = reconcile(observed, None, CONTEXT, NOW + 1)
    assert is_replaced(plan)
    assert [note.reason for note in plan.events if note.type == "Warning"] == []
    assert "StartReplaced" in [note.reason for note in plan.events]
    at_zero = replace(after(observed, plan), pods=())
    again = reconcile(at_zero, None, CONTEXT, NOW + 2)
    fresh = reconcile(replace(observed, objects={}, pods=()), None, CONTEXT, NOW + 2)
    assert template(again) == template(fresh)
    assert condition(again, "Accepted")[:2] == ("True", "Accepted")


def test_an_operator_that_ends_at_any_write_goes_on_where_the_last_one_was() -> None:
    observed = asked(starting(TROUBLES["ImagePullBackOff"]), image="right:1")
    plan = reconcile(observed, None, CONTEXT, NOW + 1)
    unwritten = after(observed, replace(plan, status=None))
    assert replicas(reconcile(unwritten, None, CONTEXT, NOW + 2)) == []  # it is at zero, and stays there until the pods are gone
    started = reconcile(replace(unwritten, pods=()), None, CONTEXT, NOW + 3)
    assert template(started)["containers"][0]["image"] == "right:1"
    begun = after(replace(unwritten, pods=()), replace(started, status=None))
    making = tuple(waiting("ContainerCreating", node=node) for node in range(2))
    again = reconcile(replace(begun, pods=making), None, CONTEXT, NOW + 4)
    assert (again.create, again.apply, again.delete) == ((), (), ())


def profile_with(**spec: Any) -> Object:
    (profile,) = running().profiles
    return {**profile, "spec": {**profile["spec"], **spec}}


def test_a_corrected_profile_replaces_it_too() -> None:
    observed = replace(starting(TROUBLES["ImagePullBackOff"]), profiles=(profile_with(image="right:1"),))
    assert is_replaced(reconcile(observed, None, CONTEXT, NOW + 1))


@pytest.mark.parametrize(("trouble", "replaced"), [("ImagePullBackOff", True), ("unplaced", False), ("ContainerCreating", False)])
def test_another_operator_replaces_only_a_start_that_can_not_go_on(trouble: str, replaced: bool) -> None:
    plan = reconcile(starting(TROUBLES[trouble]), None, replace(CONTEXT, agent_image="agent:2"), NOW + 1)
    assert (replicas(plan) == [0]) is replaced


def heard(state: State = State.WAITING, attempt: int = 0, **fields: Any) -> ReceivedReport:
    received = report(state, ready=0, **fields)
    return replace(received, report=replace(received.report, attempt=attempt))


def test_node_0_that_waits_for_the_others_is_replaced_as_soon_as_it_says_so() -> None:
    observed = starting(TROUBLES["ImagePullBackOff"])
    observed = asked(replace(observed, pods=(pod(0), observed.pods[1])), image="right:1")
    silent = reconcile(observed, None, CONTEXT, NOW + 1)
    assert replicas(silent) == []
    assert is_replaced(reconcile(observed, heard(), CONTEXT, NOW + 1))
    assert replicas(reconcile(observed, heard(), CONTEXT, NOW + 40)) == []  # ranks may have been started since


def test_a_preflight_that_found_something_is_replaced() -> None:
    finding = Finding("script", Severity.ERROR, "no a.py", "put it there", 0)
    result = PreflightReport("2027-01-15T08:00:00Z", False, ("script",), 2, 5, (finding,))
    observed = asked(settled(heard(preflight=result)), script={"path": "b.py"})
    assert is_replaced(reconcile(observed, heard(preflight=result), CONTEXT, NOW + 1))


@pytest.mark.parametrize(
    "received",
    [report(), report(State.STARTING, ready=0), heard(State.BACKING_OFF, 1), heard(State.WAITING, 1), None],
    ids=["running", "starting", "backing off", "between attempts", "unheard"],
)
def test_a_gang_whose_ranks_may_have_run_waits_for_a_person_and_says_what_to_type(received: ReceivedReport | None) -> None:
    observed = asked(settled(received), image="right:1")
    plan = reconcile(observed, received, CONTEXT, NOW + 1)
    assert (plan.create, plan.apply, plan.delete) == ((), (), ())
    status, reason, message = condition(plan, "Accepted")
    assert (status, reason) == ("True", "ChangePending")
    assert "`lockstep stop x -n ns`, then `lockstep resume x -n ns`" in message
    assert [note for note in plan.events if note.reason == "ChangePending"] == [JobEvent("Normal", "ChangePending", message)]
    answer = why(after(observed, plan), (), NOW)
    assert answer.next[0].command == "lockstep stop x -n ns"
    assert "lockstep resume x -n ns" in answer.next[0].what


def resumed_after(attempts: int) -> Observed:
    """A job that has failed before and was stopped goes up from zero pods, and its image can't be pulled."""
    stopped = {"attempts": attempts, "run": {"name": "x-run-0", "pending": False}, "nodes": 0}
    asleep = replace(running(suspend=True), pods=(), objects={})
    asleep = replace(asleep, job={**asleep.job, "status": stopped})
    asleep = after(asleep, reconcile(asleep, None, CONTEXT, NOW))
    resumed = asked(asleep, suspend=False)
    resumed = after(resumed, reconcile(resumed, None, CONTEXT, NOW))
    return replace(resumed, pods=(waiting("ErrImagePull"), waiting("ErrImagePull", node=1)))


def test_attempts_of_earlier_starts_do_not_count() -> None:
    resumed = resumed_after(3)
    assert is_replaced(reconcile(asked(resumed, image="right:1"), None, CONTEXT, NOW + 1))
    lost = asked(replace(resumed, job={**resumed.job, "status": {**resumed.status, "attempts": 4}}), image="right:1")
    assert condition(reconcile(lost, None, CONTEXT, NOW + 1), "Accepted")[1] == "ChangePending"


def test_the_attempts_before_a_start_go_up_with_its_pods_in_one_write() -> None:
    """An operator that is killed between two writes leaves no start of which nobody knows whether it has begun."""
    resumed = resumed_after(3)
    assert resumed.stateful_set["spec"]["replicas"] == 2
    assert resumed.stateful_set["metadata"]["annotations"]["lockstep.dev/attempts-before"] == "3"
    assert not [item for item in reconcile(resumed, None, CONTEXT, NOW + 1).apply if item["kind"] == "StatefulSet"]


def test_a_start_that_was_replaced_after_a_failure_is_no_stop_that_nobody_confirmed() -> None:
    resumed = asked(resumed_after(2), image="right:1")
    resumed = replace(resumed, job={**resumed.job, "status": {**resumed.status, "nodes": 2}})
    stopping = after(resumed, reconcile(resumed, None, CONTEXT, NOW + 1))
    plan = reconcile(replace(stopping, pods=()), None, CONTEXT, NOW + 2)
    assert "stop" not in plan.status


@pytest.mark.parametrize(("age", "replaced"), [(30.0, True), (31.0, False)])
def test_a_gang_that_was_waiting_thirty_seconds_ago_has_begun_nothing_since(age: float, replaced: bool) -> None:
    said = report(State.WAITING, ready=0)
    said = replace(said, report=replace(said.report, attempt=0), received=NOW - age)
    observed = running()
    observed = after(observed, reconcile(observed, said, CONTEXT, NOW))
    assert is_replaced(reconcile(asked(observed, image="right:1"), said, CONTEXT, NOW)) == replaced


def test_people_in_a_dev_environment_keep_their_pods() -> None:
    observed = running(type="Interactive", script=None)
    observed = after(observed, reconcile(observed, None, CONTEXT, NOW))
    plan = reconcile(asked(replace(observed, pods=(waiting("ErrImagePull"), pod(1))), image="right:1"), None, CONTEXT, NOW + 1)
    assert replicas(plan) == []
    assert condition(plan, "Accepted")[1] == "ChangePending"


def test_a_start_whose_frozen_run_was_lost_is_replaced() -> None:
    observed = asked(starting(TROUBLES["ContainerCreating"]), image="right:1")
    lost = replace(observed, objects={key: item for key, item in observed.objects.items() if key[0] != "ConfigMap"})
    assert replicas(reconcile(lost, None, CONTEXT, NOW + 1)) == [0]


def test_a_stranger_s_statefulset_is_never_replaced() -> None:
    observed = asked(starting(TROUBLES["ImagePullBackOff"]), image="right:1")
    key = ("StatefulSet", "x")
    theirs = {**observed.objects[key], "metadata": {**observed.objects[key]["metadata"], "ownerReferences": []}}
    plan = reconcile(replace(observed, objects={key: theirs}), None, CONTEXT, NOW + 1)
    assert (plan.create, plan.apply, plan.delete) == ((), (), ())
