"""What the operator knows of pods and Nodes: the facts in its reply, which pods it replaces, and what it says where it doesn't."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.objects import Object
from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.pages.why import answer_page, why
from lockstep.plan.reconcile import podfacts
from lockstep.plan.reconcile.podfacts import facts_of, loss_of, losses, lost_nodes
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.platforms.operator.memory.history import RememberedLosses
from lockstep_gang.contract.reply import FactType
from lockstep_gang.contract.report import NodeReport, State
from unit.plan.reconcile import test_reconcile
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, asked, condition, replicas, report, running, settled, unplaced

KEPT_SECONDS = 3600.0

SINCE = "2027-01-15T07:59:00Z"  # a minute before NOW


def pod(index: int, owner: str = "uid-StatefulSet-x", **changes: Any) -> Object:
    """As the job's StatefulSet makes it."""
    found = test_reconcile.pod(index, **changes)
    found["metadata"]["ownerReferences"] = [{"kind": "StatefulSet", "name": "x", "uid": owner, "controller": True}]
    return found


def node(name: str, ready: str = "True", since: str = SINCE) -> Object:
    conditions = [{"type": "Ready", "status": ready, "lastTransitionTime": since}]
    return {"kind": "Node", "metadata": {"name": name, "labels": {}}, "status": {"allocatable": {}, "conditions": conditions}}


def by_name(*nodes: Object) -> dict[str, Object]:
    return {found["metadata"]["name"]: found for found in nodes}


NODES = (node("node-0"), node("node-1", "Unknown"), node("node-2"))


def lost(nodes: tuple[Object, ...] = NODES, **restart: Any) -> Observed:
    """Two pods run, of which x-1 is on a Node that is lost."""
    return replace(settled(report(), restart=restart), pods=(pod(0), pod(1)), nodes=nodes)


def heard(connected: bool = False, age: float = 0.0) -> ReceivedReport:
    found = report(state=State.BACKING_OFF)
    nodes = (NodeReport(0, True, 1), NodeReport(1, connected, 0))
    return replace(found, report=replace(found.report, nodes=nodes), received=NOW - age)


def disrupted(reason: str, kind: str = "DisruptionTarget", said: str = "") -> Object:
    mark = {"type": kind, "status": "True", "reason": reason, "message": "told so", "lastTransitionTime": SINCE}
    return pod(1, status={"phase": "Running", "conditions": [mark], "reason": said})


@pytest.mark.parametrize(
    ("found", "kind", "reason"),
    [
        (disrupted("PreemptionByScheduler"), FactType.PREEMPTED, "PreemptionByScheduler"),
        (disrupted("WorkloadEvictedDueToPreempted", kind="TerminationTarget"), FactType.PREEMPTED, "WorkloadEvictedDueToPreempted"),
        (pod(1, status={"phase": "Failed", "reason": "Preempting"}), FactType.PREEMPTED, "Preempting"),
        (disrupted("EvictionByEvictionAPI"), FactType.EVICTED, "EvictionByEvictionAPI"),
        (disrupted("DeletionByTaintManager"), FactType.EVICTED, "DeletionByTaintManager"),
        (disrupted("TerminationByKubelet", said="Evicted"), FactType.EVICTED, "TerminationByKubelet"),
        (disrupted("DeletionByPodGC"), FactType.NODE_LOST, "DeletionByPodGC"),
        (pod(1, status={"phase": "Failed", "reason": "Evicted", "message": "disk"}), FactType.EVICTED, "Evicted"),
    ],
)
def test_who_takes_a_pod_away_is_told(found: Object, kind: FactType, reason: str) -> None:
    fact = loss_of(found, by_name(node("node-1")))
    assert (fact.type, fact.reason, fact.node, fact.pod, fact.pod_uid) == (kind, reason, 1, "x-1", "pod-1")


@pytest.mark.parametrize(("nodes", "reason"),
    [((node("node-1", "Unknown"),), "Unreachable"), ((node("node-1", "False"),), "NotReady"), ((node("other"),), "Gone")])  # fmt: skip
def test_a_pod_on_a_node_that_is_silent_not_ready_or_gone_is_lost(nodes: tuple[Object, ...], reason: str) -> None:
    fact = loss_of(pod(1), by_name(*nodes))
    assert (fact.type, fact.reason, fact.node_name) == (FactType.NODE_LOST, reason, "node-1")


