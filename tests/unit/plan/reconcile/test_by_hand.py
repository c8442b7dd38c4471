"""Objects of a job that somebody deletes, scales or lets go: each is named, with what Lockstep does about it or what helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.objects import Object
from lockstep.kube.cluster import ApiError
from lockstep.plan.observed import REPLICAS_BY, Observed
from lockstep.plan.pages.why import answer_page, why
from lockstep.plan.reconcile import writes
from lockstep.plan.reconcile.events import JobEvent
from lockstep.plan.reconcile.reconcile import Plan, reconcile
from lockstep.plan.times import seconds_of
from lockstep.platforms.operator.execute import _refused
from lockstep.platforms.operator.memory.inventory import Inventory
from lockstep.platforms.operator.memory.objects import StoredObject
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, condition, event, pod, replicas, report, settled

STS = ("StatefulSet", "x")
BY_KUBECTL = {REPLICAS_BY: {"manager": "kubectl", "time": "2027-01-15T07:59:58Z"}}


def without(observed: Observed, *keys: tuple[str, str]) -> Observed:
    return replace(observed, objects={key: item for key, item in observed.objects.items() if key not in keys})


def scaled(observed: Observed, replicas: int, **more: Any) -> Observed:
    seen = observed.objects[STS]
    return replace(observed, objects={**observed.objects, STS: {**seen, **more, "spec": {**seen["spec"], "replicas": replicas}}})


def told(plan: Plan) -> dict[str, str]:
    return {note.reason: note.message for note in plan.events if note.type == "Warning"}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_statefulset_that_somebody_scales_is_set_back_and_named(count: int) -> None:
    observed = scaled(settled(report()), count, **BY_KUBECTL)
    plan = reconcile(observed, report(), CONTEXT, NOW + 1)
    assert replicas(plan) == [2]
    said = told(plan)["StatefulSetScaled"]
    assert f"StatefulSet x was scaled to {count} by kubectl at 2027-01-15T07:59:58Z: it is set back to 2" in said
    assert "lockstep stop x -n ns" in said and "lockstep scale x -n ns N" in said
    assert said in condition(plan, "Accepted")[2]
    later = after(observed, plan)
    assert said in answer_page(why(later, (), NOW + 60))
    still = reconcile(later, report(), CONTEXT, NOW + 50)
    assert (still.events, still.status) == ((), None)
    over = reconcile(later, replace(report(), received=NOW + 700), CONTEXT, NOW + 700)
    assert condition(over, "Accepted")[2] == "the job fits its cluster"


def test_pods_that_go_already_because_of_it_are_waited_for() -> None:
    leaving = [{**item, "metadata": {**item["metadata"], "deletionTimestamp": "2027-01-15T08:00:00Z"}} for item in (pod(0), pod(1))]
    observed = replace(scaled(settled(report()), 0, **BY_KUBECTL), pods=tuple(leaving))
    plan = reconcile(observed, report(), CONTEXT, NOW + 1)
    assert "was scaled to 0 by kubectl" in told(plan)["StatefulSetScaled"]
    assert "the job starts again after" in condition(plan, "Progressing")[2]
    back = reconcile(replace(after(observed, plan), pods=()), None, CONTEXT, NOW + 5)
    assert replicas(back) == [2]


def test_what_the_operator_itself_scaled_is_nobody_s_doing() -> None:
    ours = {REPLICAS_BY: {"manager": "lockstep-operator", "time": "2027-01-15T07:59:58Z"}}
    plan = reconcile(scaled(settled(report()), 0, **ours), report(), CONTEXT, NOW + 1)
    assert "StatefulSetScaled" not in told(plan)


def test_who_scaled_it_is_read_of_managed_fields() -> None:
    replicas: Object = {"f:spec": {"f:replicas": {}}}
    entries = [
        {"manager": "lockstep-operator", "operation": "Apply", "time": "2027-01-01T00:00:00Z", "fieldsV1": replicas},
        {"manager": "kubectl", "operation": "Update", "subresource": "scale", "time": "2027-01-02T00:00:00Z", "fieldsV1": replicas},
        {"manager": "kube-controller-manager", "time": "2027-01-03T00:00:00Z", "fieldsV1": {"f:status": {"f:replicas": {}}}},
    ]
    observed = settled(report())
    seen = {**observed.objects[STS], "metadata": {**observed.objects[STS]["metadata"], "managedFields": entries}}
    kept = StoredObject("StatefulSet", seen).item
    assert replace(observed, objects={STS: kept}).scaled_by == {"manager": "kubectl", "time": "2027-01-02T00:00:00Z"}
    assert "managedFields" not in kept["metadata"]


@pytest.mark.parametrize("key", [STS, ("Service", "x-headless"), ("NetworkPolicy", "x")], ids=lambda key: key[0])
def test_an_object_that_somebody_deletes_is_made_again_and_named(key: tuple[str, str]) -> None:
    observed = settled(report())
    knows = replace(CONTEXT, remembered=reconcile(observed, report(), CONTEXT, NOW).run)
    plan = reconcile(without(observed, key), report(), knows, NOW + 1)
    assert [item["kind"] for item in plan.create] == [key[0]]
    assert (
        f"{key[0]} {key[1]} was deleted or has lost its labels while the job has pods: Lockstep creates it again"
        in told(plan)["ObjectRestored"]
    )
    assert told(plan)["ObjectRestored"] in condition(plan, "Accepted")[2]


def test_a_statefulset_that_is_being_deleted_is_named() -> None:
    observed = settled(report())
    seen = observed.objects[STS]
    going = {**seen, "metadata": {**seen["metadata"], "deletionTimestamp": "2027-01-15T08:00:00Z"}}
    plan = reconcile(replace(observed, objects={**observed.objects, STS: going}), report(), CONTEXT, NOW + 1)
    assert "StatefulSet x is being deleted by somebody else" in told(plan)["StatefulSetDeleted"]


def test_a_start_and_an_operator_that_has_just_been_started_restore_nothing() -> None:
    observed = settled(report())
    secrets = [key for key in observed.objects if key[0] == "Secret"]
    pods = ({**pod(0), "status": {"phase": "Pending"}}, pod(1))
    plan = reconcile(replace(without(observed, *secrets), pods=pods), report(), CONTEXT, NOW + 1)
    assert [item["kind"] for item in plan.create] == ["Secret"]
    assert told(plan) == {}


@pytest.mark.parametrize("kind", ["secret", "configmap"])
def test_a_pod_that_misses_what_lockstep_makes_is_told_so_and_not_to_make_it(kind: str) -> None:
    observed = settled(report())
    own = next(name for k, name in observed.objects if k.lower() == kind)
    pods = ({**pod(0), "status": {"phase": "Pending"}}, pod(1))
    lacks = 'MountVolume.SetUp failed for volume "v" : {} "{}" not found'
    lost = replace(
        without(observed, next(k for k in observed.objects if k[1] == own)),
        pods=pods,
        warnings=(event("pod-0", "FailedMount", lacks.format(kind, own)),),
    )
    plan = reconcile(lost, report(), CONTEXT, NOW + 1)
    assert any(item["metadata"]["name"] == own for item in plan.create)
    assert {"ObjectRestored", "FrozenRunRestored"} & told(plan).keys()
    message = condition(plan, "Progressing")[2]
    assert f"Lockstep creates this {kind} itself, and again after a deletion" in message
    assert "podTemplate.volumes" not in message
    of_theirs = replace(
        lost, warnings=(event("pod-0", "FailedMount", f'MountVolume.SetUp failed for volume "v" : {kind} "mine" not found'),)
    )
    assert "create it in the job's namespace" in condition(reconcile(of_theirs, report(), CONTEXT, NOW + 1), "Progressing")[2]


def test_a_service_account_that_goes_while_pods_run_is_named() -> None:
    plan = reconcile(replace(settled(report()), service_accounts=frozenset()), report(), CONTEXT, NOW + 1)
    assert (plan.create, plan.apply, plan.delete) == ((), (), ())
    status, reason, message = condition(plan, "Accepted")
    assert (status, reason) == ("False", "ServiceAccountNotFound")
    assert "kubectl create serviceaccount ml-dev-sa -n ns" in message and "lockstep resume x -n ns" in message
    assert condition(plan, "Progressing")[1] == "Running"


def mounting(index: int, name: str = "ml-dev-workspace") -> Object:
    return pod(
        index,
        spec={"nodeName": f"node-{index}", "containers": [], "volumes": [{"name": "w", "persistentVolumeClaim": {"claimName": name}}]},
    )


def going(observed: Observed) -> Observed:
    claim = {"metadata": {"name": "ml-dev-workspace", "uid": "c", "deletionTimestamp": "2027-01-15T08:00:00Z"}, "spec": {}}
    return replace(observed, claims={**observed.claims, "ml-dev-workspace": claim})


def test_a_claim_that_somebody_deletes_is_named_while_it_can_be_copied() -> None:
    plan = reconcile(going(replace(settled(report()), pods=(mounting(0), mounting(1)))), report(), CONTEXT, NOW + 1)
    status, reason, message = condition(plan, "Accepted")
    assert (status, reason) == ("False", "ClaimDeleted")
    assert "claim ml-dev-workspace is being deleted" in message and "`lockstep cp x:runs/x . -n ns`" in message
    assert "ClaimDeleted" in told(plan)


def test_no_pods_are_made_for_a_claim_that_goes() -> None:
    observed = going(replace(settled(), objects={}, pods=()))
    plan = reconcile(observed, None, CONTEXT, NOW + 1)
    assert (plan.create, condition(plan, "Progressing")[1]) == ((), "ClaimDeleted")
    gone = replace(observed, claims={})
    assert "ml-dev-workspace" in [claim["metadata"]["name"] for claim in reconcile(gone, None, CONTEXT, NOW + 2).claims]


def test_a_claim_is_made_again_for_pods_that_wait_only_where_nothing_can_have_been_on_it() -> None:
    waiting = replace(settled(), pods=({**pod(0), "status": {"phase": "Pending"}},), claims={})
    assert {claim["metadata"]["name"] for claim in reconcile(waiting, None, CONTEXT, NOW + 1).claims} == {"ml-dev-workspace", "ml-datasets"}
    ran = replace(waiting, job={**waiting.job, "status": {**waiting.status, "attempts": 2}})
    assert reconcile(ran, None, CONTEXT, NOW + 1).claims == ()


def of_kubelet(reason: str, message: str, path: str = "") -> Object:
    """As the API server has it."""
    metadata = {"name": "e", "namespace": "ns", "uid": "u", "resourceVersion": "30"}
    about = {"kind": "Pod", "name": "x-0", "uid": "pod-0", "fieldPath": path}
    return event("pod-0", reason, message, metadata=metadata, type="Warning", involvedObject=about)


def test_a_login_that_is_missing_is_named_beside_the_registry_s_answer() -> None:
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "pull access denied, unauthorized"}}
    status = {"phase": "Pending", "containerStatuses": [{"name": "trainer", "image": "i:1", "state": state}]}
    said = "Unable to retrieve some image pull secrets (login); attempting to pull the image may not succeed."
    known = Inventory()
    known.observe("Event", of_kubelet("FailedToRetrieveImagePullSecret", said), deleted=False)
    observed = replace(settled(), pods=(pod(0, status=status),), warnings=tuple(kept.item for kept in known._objects["Event"].values()))
    message = condition(reconcile(observed, None, CONTEXT, NOW + 1), "RanksReady")[2]
    assert "Secret login of imagePullSecrets is not in namespace ns" in message


NOT_THERE = (
    'rpc error: code = NotFound desc = failed to pull and unpack image "r.io/i:1": failed to resolve reference "r.io/i:1": r.io/i:1: not'
    " found"
)
DENIED = (
    'rpc error: code = Unknown desc = failed to pull and unpack image "r.io/i:1": failed to resolve reference "r.io/i:1": pull access'
    " denied, repository does not exist or may require authorization"
)
NETWORK = (
    'rpc error: code = Unknown desc = failed to pull and unpack image "r.io/i:1": failed to resolve reference "r.io/i:1": failed to do'
    ' request: Head "https://r.io/v2/i/manifests/1": dial tcp 10.1.2.3:443: i/o timeout'
)
BUSY = (
    'rpc error: code = Unknown desc = failed to pull and unpack image "r.io/i:1": unexpected status from HEAD request to'
    " https://r.io/v2/i/manifests/1: 503 Service Unavailable"
)


def pull_failed(why: str, path: str = "spec.containers{trainer}") -> Object:
    return of_kubelet("Failed", f'Failed to pull image "r.io/i:1": {why}', path)


def unpulled(event: Object, state: Object) -> Observed:
    """As the operator keeps it: node 0's pod, whose container is in this state, and the kubelet's Event."""
    statuses = {
        "initContainerStatuses": [{"name": "agent", "image": "a:1", "state": {"terminated": {"exitCode": 0}}}],
        "containerStatuses": [{"name": "trainer", "image": "r.io/i:1", "state": state}],
    }
    first = pod(0, status={"phase": "Pending", **statuses})
    known = Inventory()
    known.observe("Pod", first, deleted=False)
    known.observe("Event", event, deleted=False)
    return replace(settled(), pods=(first, pod(1)), warnings=tuple(kept.item for kept in known._objects["Event"].values()))


INITIALIZING = {"waiting": {"reason": "PodInitializing"}}


@pytest.mark.parametrize(
    ("why", "helps"),
    [
        (NOT_THERE, "correct spec.image"),
        (DENIED, "put the registry's login into spec.imagePullSecrets"),
        (NETWORK, "Kubernetes retries the pull"),
        (BUSY, "Kubernetes retries the pull"),
    ],
    ids=["not there", "denied", "network", "busy"],
)
def test_an_image_that_cannot_be_pulled_is_told_before_the_pod_s_status_says_it(why: str, helps: str) -> None:
    told = condition(reconcile(unpulled(pull_failed(why), INITIALIZING), None, CONTEXT, NOW + 1), "RanksReady")
    assert told[:2] == ("False", "ImagePullFailed")
    assert f"pod x-0: image r.io/i:1 of container trainer: {why}; {helps}" in told[2]


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (pull_failed(NOT_THERE), {"running": {}}),
        (pull_failed(NOT_THERE, "spec.initContainers{agent}"), INITIALIZING),
        (of_kubelet("Failed", "Error: cannot find the program"), INITIALIZING),
    ],
    ids=["it was pulled then", "another container", "no pull"],
)
def test_a_failed_pull_is_no_trouble_of_a_container_that_runs_or_of_another_one(said: Object, state: Object) -> None:
    observed = unpulled(said, state)
    told = condition(after(observed, reconcile(observed, None, CONTEXT, NOW + 1)), "RanksReady")
    assert told[1] != "ImagePullFailed"


def test_a_registry_that_is_not_reached_is_not_told_as_a_wrong_image() -> None:
    observed = unpulled(pull_failed(NETWORK), {"waiting": {"reason": "ErrImagePull", "message": NETWORK}})
    message = condition(reconcile(observed, None, CONTEXT, NOW + 1), "RanksReady")[2]
    assert "i/o timeout; Kubernetes retries the pull" in message and "correct spec.image, or" not in message


def test_failed_pulls_of_pods_that_are_no_job_s_are_not_kept() -> None:
    known = Inventory()
    assert known.observe("Event", pull_failed(NOT_THERE), deleted=False) == set()
    assert not known._objects["Event"]


def test_a_failed_pull_is_forgotten_with_its_event_also_after_its_pod() -> None:
    known = Inventory()
    known.observe("Pod", pod(0), deleted=False)
    known.observe("Event", pull_failed(NOT_THERE), deleted=False)
    assert known._objects["Event"]
    known.observe("Pod", pod(0), deleted=True)
    known.observe("Event", pull_failed(NOT_THERE), deleted=True)
    assert not known._objects["Event"]


def test_an_operator_that_has_lost_a_right_says_what_gives_it_again() -> None:
    said = 'services is forbidden: User "system:serviceaccount:lockstep-system:lockstep-operator" cannot create resource "services"'
    assert "`lockstep deploy CLUSTER` gives it again" in _refused(ApiError(403, "Forbidden", said)).message
    assert "lockstep deploy" not in _refused(ApiError(403, "Forbidden", 'admission webhook "x" denied the request')).message


@pytest.mark.parametrize(("age", "stays"), [(599, True), (601, False)])
def test_an_interference_is_told_for_ten_minutes(age: int, stays: bool) -> None:
    job = {
        "metadata": {"name": "x", "namespace": "ns", "uid": "u"},
        "status": {"interference": {"time": "2026-01-01T00:00:00Z", "message": "m"}},
    }
    told, left = writes.interference(Observed(job), (), seconds_of("2026-01-01T00:00:00Z") + age)
    assert (told is not None, left) == (stays, 600 - age if stays else None)
    assert writes.interference(Observed(job), (JobEvent("Warning", "Scaled", "m"),), 1.0)[1] == 600
