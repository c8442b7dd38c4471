"""State transitions of one job: what is observed and reported in, the plan out. No cluster."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from lockstep.api.crd import training_job_crd
from lockstep.api.objects import Object
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile import writes
from lockstep.plan.reconcile.accept import Accepted, accept
from lockstep.plan.reconcile.reconcile import Plan, reconcile
from lockstep.plan.render.objects import Frozen, RenderContext, children, freeze
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.run import report_target
from lockstep.plan.times import timestamp
from lockstep_gang.contract.report import Cause, CheckpointReport, Failure, NodeReport, RankCount, Report, Restart, State, TrainerReport
from lockstep_gang.contract.run import JobIdentity
from support.checkout import ROOT

REMEMBERED_CHARACTERS = 16 << 10

NOW = 1_800_000_000.0
KEY = "ab" * 32
HOLDS_ONE = "holds 1 of 2 nodes; releases them at 2027-01-15T08:10:00Z so that another job can run"
UID = "11111111-1111-1111-1111-111111111111"
CONTEXT = RenderContext("agent:1", KEY, UID, report_target("https://here/v1/report", "PEM"))
PROFILE: Object = {
    "apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingCluster",
    "metadata": {"name": "p", "annotations": {"lockstep.dev/is-default-cluster": "true"}},
    "spec": {"platform": "Kubernetes", "image": "python:1"},
}  # fmt: skip


def job(status: Object | None = None, **spec: Any) -> Object:
    metadata = {"name": "x", "namespace": "ns", "uid": UID, "generation": 3, "resourceVersion": "9"}
    body = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata}
    return {**body, "spec": {"nodes": 2, "script": {"path": "a.py"}, **spec}, "status": status or {}}


def fresh(**spec: Any) -> Observed:
    """A job that nothing was done for yet."""
    claims = {name: {"metadata": {"name": name}} for name in ("ml-dev-workspace", "ml-datasets")}
    return Observed(job=job(**spec), profiles=(PROFILE,), service_accounts=frozenset({"ml-dev-sa"}), claims=claims)


def stored(item: Object) -> Object:
    """As the API server has it."""
    return {**item, "metadata": {**item["metadata"], "uid": f"uid-{item['kind']}-{item['metadata']['name']}", "resourceVersion": "5"}}


def after(observed: Observed, plan: Plan) -> Observed:
    """What is observed once the plan is executed."""
    written = {(item["kind"], item["metadata"]["name"]): stored(item) for item in (*plan.create, *plan.apply)}
    gone = {(item["kind"], item["metadata"]["name"]) for item in plan.delete}
    objects = {key: item for key, item in {**observed.objects, **written}.items() if key not in gone}
    status = plan.status if plan.status is not None else observed.status
    return replace(observed, objects=objects, job={**observed.job, "status": status})


def pod(node: int, **changes: Any) -> Object:
    metadata = {"name": f"x-{node}", "namespace": "ns", "uid": f"pod-{node}", "labels": {"lockstep.dev/job": "x"}}
    status = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": f"node-{node}", "containers": []}, "status": status, **changes}


def running(**spec: Any) -> Observed:
    """A job whose two pods run."""
    observed = fresh(**spec)
    observed = after(observed, reconcile(observed, None, CONTEXT, NOW))
    return replace(observed, pods=(pod(0), pod(1)))


def report(state: State = State.RUNNING, ready: int = 2, **fields: Any) -> ReceivedReport:
    nodes = (NodeReport(0, True, 1), NodeReport(1, True, 1))
    said = Report(JobIdentity("x", "ns", UID), "x-0", 7, 1, 0, state, "all ranks run", nodes, RankCount(2, ready), **fields)
    return ReceivedReport(said, "pod-0", NOW)


def settled(received: ReceivedReport | None = None, **spec: Any) -> Observed:
    observed = running(**spec)
    return after(observed, reconcile(observed, received, CONTEXT, NOW))


def asked(observed: Observed, **spec: Any) -> Observed:
    """The job with these fields of its spec changed."""
    return replace(observed, job={**observed.job, "spec": {**observed.job["spec"], **spec}})


def gone(observed: Observed) -> Observed:
    return replace(observed, pods=())


def replicas(plan: Plan) -> list[int]:
    """Of the StatefulSets that are written."""
    return [item["spec"]["replicas"] for item in (*plan.create, *plan.apply) if item["kind"] == "StatefulSet"]


def event(uid: str, reason: str, message: str, **more: Any) -> Object:
    """A warning about the object of this uid."""
    return {"involvedObject": {"uid": uid}, "reason": reason, "message": message, "metadata": {"name": f"{uid}-{message}"}, **more}


def unplaced(message: str) -> Object:
    """Status of a pod for which the scheduler found no node."""
    told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [told]}


def condition(plan_or_observed: Plan | Observed, name: str) -> tuple[str, str, str]:
    status = plan_or_observed.status or {}
    found = next(c for c in status["conditions"] if c["type"] == name)
    return found["status"], found["reason"], found["message"]


def test_a_new_job_gets_all_its_objects_in_the_order_pods_need_them() -> None:
    plan = reconcile(fresh(), None, CONTEXT, NOW)
    assert [item["kind"] for item in plan.create] == ["Secret", "ConfigMap", "NetworkPolicy", "Service", "StatefulSet"]
    assert plan.create[-1]["spec"]["replicas"] == 2
    assert re.fullmatch("x-run-[0-9a-f]{10}", plan.create[1]["metadata"]["name"])
    assert (plan.apply, plan.delete) == ((), ())


def test_the_pods_of_a_start_are_asked_for_at_once_unless_something_is_in_the_way() -> None:
    assert reconcile(fresh(), None, CONTEXT, NOW).at_once
    met = replace(fresh(), obstacle=Notice("NameTaken", "somebody has it"))
    assert not reconcile(met, None, CONTEXT, NOW).at_once
    service = reconcile(fresh(), None, CONTEXT, NOW).create[3]
    theirs = {**service, "metadata": {**service["metadata"], "ownerReferences": []}}
    seen = replace(fresh(), objects={("Service", "x-headless"): theirs})
    assert not reconcile(seen, None, CONTEXT, NOW).at_once


def test_what_an_operator_left_half_made_is_completed_and_nobody_blamed() -> None:
    plan = reconcile(fresh(), None, CONTEXT, NOW)
    [stateful_set] = [stored(item) for item in plan.create if item["kind"] == "StatefulSet"]
    half = replace(fresh(), objects={("StatefulSet", "x"): stateful_set})
    mended = reconcile(half, None, CONTEXT, NOW)
    assert [item["kind"] for item in mended.create] == ["Secret", "ConfigMap", "NetworkPolicy", "Service"]
    assert mended.half_made == (stateful_set,)
    assert "interference" not in (mended.status or {})
    told = after(replace(half, pods=(pod(0), pod(1))), mended)
    assert reconcile(told, report(), CONTEXT, NOW).half_made == ()


def test_a_start_that_was_taken_back_is_not_made_again_before_its_pods_are_gone() -> None:
    plan = reconcile(fresh(), None, CONTEXT, NOW)
    pending = pod(0, spec={"containers": []}, status={"phase": "Pending"})
    pending["metadata"]["deletionTimestamp"] = timestamp(NOW)
    leaving = replace(fresh(), pods=(pending,), obstacle=Notice("NameTaken", "somebody has it"))
    waits = reconcile(leaving, None, replace(CONTEXT, remembered=plan.run), NOW)
    assert (waits.taken_back, waits.create, waits.apply, waits.delete) == (True, (), (), ())
    assert condition(waits, "Accepted")[:2] == ("False", "NameTaken")
    assert reconcile(replace(leaving, pods=()), None, replace(CONTEXT, remembered=None), NOW).create


def test_a_job_is_read_once_however_often_it_is_looked_at_and_again_when_it_or_its_cluster_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        "lockstep.plan.reconcile.accept.resolve", lambda job, *more: calls.append(job.spec.script.path) or resolve(job, *more)
    )
    one = fresh(script={"path": "counted.py"})
    for _ in range(3):
        reconcile(one, None, CONTEXT, NOW)
    assert calls == ["counted.py"]
    for changed in (
        fresh(script={"path": "other.py"}),
        replace(one, profiles=({**PROFILE, "spec": {**PROFILE["spec"], "image": "python:2"}},)),
        replace(
            one,
            job=job({"excludedNodes": [{"name": "bad", "time": "2026-01-01T00:00:00Z", "message": "m"}]}, script={"path": "counted.py"}),
        ),
    ):
        calls.clear()
        reconcile(changed, None, CONTEXT, NOW)
        assert len(calls) == 1
    large = fresh(script={"path": "large.py", "args": ["x" * 1000] * (REMEMBERED_CHARACTERS // 500)})
    calls.clear()
    for _ in range(2):
        reconcile(large, None, CONTEXT, NOW)
    assert calls == ["large.py"] * 2  # not kept in memory


def test_every_condition_is_there_from_the_first_status_on() -> None:
    plan = reconcile(fresh(), None, CONTEXT, NOW)
    assert [c["type"] for c in plan.status["conditions"]] == [
        "Accepted", "Suspended", "PodsScheduled", "NodesHealthy", "RanksReady", "FabricVerified", "Straggling", "SavesFailing",
            "Progressing", "CheckpointCommitted", "Restarting", "Complete", "Failed",
        "Held",
    ]  # fmt: skip
    assert {c["observedGeneration"] for c in plan.status["conditions"]} == {3}


def test_a_job_that_runs_as_it_should_needs_nothing() -> None:
    observed = settled(report())
    assert condition(observed, "Progressing")[:2] == ("True", "Running")
    plan = reconcile(observed, report(), CONTEXT, NOW + 5)
    assert (plan.create, plan.claims, plan.apply, plan.delete, plan.status, plan.events) == ((), (), (), (), None, ())


def test_conditions_keep_their_time_while_their_status_stays() -> None:
    observed = settled(report())
    plan = reconcile(replace(observed, pods=(pod(0),)), report(ready=1), CONTEXT, NOW + 100)
    times = {c["type"]: c["lastTransitionTime"] for c in plan.status["conditions"]}
    assert times["Accepted"] == "2027-01-15T08:00:00Z"
    assert times["RanksReady"] == "2027-01-15T08:01:40Z"


def test_an_operator_that_was_just_started_changes_nothing_before_it_hears_the_coordinator() -> None:
    observed = settled(report())
    assert reconcile(observed, None, CONTEXT, NOW + 1).status is None


@pytest.mark.parametrize("change", ["cluster", "spec", "operator"])
def test_a_change_leaves_a_running_gang_alone_and_is_pending(change: str) -> None:
    observed, context = settled(report()), CONTEXT
    if change == "cluster":
        observed = replace(observed, profiles=({**PROFILE, "spec": {**PROFILE["spec"], "shmSize": "1Gi"}},))
    elif change == "spec":
        observed = asked(observed, env=[{"name": "A", "value": "1"}])
    else:
        context = replace(CONTEXT, agent_image="agent:2")
    plan = reconcile(observed, report(), context, NOW + 1)
    assert (plan.create, plan.apply, plan.delete) == ((), (), ())
    assert plan.status["run"]["pending"] is True
    assert plan.status["run"]["name"] == observed.status["run"]["name"]


def test_what_was_pending_counts_at_the_next_start_from_zero_and_the_old_run_goes() -> None:
    observed = settled(report(), suspend=True)
    stopped = after(observed, reconcile(observed, None, CONTEXT, NOW))
    asleep = replace(stopped, pods=())
    started = asked(asleep, suspend=False, env=[{"name": "A", "value": "1"}])
    first = reconcile(started, None, CONTEXT, NOW)
    kept = started.objects.keys()
    assert {i["kind"] for i in (*first.create, *first.apply)} >= {"ConfigMap", "StatefulSet"}
    assert all(item["metadata"]["name"] != "x" or item["spec"]["replicas"] == 2 for item in first.apply if item["kind"] == "StatefulSet")
    assert [i["metadata"]["name"] for i in first.delete] == [name for kind, name in kept if kind == "ConfigMap"]


def test_suspending_scales_to_zero_with_the_frozen_run() -> None:
    observed = settled(report())
    observed = asked(observed, suspend=True)
    plan = reconcile(observed, report(), CONTEXT, NOW)
    assert [(i["kind"], i["spec"]["replicas"]) for i in plan.apply] == [("StatefulSet", 0)]
    assert plan.apply[0]["metadata"]["uid"] == "uid-StatefulSet-x"
    assert condition(plan, "Suspended")[:2] == ("False", "Stopping")
    at_zero = replace(after(observed, plan), pods=())
    assert condition(reconcile(at_zero, None, CONTEXT, NOW), "Suspended")[:2] == ("True", "Suspended")


def test_a_job_that_had_nothing_left_to_do_says_so_and_how_to_train_anew() -> None:
    observed, note = (
        settled(report()),
        "nothing was left to do: step 2 of 2 is in /c; to train anew, set training.checkpoint.resumeFrom to None",
    )
    complete = after(observed, reconcile(observed, report(State.COMPLETE, ready=0, result={"note": note}), CONTEXT, NOW))
    assert condition(complete, "Complete")[2] == f"every rank ended well; {note}"
    later = after(complete, reconcile(complete, None, CONTEXT, NOW + 60))
    assert condition(later, "Complete")[2] == f"every rank ended well; {note}"
    assert later.status["result"] == {"note": note}


def test_a_complete_job_is_scaled_to_zero_and_its_result_kept() -> None:
    result: dict[str, str | None] = {"adapter": "/workspace/a", "evalLossBefore": "2.0", "evalLossAfter": "1.0"}
    end = report(State.COMPLETE, ready=0, result=result, log=("line 1", "line 2"))
    observed = settled(report())
    plan = reconcile(observed, end, CONTEXT, NOW)
    assert plan.status["result"] == result
    assert condition(plan, "Complete")[0] == "True"
    assert [i["metadata"]["name"] for i in plan.create] == ["x-log"]
    assert "ObjectRestored" not in {note.reason for note in plan.events}  # nobody has deleted what was never there
    assert plan.create[0]["data"] == {"node-0.log": "line 1\nline 2\n"}
    assert [(i["kind"], i["spec"]["replicas"]) for i in plan.apply] == [("StatefulSet", 0)]
    finished = replace(after(observed, plan), pods=())
    again = reconcile(finished, None, CONTEXT, NOW + 60)
    assert (plan.status["nodes"], again.create, again.apply, again.status) == (0, (), (), None)


def test_a_failure_names_rank_node_and_where_it_ran() -> None:
    failure = Failure("rank 1 on node 1 exited with 1: ValueError: no", 1, 1, 1, None, "ValueError", ("Traceback", "ValueError: no"))
    plan = reconcile(settled(report()), report(State.FAILED, ready=0, failure=failure), CONTEXT, NOW)
    assert condition(plan, "Failed") == ("True", "RanksFailed", failure.message)
    assert plan.status["failure"]["nodeName"] == "node-1"
    assert plan.status["failure"]["lastLines"] == ["Traceback", "ValueError: no"]
    assert [note.type for note in plan.events] == ["Warning"]


def test_failures_that_were_overcome_are_remembered_with_what_each_cost() -> None:
    failure = Failure("rank 1 on node 1 exited with 77 (out of memory)", 1, 1, 77, cause=Cause.OUT_OF_MEMORY, step=47)
    said = report(restarts_counted=1, history=(Restart(1, "2026-01-01T00:00:00Z", failure, 7, 13),))
    plan = reconcile(settled(report()), said, CONTEXT, NOW)
    assert plan.status["restartsCountTowardsMax"] == 1
    assert plan.status["restartHistory"] == [
        {
            "attempt": 1,
            "time": "2026-01-01T00:00:00Z",
            "cause": "OutOfMemory",
            "message": failure.message,
            "rank": 1,
            "node": 1,
            "lostSteps": 7,
            "downtimeSeconds": 13,
            "counts": True,
        }
    ]


def test_progress_is_written_every_15_seconds_at_most_and_transitions_at_once() -> None:
    first, second = (report(trainer=TrainerReport("Step", step, 120)) for step in (1, 2))
    observed = settled(first)
    plan = reconcile(observed, second, CONTEXT, NOW + 4)
    assert plan.status is None
    assert plan.again_seconds == pytest.approx(11)
    later = reconcile(observed, second, CONTEXT, NOW + 15)
    assert (later.status["trainer"]["step"], later.status["trainer"]["progressPercentage"]) == (2, 1)
    lost = reconcile(observed, report(State.BACKING_OFF, ready=0, trainer=TrainerReport("Step", 2, 120)), CONTEXT, NOW + 4)
    assert condition(lost, "Restarting")[0] == "True"


@pytest.mark.parametrize(
    "said",
    [TrainerReport("Step", -3, 10), TrainerReport("x" * 5000, 3, -1), TrainerReport("Step", 3, 2**70, -1)],
    ids=["step", "total", "huge"],
)
def test_what_an_older_gang_lets_a_script_say_is_never_a_status_that_the_api_server_refuses(said: TrainerReport) -> None:
    plan = reconcile(settled(report()), report(trainer=said), CONTEXT, NOW + 20)
    (version,) = training_job_crd()["spec"]["versions"]
    jsonschema.Draft202012Validator(version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["trainer"]).validate(
        plan.status["trainer"]
    )
    assert all(value < 2**63 for value in plan.status["trainer"].values() if isinstance(value, int))


def test_a_committed_checkpoint_is_told() -> None:
    commit = CheckpointReport(100, "/workspace/runs/x/checkpoints/step-100.a1", "2027-01-15T08:00:00Z")
    plan = reconcile(running(), report(checkpoint=commit), CONTEXT, NOW)
    assert condition(plan, "CheckpointCommitted")[:2] == ("True", "Committed")
    assert plan.status["checkpoint"]["lastCommittedStep"] == 100


def test_a_coordinator_that_falls_silent_is_noticed_without_an_event() -> None:
    observed = settled(report())
    assert reconcile(observed, report(), CONTEXT, NOW + 10).again_seconds == pytest.approx(51)
    assert condition(reconcile(observed, report(), CONTEXT, NOW + 62), "Progressing")[:2] == ("Unknown", "NoReport")


def test_a_report_of_a_pod_that_is_gone_says_nothing() -> None:
    stale = replace(report(), pod_uid="earlier")
    assert condition(reconcile(running(), stale, CONTEXT, NOW), "RanksReady")[1] == "WaitingForReport"


@pytest.mark.parametrize(
    ("observed", "reason", "says"),
    [
        (replace(fresh(), profiles=()), "NoDefaultCluster", "there is none at all"),
        (fresh(cluster="q"), "ClusterNotFound", "the cluster has p"),
        (replace(fresh(cluster="q"), profiles=tuple({**PROFILE, "metadata": {"name": f"p{n}"}} for n in range(10))), "ClusterNotFound",
            "has p0, p1, p2, p3, p4, p5, p6, p7 and 2 more:"),
        (replace(fresh(), profiles=(PROFILE, {**PROFILE, "metadata": {**PROFILE["metadata"], "name": "q"}})), "SeveralDefaultClusters",
            "(p, q)"),
        (replace(fresh(), profiles=({**PROFILE, "spec": {"shmSize": "much"}},)), "InvalidCluster", "shmSize"),
        (fresh(nodes="two"), "InvalidSpec", "nodes"),
        (fresh(fabric={"mode": "RDMA"}), "RDMAUnavailable", "RDMA"),
        (replace(fresh(), service_accounts=frozenset()), "ServiceAccountNotFound", "kubectl create serviceaccount ml-dev-sa -n ns"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_keeps_a_job_from_starting_is_the_reason_of_its_summary(observed: Observed, reason: str, says: str) -> None:
    plan = reconcile(observed, None, CONTEXT, NOW)
    assert (plan.create, plan.claims) == ((), ())
    assert condition(plan, "Accepted")[:2] == ("False", reason)
    assert condition(plan, "Progressing")[:2] == ("False", reason)
    assert says in condition(plan, "Accepted")[2]


def test_a_job_of_the_same_name_that_is_still_being_removed_is_waited_for() -> None:
    old = freeze_of(fresh())
    items = children(old, owner_uid="earlier", key=KEY, replicas=2)
    remaining = {(i["kind"], i["metadata"]["name"]): stored(i) for i in items if i["kind"] == "StatefulSet"}
    plan = reconcile(replace(fresh(), objects=remaining, pods=(pod(0),)), None, CONTEXT, NOW)
    assert condition(plan, "Accepted")[:2] == ("False", "PreviousJobRemains")
    assert (plan.create, plan.apply, plan.delete) == ((), (), ())


def freeze_of(observed: Observed) -> Any:
    from lockstep.plan.reconcile.accept import Accepted, accept

    found = accept(observed, CONTEXT)
    assert isinstance(found, Accepted)
    assert found.frozen == freeze(found.resolved, CONTEXT)
    return found.frozen


def test_an_object_with_another_owner_is_never_applied() -> None:
    observed = settled(report())
    key = ("Service", "x-headless")
    metadata = {**observed.objects[key]["metadata"], "ownerReferences": [{"kind": "Other", "name": "o", "uid": "u", "controller": True}]}
    taken = replace(observed, objects={**observed.objects, key: {**observed.objects[key], "metadata": metadata, "spec": {"ports": []}}})
    plan = reconcile(taken, report(), CONTEXT, NOW)
    assert plan.apply == ()
    assert [item["kind"] for item in plan.create] == ["Service"]  # a POST can't overwrite: it finds out whose it is


def test_a_statefulset_of_somebody_else_is_reported_and_left_alone() -> None:
    observed = settled(report())
    key = ("StatefulSet", "x")
    metadata = {
        **observed.objects[key]["metadata"],
        "ownerReferences": [{"kind": "ConfigMap", "name": "x-run-1", "uid": "u", "controller": True}],
    }
    objects = {key: {**observed.objects[key], "metadata": metadata}}
    plan = reconcile(replace(observed, objects=objects), None, CONTEXT, NOW)
    assert condition(plan, "Accepted")[:2] == ("False", "NameTaken")
    assert (plan.create, plan.apply, plan.delete) == ((), (), ())


def test_unschedulable_pods_name_the_nodes_that_lack_what_they_ask_for() -> None:
    told = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match pod anti-affinity rules. preemption: none."
    asks = {"containers": [{"resources": {"requests": {"nvidia.com/gpu": "4"}}}]}
    waiting = pod(1, spec=asks, status=unplaced(told))
    first = pod(0, spec={**asks, "nodeName": "a"})
    nodes = tuple(
        {"metadata": {"name": name, "labels": {}}, "status": {"allocatable": {"nvidia.com/gpu": count}}}
        for name, count in (("a", "4"), ("b", "0"))
    )
    observed = replace(running(), pods=(first, waiting), nodes=nodes, waiting=())
    plan = reconcile(observed, None, CONTEXT, NOW)
    message = f"1 of 2 pods scheduled: node b lacks nvidia.com/gpu; {HOLDS_ONE}"
    assert condition(plan, "PodsScheduled") == ("False", "Unschedulable", message)
    assert condition(plan, "Progressing")[:2] == ("False", "Unschedulable")
    busy = replace(observed, nodes=tuple({**n, "status": {"allocatable": {"nvidia.com/gpu": "4"}}} for n in nodes))
    assert condition(reconcile(busy, None, CONTEXT, NOW), "PodsScheduled")[2].endswith(f"nvidia.com/gpu is in use on node b; {HOLDS_ONE}")


def waiting(reason: str, message: str = "no", node: int = 0, **container: Any) -> Object:
    """A pod whose container has never run."""
    state = {"name": "trainer", "image": "python:1", "state": {"waiting": {"reason": reason, "message": message}}, **container}
    return pod(node, status={"phase": "Pending", "containerStatuses": [state]})


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (waiting("ImagePullBackOff", "no such image"), "ImagePullFailed"),
        (waiting("ErrImagePull", "no such image"), "ImagePullFailed"),
        (waiting("CreateContainerConfigError", 'secret "hf" not found'), "ContainerNotStarted"),
        (pod(0, status={"initContainerStatuses": [{"name": "agent", "state": {"terminated": {"exitCode": 1, "message": "no python"}}}]}),
            "ContainerFailed"),
        (pod(0, status={"phase": "Failed", "reason": "Evicted", "message": "disk pressure"}), "PodFailed"),
    ],
    ids=["backoff", "pull", "config", "init", "evicted"],
)  # fmt: skip
def test_a_pod_that_cant_start_is_told_with_the_kubelets_words(broken: Object, reason: str) -> None:
    plan = reconcile(replace(running(), pods=(broken, pod(1))), None, CONTEXT, NOW)
    assert condition(plan, "RanksReady")[:2] == ("False", reason)
    assert condition(plan, "Progressing")[:2] == ("False", reason)
    assert "x-0" in condition(plan, "RanksReady")[2]
    assert condition(reconcile(running(), report(), CONTEXT, NOW), "RanksReady")[0] == "True"


@pytest.mark.parametrize(("state", "reason"), [(State.STARTING, "Starting"), (State.WAITING, "Starting"), (State.RUNNING, "Running")])
def test_a_gang_of_which_some_ranks_have_ended_is_not_told_to_start(state: State, reason: str) -> None:
    plan = reconcile(running(), report(state, ready=1), CONTEXT, NOW)
    assert condition(plan, "Progressing")[:2] == ("True", reason)
    assert condition(plan, "RanksReady")[:2] == ("False", "WaitingForRanks")


def unscheduled(message: str) -> Object:
    volumes = [{"name": "w", "persistentVolumeClaim": {"claimName": "ml-dev-workspace"}}]
    return pod(0, spec={"containers": [], "volumes": volumes}, status=unplaced(message))


def test_a_claim_is_blamed_only_when_the_pod_waits_for_it() -> None:
    claim = {"metadata": {"name": "ml-dev-workspace", "uid": "c"}, "spec": {"storageClassName": "late"}, "status": {"phase": "Pending"}}
    observed = replace(running(), claims={"ml-dev-workspace": claim})
    waits = replace(observed, pods=(unscheduled("pod has unbound immediate PersistentVolumeClaims."), pod(1)))
    told = condition(reconcile(waits, None, CONTEXT, NOW), "PodsScheduled")
    assert told[:2] == ("False", "ClaimNotBound")
    assert told[2].startswith("1 of 2 pods scheduled: claim ml-dev-workspace is Pending: its storage class is late: see what")
    late = replace(observed, pods=(unscheduled("0/2 nodes are available: 2 node(s) had untolerated taint."), pod(1)))
    assert condition(reconcile(late, None, CONTEXT, NOW), "PodsScheduled")[1] == "Unschedulable"
    missing = replace(observed, claims={}, pods=(unscheduled('persistentvolumeclaim "ml-dev-workspace" not found'), pod(1)))
    assert condition(reconcile(missing, None, CONTEXT, NOW), "PodsScheduled")[2].endswith("name one that exists (kubectl get pvc -n ns)")


@pytest.mark.parametrize(
    ("message", "seconds", "is_told"),
    [
        ("failed to sync configmap cache: timed out waiting for the condition", 60, False),
        ('object "ns"/"x-run-1" not registered', 60, False),
        (
            (
                'configmaps "x-run-1" is forbidden: User "system:node:a" cannot get resource "configmaps": no relationship found between'
                " node 'a' and this object"
            ),
            60,
            False,
        ),
        ('configmap "{run}" not found', 60, False),
        ('secret "x-agents-1-2" not found', 3, False),
        ('secret "x-agents-1-2" not found', 30, True),
        ('configmap "scripts" not found', 3, True),
    ],
)
def test_a_kubelet_that_has_not_heard_yet_of_what_was_just_made_is_no_trouble(message: str, seconds: int, is_told: bool) -> None:
    observed = running()
    run = next(name for kind, name in observed.objects if kind == "ConfigMap" and name.startswith("x-run-"))
    words = f'MountVolume.SetUp failed for volume "v" : {message.replace("{run}", run)}'
    said = event("pod-0", "FailedMount", words, lastTimestamp=timestamp(NOW + seconds))
    scheduled = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(NOW)}]
    waits = pod(0, status={"phase": "Pending", "containerStatuses": [], "conditions": scheduled})
    plan = reconcile(replace(observed, pods=(waits, pod(1)), warnings=(said,)), None, CONTEXT, NOW + seconds)
    assert condition(plan, "RanksReady")[1] == ("VolumeNotMounted" if is_told else "Starting")


def test_a_volume_that_cant_be_mounted_is_told_until_the_pod_runs() -> None:
    observed = replace(running(), warnings=(event("pod-0", "FailedMount", 'configmap "scripts" not found'),))
    plan = reconcile(replace(observed, pods=(waiting("ContainerCreating", ""), pod(1))), None, CONTEXT, NOW)
    status, reason, message = condition(plan, "RanksReady")
    assert (status, reason) == ("False", "VolumeNotMounted")
    assert message.startswith('1 of 2 pods run: pod x-0: configmap "scripts" not found; create it')
    assert condition(reconcile(observed, report(), CONTEXT, NOW), "RanksReady")[0] == "True"


def test_every_reason_has_a_line_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "status.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert {str(reason) for reason in Reason} - documented == set()


def test_a_secret_that_was_not_seen_is_made_unless_pods_that_run_show_that_it_is_there() -> None:
    observed = settled(report())
    unseen = replace(observed, objects={key: item for key, item in observed.objects.items() if key[0] != "Secret"})
    assert reconcile(unseen, report(), CONTEXT, NOW).create == ()
    one_waits = replace(unseen, pods=(pod(0), pod(1, status={"phase": "Pending"})))
    assert [item["kind"] for item in reconcile(one_waits, report(), CONTEXT, NOW).create] == ["Secret"]


def test_gpus_that_the_cluster_says_it_hasn_t_are_refused_and_not_waited_for() -> None:
    seen = running(gpusPerNode=4)
    without = {**seen.profiles[0], "spec": {**seen.profiles[0]["spec"], "gpus": {"perNode": 0}}}
    status, reason, message = condition(reconcile(replace(seen, profiles=(without,), pods=(), objects={}), None, CONTEXT, NOW), "Accepted")
    assert (status, reason) == ("False", "NoGPUs")
    assert "gpusPerNode is 4, but the cluster p has no GPUs" in message


@pytest.mark.parametrize(("characters", "remembered"), [(64 << 10, True), ((64 << 10) + 1, False)])
def test_rendered_objects_are_remembered_of_runs_of_usual_size(monkeypatch: pytest.MonkeyPatch, characters: int, remembered: bool) -> None:
    monkeypatch.setattr(writes, "children", lambda running, **_: [])
    writes._made.cache_clear()
    writes._children(Frozen("x", "ns", 1, "r" * (characters - 1), "t"), "uid", "key", 1, "proof")
    assert writes._made.cache_info().currsize == int(remembered)
    writes._made.cache_clear()


def test_32_jobs_and_8_clusters_are_remembered_as_they_were_read() -> None:
    def read(number: int, cluster: int = 0) -> Accepted:
        profile = {**PROFILE, "spec": {**PROFILE["spec"], "image": f"remembered:{cluster}"}}
        accepted = accept(replace(fresh(script={"path": f"remembered-{number}.py"}), profiles=(profile,)), CONTEXT)
        assert isinstance(accepted, Accepted)
        return accepted

    jobs = [read(number) for number in range(33)]
    assert read(1) is jobs[1] and read(0) is not jobs[0]
    clusters = [read(100 + number, number).resolved.profile for number in range(9)]
    assert read(200, 1).resolved.profile is clusters[1] and read(200, 0).resolved.profile is not clusters[0]


def test_rendered_objects_of_32_jobs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []
    monkeypatch.setattr(writes, "children", lambda running, **_: rendered.append(running.job) or [])
    writes._made.cache_clear()
    for number in (*range(33), 1, 0):
        writes._children(Frozen(f"x-{number}", "ns", 1, "r", "t"), "uid", "key", 1, "proof")
    assert rendered == [*(f"x-{number}" for number in range(33)), "x-0"]
    writes._made.cache_clear()