def test_a_taint_that_follows_a_lost_node_is_still_a_lost_node() -> None:
    fact = loss_of(disrupted("DeletionByTaintManager"), by_name(node("node-1", "Unknown")))
    assert (fact.type, fact.since) == (FactType.NODE_LOST, SINCE)


def test_a_pod_that_is_there_is_not_lost() -> None:
    assert loss_of(pod(1), {}) is None
    assert losses(running()) == {}


def ending(index: int = 1, **changes: Any) -> Object:
    """A pod that somebody has deleted, with a grace of 30 s."""
    found = pod(index, **changes)
    found["metadata"] |= {"deletionTimestamp": SINCE, "deletionGracePeriodSeconds": 30}
    return found


def test_a_pod_that_somebody_deletes_is_told_with_the_time_at_which_they_did() -> None:
    (fact,) = losses(replace(running(), pods=(pod(0), ending()))).values()
    assert (fact.type, fact.node, fact.pod_uid, fact.since) == (FactType.DELETED, 1, "pod-1", "2027-01-15T07:58:30Z")
    assert "deleted by hand" in fact.message


def test_a_pod_that_went_within_five_seconds_of_a_scaled_stateful_set_says_so() -> None:
    seen = running()
    scaled = {"time": "2027-01-15T07:58:35Z", "message": "StatefulSet x was scaled to 1 by kubectl"}
    told = replace(seen, pods=(pod(0), ending()), job={**seen.job, "status": {"interference": scaled}})
    assert [fact.message for fact in losses(told).values()] == ["StatefulSet x was scaled to 1 by kubectl"]
    later = {**scaled, "time": "2027-01-15T07:58:36Z"}
    (fact,) = losses(replace(told, job={**seen.job, "status": {"interference": later}})).values()
    assert "deleted by hand" in fact.message


def with_set(**changes: Any) -> Observed:
    """While a pod ends and the StatefulSet is as given."""
    found = running()
    assert found.stateful_set is not None
    changed = {**found.stateful_set, **changes}
    return replace(found, pods=(pod(0), ending()), objects={**found.objects, ("StatefulSet", "x"): changed})


@pytest.mark.parametrize(
    "observed",
    [
        with_set(spec={"replicas": 0}),
        with_set(spec={"replicas": 1}),
        with_set(metadata={**(running().stateful_set or {})["metadata"], "deletionTimestamp": SINCE}),
        replace(running(), pods=(pod(0), ending(owner="an earlier set"))),
        replace(with_set(), objects={}),
        replace(with_set(), job={**running().job, "metadata": {**running().job["metadata"], "deletionTimestamp": SINCE}}),
    ],
    ids=["stopped", "resized", "set deleted", "of an earlier start", "no set", "job deleted"],
)
def test_a_pod_that_goes_because_of_what_became_of_the_job_is_no_loss(observed: Observed) -> None:
    assert losses(observed) == {}


def test_a_pod_that_was_deleted_by_force_and_never_seen_to_end_is_remembered() -> None:
    seen, key, there = RememberedLosses(), ("ns", "x"), running()
    seen.see_gone(key, pod(1), there.job, there.stateful_set, NOW)
    seen.see(key, replace(there, pods=(pod(0),)), NOW)
    assert [(fact.type, fact.since) for fact in seen.of(key).values()] == [(FactType.DELETED, None)]
    seen.forget(key)
    seen.see_gone(key, pod(1), there.job, None, NOW)
    assert seen.of(key) == {}


def container(**waiting: str) -> Object:
    return {"name": "trainer", "state": {"waiting": waiting}}


DONE = {"name": "agent", "state": {"terminated": {"exitCode": 0}}}
UNDECIDED = {"phase": "Pending"}


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "NotCreated"),
        (pod(1, spec={"containers": []}, status=UNDECIDED), "Scheduling"),
        (pod(1, spec={"containers": []}, status={"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}]}),
            "Unschedulable"),
        (pod(1, status={"containerStatuses": [container(reason="ContainerCreating")]}), "ContainerCreating"),
        (pod(1, status={"initContainerStatuses": [DONE], "containerStatuses": [container(reason="PodInitializing")]}), "ImagePulling"),
        (pod(1, status={"initContainerStatuses": [DONE], "containerStatuses": [container(reason="ImagePullBackOff")]}), "ImagePullBackOff"),
        (pod(1, status={"initContainerStatuses": [container(reason="ErrImagePull")],
            "containerStatuses": [container(reason="PodInitializing")]}), "ErrImagePull"),
    ],
)  # fmt: skip
def test_why_a_pod_does_not_run_yet_is_told_in_one_word(found: Object | None, why: str) -> None:
    observed = replace(running(), pods=(pod(0),) if found is None else (pod(0), found))
    (fact,) = facts_of(observed, {})
    assert (fact.type, fact.node, fact.pod, fact.reason) == (FactType.WAITING, 1, "x-1", why)


def test_what_happened_to_a_pod_is_remembered_after_it_is_gone_and_forgotten_when_it_did_not_happen() -> None:
    seen, key = RememberedLosses(), ("ns", "x")
    seen.see_pod(key, disrupted("PreemptionByScheduler"), NOW)
    gone = replace(running(), pods=(pod(0),))
    seen.see(key, gone, NOW + 1)
    assert [(fact.type, fact.pod_uid) for fact in facts_of(gone, seen.of(key))][:1] == [(FactType.PREEMPTED, "pod-1")]
    seen.see(key, gone, NOW + KEPT_SECONDS + 1)
    assert seen.of(key) == {}
    seen.see(key, lost(), NOW)
    assert list(seen.of(key)) == ["pod-1"]
    seen.see(key, running(), NOW)  # its Node is Ready again, and the pod still there
    assert seen.of(key) == {}


def test_what_is_remembered_of_a_pod_that_is_there_is_overtaken_by_what_it_shows_now() -> None:
    fact = loss_of(disrupted("PreemptionByScheduler"), {})
    assert fact is not None
    assert facts_of(running(), {"pod-1": fact}) == ()


def test_a_pod_on_a_lost_node_is_deleted_by_force_once_it_is_time() -> None:
    observed = lost(lostNodeSeconds=60)
    early = reconcile(observed, heard(), CONTEXT, NOW - 5)
    assert (early.force_delete, early.again_seconds) == ((), 5.0)
    assert condition(early, "NodesHealthy") == (
        "False", "Replacing", "Node node-1 is NotReady since 2027-01-15T07:59:00Z, and pod x-1 was on it: it is replaced at 08:00:00Z"
                              " (restart.lostNodeSeconds)",
    )  # fmt: skip
    late = reconcile(observed, heard(), CONTEXT, NOW)
    assert [found["metadata"]["name"] for found in late.force_delete] == ["x-1"]
    clocks_differ = reconcile(observed, heard(), replace(CONTEXT, clock_off=True), NOW)
    assert clocks_differ.force_delete == ()


AT_ONCE = lost(lostNodeSeconds=0)
GONE = lost(nodes=(node("node-0"), node("node-2")), lostNodeSeconds=600)
OF_NODE_0 = lost(nodes=(node("node-0", "Unknown"), node("node-1"), node("node-2")), lostNodeSeconds=0)
LEFT_BEHIND = replace(AT_ONCE, pods=(pod(0), pod(1, owner="an-earlier-set")))


@pytest.mark.parametrize(
    ("observed", "received", "listening_since", "reason", "replaced", "again"),
    [
        pytest.param(lost(lostNodeSeconds=86_400), heard(), 0, "Replacing", [], 600.0, id="one far off is looked at again in ten minutes"),
        pytest.param(GONE, heard(), 0, "Replacing", ["x-1"], None, id="a Node that is gone is not waited for"),
        pytest.param(AT_ONCE, heard(connected=True), 0, "AgentConnected", [], 10.0, id="an agent that is heard is left alone"),
        pytest.param(AT_ONCE, heard(connected=True, age=31), 0, "Replacing", ["x-1"], None, id="it was heard too long ago"),
        pytest.param(OF_NODE_0, heard(age=29), 0, "AgentConnected", [], 10.0, id="node 0 is alive as long as it reports"),
        pytest.param(OF_NODE_0, heard(age=31), 0, "Replacing", ["x-0"], None, id="node 0 has not reported for too long"),
        pytest.param(OF_NODE_0, None, 0, "Replacing", ["x-0"], None, id="node 0 was never heard"),
        pytest.param(AT_ONCE, None, NOW - 29, "Replacing", [], 1.0, id="the operator may hear of the agents yet"),
        pytest.param(AT_ONCE, None, NOW - 30, "Replacing", ["x-1"], None, id="the operator has heard nothing for long enough"),
        pytest.param(LEFT_BEHIND, heard(), 0, "NodeLost", [], None, id="an earlier job of this name left it"),
    ],
)
def test_a_pod_on_a_lost_node_is_replaced_when_it_is_lost_for_sure_and_time_is_over(
    observed: Observed, received: ReceivedReport | None, listening_since: float, reason: str, replaced: list[str], again: float | None
) -> None:
    verdict = lost_nodes(observed, received, NOW, listening_since)
    assert (verdict.reason, [found["metadata"]["name"] for found in verdict.replace], verdict.again_seconds) == (reason, replaced, again)


def test_without_the_opt_in_nothing_is_deleted_and_the_commands_are_told() -> None:
    plan = reconcile(lost(), heard(), CONTEXT, NOW)
    assert plan.force_delete == ()
    status, reason, message = condition(plan, "NodesHealthy")
    assert (status, reason) == ("False", "NodeLost")
    assert "kubectl delete pod x-1 -n ns --force --grace-period=0" in message
    assert 'kubectl patch tj x -n ns --type merge -p \'{"spec":{"restart":{"lostNodeSeconds":60}}}\'' in message


@pytest.mark.parametrize(("mode", "reason"),
    [("ReadWriteOnce", "NodeBoundVolume"), ("ReadWriteOncePod", "NodeBoundVolume"), ("ReadWriteMany", "Replacing")])  # fmt: skip
def test_a_claim_that_only_one_node_can_mount_keeps_its_pod(mode: str, reason: str) -> None:
    spec = {"nodeName": "node-1", "containers": [], "volumes": [{"name": "w", "persistentVolumeClaim": {"claimName": "workspace-x-1"}}]}
    claims = {"workspace-x-1": {"metadata": {"name": "workspace-x-1"}, "spec": {"accessModes": [mode]}}}
    observed = replace(lost(lostNodeSeconds=0), pods=(pod(0), pod(1, spec=spec)), claims=claims)
    verdict = lost_nodes(observed, heard(), NOW)
    assert (verdict.reason, bool(verdict.replace)) == (reason, reason == "Replacing")
    if reason == "NodeBoundVolume":
        assert (
            "kubectl delete pvc workspace-x-1 -n ns --wait=false; kubectl delete pod x-1 -n ns --force --grace-period=0" in verdict.message
        )


@pytest.mark.parametrize(
    ("images", "warns"),
    [
        (("repo/t@sha256:aaaaaaaaaaaaa", "repo/t@sha256:bbbbbbbbbbbbb"), True),
        (("repo/t@sha256:aaaaaaaaaaaaa", "mirror/t@sha256:aaaaaaaaaaaaa"), False),
        (("repo/t@sha256:aaaaaaaaaaaaa", ""), False),
    ],
)
def test_pods_of_one_gang_that_run_different_images_are_warned_and_run_on(images: tuple[str, str], warns: bool) -> None:
    statuses = [{"name": "agent", "imageID": f"other@{image}x"} for image in images], [{"name": "trainer", "imageID": i} for i in images]
    pods = [
        pod(node, status={"phase": "Running", "containerStatuses": list(each)}) for node, each in enumerate(zip(*statuses, strict=True))
    ]
    done = reconcile(replace(running(), pods=tuple(pods)), None, CONTEXT, NOW)
    status, _, message = condition(done, "Accepted")
    groups = "sha256:aaaaaaaaaaaa in pod x-0; sha256:bbbbbbbbbbbb in pod x-1"
    assert (status, f"the pods run different images, as after a tag was pushed again ({groups})" in message) == ("True", warns)
    assert ("different images" in message, done.delete) == (warns, ())


@pytest.mark.parametrize(
    ("names", "mode", "warns"),
    [
        (("workspace", "workspace"), "ReadWriteOnce", True),
        (("workspace", "workspace"), "ReadWriteOncePod", True),
        (("workspace", "workspace"), "ReadWriteMany", False),
        (("workspace-x-0", "workspace-x-1"), "ReadWriteOnce", False),
    ],
)
def test_pods_that_share_a_claim_of_one_node_are_warned(names: tuple[str, str], mode: str, warns: bool) -> None:
    claims = {name: {"metadata": {"name": name}, "spec": {"accessModes": [mode]}} for name in names}
    pods = []
    for node, name in enumerate(names):
        volumes = [{"name": "w", "persistentVolumeClaim": {"claimName": name}}]
        pods.append(pod(node, spec={"nodeName": f"node-{node}", "containers": [], "volumes": volumes}))
    observed = replace(running(), pods=tuple(pods), claims=claims)
    done = reconcile(observed, None, CONTEXT, NOW)
    status, _, message = condition(done, "Accepted")
    assert status == "True"
    for text in (message, answer_page(why(after(observed, done), (), NOW))):
        assert (f"warning: 2 pods mount claim workspace, which is {mode}: pods on another Node may never start" in text) is warns


def test_a_pod_that_finds_no_node_while_one_is_lost_says_what_can_be_done() -> None:
    waits = pod(1, spec={"containers": []}, status=unplaced("0/2 nodes are available"))
    observed = replace(lost(lostNodeSeconds=0), pods=(pod(0), waits))
    verdict = lost_nodes(observed, heard(), NOW)
    assert (verdict.reason, verdict.replace) == ("NoNodeFree", ())
    assert "kubectl scale tj x -n ns --replicas=1" in verdict.message
    never_ran = replace(observed, job={**observed.job, "status": {**observed.status, "attempts": 0}})
    assert lost_nodes(never_ran, None, NOW).reason == ""


def test_lockstep_why_has_the_commands_too() -> None:
    observed = lost()
    told = answer_page(why(after(observed, reconcile(observed, heard(), CONTEXT, NOW)), (), NOW))
    assert "\nnodes        Node node-1 is NotReady since 2027-01-15T07:59:00Z, and pod x-1 was on it: bring the Node back" in told


def test_nodes_that_are_ready_need_nothing() -> None:
    plan = reconcile(lost(nodes=tuple(node(f"node-{i}") for i in range(3)), lostNodeSeconds=0), heard(), CONTEXT, NOW)
    assert (condition(plan, "NodesHealthy")[:2], plan.force_delete) == (("True", "AllNodesReady"), ())


# Retry


def at_zero(retry: int) -> Observed:
    """A job that has failed and whose pods are gone; then restart.retry was set."""
    broken = report(State.FAILED, ready=0)
    observed = settled(report())
    for _ in range(2):  # scaled to zero, then settled
        observed = after(observed, reconcile(observed, broken, CONTEXT, NOW))
    assert condition(observed, "Failed")[0] == "True"
    job = {**observed.job, "spec": {**observed.job["spec"], "restart": {"retry": retry}}}
    return replace(observed, pods=(), job=job)


@pytest.mark.parametrize("received", [None, report(State.FAILED, ready=0)], ids=["operator new", "report remembered"])
def test_a_raised_retry_starts_a_failed_job_again(received: ReceivedReport | None) -> None:
    observed = at_zero(retry=1)
    plan = reconcile(observed, received, CONTEXT, NOW + 60)
    assert replicas(plan) == [2]
    assert condition(plan, "Failed")[:2] == ("False", "Retried")
    assert (plan.status["retry"], plan.status.get("completionTime")) == (1, None)
    first = pod(0)
    first["metadata"]["uid"] = "another"
    running_ = replace(after(observed, plan), pods=(first, pod(1)))
    again = reconcile(running_, received, CONTEXT, NOW + 61)
    assert (again.apply, condition(again if again.status else running_, "Failed")[:2]) == ((), ("False", "Retried"))


def test_without_a_higher_retry_a_failed_job_stays_so() -> None:
    plan = reconcile(at_zero(retry=0), None, CONTEXT, NOW + 60)
    assert (plan.create, plan.apply) == ((), ())


def test_a_retry_that_started_before_its_status_was_written_is_not_taken_for_failed() -> None:
    observed = at_zero(retry=1)
    plan = replace(reconcile(observed, None, CONTEXT, NOW + 60), status=None)  # the operator ended here
    started = replace(after(observed, plan), pods=(pod(0), pod(1)))
    assert condition(started, "Failed")[0] == "True"
    next_ = reconcile(started, None, CONTEXT, NOW + 61)
    assert (next_.apply, condition(next_, "Failed")[:2]) == ((), ("False", "Retried"))


def test_a_retry_of_a_job_whose_pods_are_still_there_waits_until_they_are_gone() -> None:
    observed = settled(report())
    observed = asked(observed, restart={"retry": 1})
    broken = report(State.FAILED, ready=0)
    plan = reconcile(observed, broken, CONTEXT, NOW)
    assert replicas(plan) == [0]
    assert condition(plan, "Failed")[0] == "True"
    emptied = replace(after(observed, plan), pods=())
    assert replicas(reconcile(emptied, broken, CONTEXT, NOW)) == [2]


def test_a_retry_while_the_pods_of_the_failure_are_ending_starts_none_of_them_again() -> None:
    observed = replace(at_zero(retry=1), pods=(pod(0), pod(1)))
    plan = reconcile(observed, None, CONTEXT, NOW + 60)  # the operator is new: only status tells of the failure
    assert [item for item in plan.apply if item["kind"] == "StatefulSet"] == []
    assert condition(plan if plan.status else observed, "Failed")[0] == "True"


def test_a_complete_job_is_not_retried() -> None:
    observed = settled(report())
    done = report(State.COMPLETE, ready=0)
    observed = replace(after(observed, reconcile(observed, done, CONTEXT, NOW)), pods=())
    raised = asked(observed, restart={"retry": 5})
    again = reconcile(raised, None, CONTEXT, NOW)
    assert (again.create, again.apply, condition(after(raised, again) if again.status else raised, "Complete")[0]) == ((), (), "True")


def test_right_after_an_outage_no_node_is_taken_for_lost() -> None:
    observed = replace(lost(lostNodeSeconds=0), unsettled_seconds=20.0)
    plan = reconcile(observed, report(), CONTEXT, NOW)
    assert (plan.force_delete, plan.events, plan.again_seconds) == ((), (), 20.0)
    assert plan.status is None or condition(plan, "NodesHealthy")[:2] == ("True", "AllNodesReady")
    assert facts_of(observed, {}) == ()
    settled_again = reconcile(replace(observed, unsettled_seconds=0.0), report(), CONTEXT, NOW + 20)
    assert condition(settled_again, "NodesHealthy")[0] == "False"


def test_right_after_an_outage_what_was_said_of_a_lost_node_stays() -> None:
    observed = lost()
    observed = after(observed, reconcile(observed, heard(), CONTEXT, NOW))
    assert condition(observed, "NodesHealthy")[1] == "NodeLost"
    plan = reconcile(replace(observed, unsettled_seconds=20.0), heard(), CONTEXT, NOW + 1)
    assert (plan.status, plan.events) == (None, ())


def killed(reason: str, code: int, limit: str | None = "4Gi", *, runs_again: bool = True) -> Object:
    end = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": SINCE}}
    status = {"name": "trainer", **({"state": {"running": {}}, "lastState": end} if runs_again else {"state": end})}
    limits = {"resources": {"limits": {"memory": limit}}} if limit else {}
    return pod(
        1,
        status={"phase": "Running", "containerStatuses": [status]},
        spec={"nodeName": "node-1", "containers": [{"name": "trainer", **limits}]},
    )


@pytest.mark.parametrize("runs_again", [True, False])
@pytest.mark.parametrize(
    ("reason", "code", "limit", "kind", "words"),
    [
        ("OOMKilled", 137, "4Gi", FactType.OUT_OF_MEMORY, "the kernel killed its container at its limit of 4Gi (OOMKilled)"),
        ("OOMKilled", 137, None, FactType.OUT_OF_MEMORY, "though it has no limit: the Node's memory was used up"),
        ("Error", 137, "4Gi", FactType.CONTAINER_ENDED, "exit code 137 (signal 9), Error"),
        (
            "Unknown",
            255,
            "4Gi",
            FactType.CONTAINER_ENDED,
            "exit code 255, Unknown: the container runtime doesn't know how; its machine may",
        ),
        ("ContainerStatusUnknown", 137, "4Gi", FactType.CONTAINER_ENDED, "ContainerStatusUnknown"),
    ],
)
def test_a_container_that_was_killed_says_how(
    reason: str, code: int, limit: str | None, kind: FactType, words: str, runs_again: bool
) -> None:
    fact = loss_of(killed(reason, code, limit, runs_again=runs_again), by_name(node("node-1")))
    assert (fact.type, fact.node, fact.node_name, fact.since) == (kind, 1, "node-1", SINCE)
    assert words in fact.message and fact.pod_uid == f"pod-1/{SINCE}"


@pytest.mark.parametrize("code", [0, 1, 69, 70, 75, 78])
def test_an_end_of_the_agent_s_own_is_no_loss(code: int) -> None:
    assert loss_of(killed("Error", code), by_name(node("node-1"))) is None


def test_a_fact_about_a_pod_has_256_characters() -> None:
    pod = {"metadata": {"name": "x-1", "uid": "u"}, "spec": {}}
    assert len(podfacts._fact(FactType.PREEMPTED, pod, "r", "x" * 5000).message) == 256


def test_of_64_pods_that_do_not_run_yet_the_reason_is_told() -> None:
    assert len(facts_of(replace(running(nodes=100), pods=()), {})) == 64
