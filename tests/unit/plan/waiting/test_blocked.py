"""Why pods don't run, in one line for all of them: nodes, who holds what they lack, refusals, and what helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.objects import Object
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.interactive import unused
from lockstep.plan.reconcile.podfacts import facts_of
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.waiting import containers
from lockstep.plan.waiting.notcreated import explained, why_not_created
from lockstep.plan.waiting.unscheduled import why_unscheduled, why_waiting
from lockstep.platforms.operator.memory.objects import StoredObject
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, condition, event, pod, running, unplaced

GPU = "nvidia.com/gpu"
SHORT_OF_GPUS = f"0/3 nodes are available: 3 Insufficient {GPU}. preemption: 0/3 nodes are available."


def node(name: str, gpus: int = 8, **spec: Any) -> Object:
    labels = {"kubernetes.io/hostname": name}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": {"allocatable": {GPU: str(gpus), "cpu": "64"}}}


def asking(gpus: int, **spec: Any) -> Object:
    return {"containers": [{"name": "trainer", "resources": {"requests": {GPU: str(gpus), "cpu": "8"}}}], **spec}


def stuck(index: int, message: str = SHORT_OF_GPUS, gpus: int = 8, **spec: Any) -> Object:
    return pod(index, spec=asking(gpus, **spec), status=unplaced(message))


def foreign(name: str, on: str, gpus: int, labels: dict[str, str] | None = None, owner: Object | None = None) -> Object:
    metadata = {"name": name, "namespace": "ml", "labels": labels or {}, "ownerReferences": [owner] if owner else []}
    return {"metadata": metadata, "spec": asking(gpus, nodeName=on), "status": {"phase": "Running"}}


def told(*pods: Object, nodes: tuple[Object, ...] = (), others: tuple[Object, ...] = ()) -> str:
    return why_unscheduled(replace(running(), pods=pods, nodes=nodes, others=others)).message


def test_a_pod_that_the_scheduler_has_said_nothing_of_is_told_alike_to_a_person_and_to_the_coordinator() -> None:
    for named, words in (
        ({}, "the scheduler has not decided yet"),
        (
            {"schedulerName": "volcano"},
            "the scheduler volcano has not decided yet: does one of this name run, as podTemplate.schedulerName says?",
        ),
    ):
        observed = replace(running(), pods=(pod(0), pod(1, spec=asking(8, **named), status={"phase": "Pending"})))
        (fact,) = facts_of(observed, {})
        notice = why_unscheduled(observed)
        assert (notice.reason, notice.message) == (fact.reason, fact.message) == ("Scheduling", words)


def test_every_node_is_told_with_its_first_obstacle_and_alike_ones_together() -> None:
    taint = {"key": "dedicated", "value": "infra", "effect": "NoSchedule"}
    gone = {"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}
    nodes = (
        node("a", 0), node("b", 0), node("c", 7), node("d", unschedulable=True), node("e", taints=[taint]), node("f", taints=[gone]),
    )  # fmt: skip
    assert (
        told(stuck(0), stuck(1), nodes=nodes)
        == f"nodes a, b lack {GPU}; node c has only 7 of the 8 {GPU} that a pod asks for; node d is cordoned; node e has the taint"
        " dedicated=infra:NoSchedule, which neither podTemplate.tolerations nor the cluster's pod.tolerations tolerates; node f is not"
        " ready"
    )


@pytest.mark.parametrize(
    "toleration",
    [
        {"key": "dedicated", "operator": "Exists"},
        {"key": "dedicated", "operator": "Equal", "value": "infra", "effect": "NoSchedule"},
        {"operator": "Exists"},
    ],
)
def test_a_taint_that_is_tolerated_is_no_obstacle(toleration: Object) -> None:
    taint = {"key": "dedicated", "value": "infra", "effect": "NoSchedule"}
    assert told(stuck(0, tolerations=[toleration]), nodes=(node("a", taints=[taint]),)) == f"{GPU} is in use on node a"
    assert "tolerates" in told(stuck(0, tolerations=[{**toleration, "key": "other"}]), nodes=(node("a", taints=[taint]),))


def test_control_planes_are_named_only_when_nothing_else_is_in_the_way() -> None:
    taint = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
    assert told(stuck(0), nodes=(node("a", 0), node("m", taints=[taint]))) == f"node a lacks {GPU}"
    assert "control-plane" in told(stuck(0), nodes=(node("m", taints=[taint]),))


def test_a_job_that_holds_the_gpus_is_named_with_the_command_that_frees_them() -> None:
    others = (foreign("y-0", "a", 8, {"lockstep.dev/job": "y"}), foreign("y-1", "b", 4, {"lockstep.dev/job": "y"}))
    assert told(stuck(0), nodes=(node("a"), node("b")), others=others) == (
        f"{GPU} is in use on nodes a, b: TrainingJob ml/y holds 12 "
        """(kubectl patch tj y -n ml --type merge -p '{"spec":{"suspend":true}}')"""
    )


@pytest.mark.parametrize(
    ("owner", "labels", "says"),
    [
        ({"kind": "StatefulSet", "name": "dev", "controller": True}, {},
            "StatefulSet ml/dev holds 8 (kubectl scale statefulset dev -n ml --replicas=0)"),
        ({"kind": "ReplicaSet", "name": "web-5d9", "controller": True}, {"pod-template-hash": "5d9"},
            "Deployment ml/web holds 8 (kubectl scale deployment web -n ml --replicas=0)"),
        ({"kind": "Job", "name": "batch", "controller": True}, {}, "Job ml/batch holds 8 (kubectl patch job batch -n ml"),
        (None, {}, "Pod ml/z holds 8 (kubectl delete pod z -n ml)"),
    ],
)  # fmt: skip
def test_pods_of_anybody_else_are_named_by_whoever_made_them(owner: Object | None, labels: dict[str, str], says: str) -> None:
    assert says in told(stuck(0), nodes=(node("a"),), others=(foreign("z", "a", 8, labels, owner),))


def test_only_nodes_that_the_job_could_use_are_looked_at() -> None:
    wanted = stuck(0, nodeSelector={"kubernetes.io/hostname": "a"})
    assert told(wanted, nodes=(node("a", 0), node("b", 0))) == f"node a lacks {GPU}"
    elsewhere = stuck(0, nodeSelector={"zone": "z"})
    assert told(elsewhere, nodes=(node("a"),)) == "no node of the cluster matches the node selector zone=z"
    other = foreign("z", "b", 8)
    assert "Pod ml/z" not in told(wanted, nodes=(node("a"), node("b")), others=(other,))


def test_more_pods_than_nodes_says_so() -> None:
    anti = "0/1 nodes are available: 1 node(s) didn't match pod anti-affinity rules."
    placed = pod(0, spec=asking(8, nodeName="a"))
    assert told(placed, stuck(1, anti), nodes=(node("a"),)) == "the job needs one node per pod, and node a already has one of its pods"


def test_what_nobody_here_understands_is_told_in_the_schedulers_words() -> None:
    assert (
        told(stuck(0, "0/1 nodes are available: something new.", gpus=0), nodes=(node("a"),)) == "0/1 nodes are available: something new."
    )
    volume = "0/2 nodes are available: 1 node(s) had volume node affinity conflict, 1 Insufficient cpu."
    assert "the scheduler says: 1 node(s) had volume node affinity conflict" in told(stuck(0, volume), nodes=(node("a"), node("b", 0)))


def test_the_summary_joins_what_is_seen_of_all_pods() -> None:
    image = [{"name": "trainer", "image": "x:1", "state": {"waiting": {"reason": "ErrImagePull", "message": "manifest unknown"}}}]
    pulls = [pod(i, status={"phase": "Pending", "containerStatuses": image}) for i in range(6)]
    observed = replace(running(nodes=8), pods=(*pulls, stuck(6), stuck(7)), nodes=(node("a", 0),))
    status, reason, message = condition(reconcile(observed, None, CONTEXT, NOW), "Progressing")
    assert (status, reason) == ("False", "Unschedulable")
    assert (
        message
        == f"6 of 8 pods scheduled: node a lacks {GPU}; holds 6 of 8 nodes; releases them at 2027-01-15T08:01:20Z so that another job can"
        " run; 0 of 8 pods run: pods x-0, x-1, x-2, x-3, x-4, x-5: image x:1 of container trainer: manifest unknown; correct"
        " spec.image, or the cluster's image"
    )


def test_the_precise_word_about_a_volume_counts_more_than_the_newer_vague_one() -> None:
    vague = {**event("pod-0", "FailedMount", "Unable to attach or mount volumes: timed out"), "lastTimestamp": "2026-01-02T00:00:00Z"}
    precise = {**event("pod-0", "FailedMount", 'secret "hf" not found'), "lastTimestamp": "2026-01-01T00:00:00Z"}
    waits = pod(0, status={"phase": "Pending", "containerStatuses": []})
    observed: Observed = replace(running(), pods=(waits, pod(1)), warnings=(vague, precise))
    assert 'pod x-0: secret "hf" not found; create it' in condition(reconcile(observed, None, CONTEXT, NOW), "RanksReady")[2]


def test_a_volume_that_another_node_has_attached_is_told_with_what_helps() -> None:
    words = 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) x-0'
    waits = pod(1, status={"phase": "Pending", "containerStatuses": []})
    plan = reconcile(replace(running(), pods=(pod(0), waits), warnings=(event("pod-1", "FailedAttachVolume", words),)), None, CONTEXT, NOW)
    _, reason, message = condition(plan, "RanksReady")
    assert reason == Reason.VOLUME_NOT_MOUNTED
    assert f"{words}; only one Node at a time can attach this volume (ReadWriteOnce)" in message
    assert "use a ReadWriteMany claim, or set storage.mode to PerPod" in message


def test_a_network_that_cant_be_set_up_is_told() -> None:
    waits = pod(0, status={"phase": "Pending", "containerStatuses": []})
    said = event("pod-0", "FailedCreatePodSandBox", 'cannot find a network-attachment-definition "rail-1"')
    plan = reconcile(replace(running(), pods=(waits, pod(1)), warnings=(said,)), None, CONTEXT, NOW)
    assert condition(plan, "RanksReady")[1] == Reason.NETWORK_NOT_READY
    assert "rail-1" in condition(plan, "RanksReady")[2]


REFUSAL = 'create Pod x-1 in StatefulSet x failed error: pods "x-1" is forbidden: '


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("exceeded quota: few, requested: pods=1, used: pods=1, limited: pods=1",
            "exceeded quota: few: a pod requests pods=1, pods=1 is used, the limit is pods=1: free some of it"),
        ("failed quota: q: must specify limits.memory for: trainer", "quota q requires every pod to state limits.memory for: trainer"),
        ('violates PodSecurity "restricted:latest": unrestricted capabilities (container "trainer" must not include "IPC_LOCK")',
            "kubectl label namespace ns --overwrite pod-security.kubernetes.io/enforce=privileged"),
        ('violates PodSecurity "baseline:v1.30": host namespaces (hostNetwork=true)',
            "Pod Security level baseline of namespace ns forbids the pod: host namespaces"),
        ('unable to validate against any security context constraint: [provider restricted-v2: .containers[0].capabilities.add: Invalid'
         ' value: "IPC_LOCK": capability may not be added, provider "lockstep-rdma": Forbidden: not usable by user or serviceaccount]',
         'restricted-v2 says .containers[0].capabilities.add: Invalid value: "IPC_LOCK": capability may not be added: RDMA pods need'),
        ('error looking up service account ns/sa: serviceaccount "sa" not found',
            "service account sa does not exist: create it (kubectl create serviceaccount sa -n ns)"),
        (
            'pods "x-0" is forbidden: pod rejected: RuntimeClass "nvidia" not found',
            "the TrainingCluster's pod.runtime_class is nvidia, which the cluster doesn't have",
        ),
        ("no PriorityClass with name high was found", "podTemplate.priorityClassName is high"),
        ('failed calling webhook "w.example.com": connection refused', "the admission webhook w.example.com doesn't answer"),
        ("a rule nobody here knows", 'pods "x-1" is forbidden: a rule nobody here knows'),
    ],
    ids=["quota", "quota states", "pod security of RDMA", "pod security", "SCC", "account", "runtime class", "priority", "webhook",
        "unknown"],
)  # fmt: skip
def test_a_refusal_says_what_helps(message: str, says: str) -> None:
    assert says in explained(REFUSAL + message, "ns")


def test_the_service_account_of_the_pods_stands_in_the_command_that_lets_them_in() -> None:
    listed = (
        '[provider restricted-v2: x: Invalid value: "IPC_LOCK", provider "lockstep-rdma": Forbidden: not usable by user or serviceaccount]'
    )
    message = f"{REFUSAL}unable to validate against any security context constraint: {listed}"
    observed = replace(running(), warnings=(event("uid-StatefulSet-x", "FailedCreate", message),))
    assert f"-z ml-dev-sa -n {observed.namespace}" in (why_not_created(observed) or "")


def test_a_class_that_does_not_exist_is_told_with_the_claim() -> None:
    claim = {"metadata": {"name": "w", "uid": "c"}, "spec": {"storageClassName": "fast"}, "status": {"phase": "Pending"}}
    said = event("c", "ProvisioningFailed", 'storageclass.storage.k8s.io "fast" not found')
    waits = stuck(0, "pod has unbound immediate PersistentVolumeClaims.", volumes=[{"persistentVolumeClaim": {"claimName": "w"}}])
    observed = replace(running(), pods=(waits,), claims={"w": claim}, warnings=(said,))
    assert (
        why_unscheduled(observed).message
        == "claim w is Pending: there is no storage class fast: name one that exists (kubectl get storageclass)"
    )


def test_a_dev_environment_that_nobody_uses_is_named_first_with_the_command_that_frees_it() -> None:
    labels = {"lockstep.dev/job": "ml-dev-env", "app": "ml-dev-env-multi"}
    others = (foreign("other-0", "a", 8, {"lockstep.dev/job": "other"}), foreign("ml-dev-env-0", "b", 4, labels))
    observed = replace(running(), pods=(stuck(0), stuck(1)), nodes=(node("a"), node("b")), others=others)
    said = why_unscheduled(replace(observed, unused=frozenset({("ml", "ml-dev-env")}))).message
    assert said.startswith(
        f"{GPU} is in use on nodes a, b: TrainingJob ml/ml-dev-env, a dev environment in which nothing runs, holds 4 "
        "(kubectl patch tj ml-dev-env -n ml --type merge"
    )
    assert why_unscheduled(observed).message.startswith(f"{GPU} is in use on nodes a, b: TrainingJob ml/other holds 8")


def test_only_an_environment_in_which_nothing_runs_is_unused() -> None:
    def job(name: str, reason: str, kind: str = "Interactive") -> Object:
        conditions = [{"type": "Progressing", "status": "True", "reason": reason}]
        return {"metadata": {"namespace": "ml", "name": name}, "spec": {"type": kind}, "status": {"conditions": conditions}}

    found = unused([job("ready", "Ready"), job("busy", "Running"), job("batch", "Ready", "Batch")])
    assert found == frozenset({("ml", "ready")})


PREPARES: Object = {"initContainers": [{"name": "fetch", "resources": {"requests": {GPU: "8"}}}]}
SIDECAR: Object = {"initContainers": [{"name": "proxy", "restartPolicy": "Always", "resources": {"requests": {GPU: "2"}}}]}
OVERHEAD: Object = {"overhead": {GPU: "4"}}


@pytest.mark.parametrize(
    ("more", "held"), [(PREPARES, 8), (SIDECAR, 3), (OVERHEAD, 5), ({}, 1)], ids=["init", "sidecar", "overhead", "plain"]
)
def test_what_a_pod_holds_counts_its_init_containers_and_its_overhead(more: Object, held: int) -> None:
    item = foreign("dev-0", "a", 1)
    item = {**item, "spec": {**item["spec"], **more}}
    observed = StoredObject("Pod", {**item, "metadata": {**item["metadata"], "uid": "u", "resourceVersion": "3"}}).item
    assert f"Pod ml/dev-0 holds {held} " in told(stuck(0), nodes=(node("a"),), others=(observed,))


@pytest.mark.parametrize("more", [PREPARES, OVERHEAD], ids=["init", "overhead"])
def test_a_node_that_is_too_small_for_an_init_container_or_the_overhead_is_named(more: Object) -> None:
    item = stuck(0, gpus=1)
    item = {**item, "spec": {**item["spec"], **more}}
    assert "node a has only 2 of the" in told(item, nodes=(node("a", gpus=2),))


def test_of_a_container_that_failed_the_last_three_lines_are_told() -> None:
    assert containers._end_of("\n".join(f"line {number}" for number in range(50))) == "line 47; line 48; line 49"
    assert len(containers._end_of("x" * 5000)) == 600


def crashing(restarts: int) -> Object:
    state = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {"exitCode": 1}}}
    return pod(0, status={"containerStatuses": [{"name": "c", "restartCount": restarts, **state}]})


def with_event(reason: str, message: str, **status: Any) -> Observed:
    return replace(running(), pods=(pod(0, status={"phase": "Pending", **status}),), warnings=(event("pod-0", reason, message),))


NO_CA = (
    'MountVolume.SetUp failed for volume "kube-api-access-x" : [configmap "kube-root-ca.crt" not found, configmap'
    ' "openshift-service-ca.crt" not found]'
)


@pytest.mark.parametrize(
    ("observed", "reason", "is_lasting"),
    [
        (replace(running(), pods=(crashing(1),)), "ContainerFailed", False),
        (replace(running(), pods=(crashing(2),)), "ContainerFailed", True),
        (with_event("FailedMount", 'MountVolume.SetUp failed for volume "v" : mount.nfs: Connection timed out'), "VolumeNotMounted", False),
        (with_event("FailedCreatePodSandBox", "plugin type=bridge failed"), "NetworkNotReady", False),
    ],
)
def test_a_container_that_crashed_twice_is_stuck_and_a_volume_or_a_network_may_come_late(
    observed: Observed, reason: str, is_lasting: bool
) -> None:
    why = why_waiting(observed)
    assert why is not None and (why.reason, containers.lasts(why, observed.pods[0])) == (reason, is_lasting)


def test_a_missing_object_of_a_volume_is_found_in_the_kubelet_s_words_and_who_makes_a_cluster_s_own_is_named() -> None:
    for hints in (containers.OF_A_JOB, containers.OF_THE_OPERATOR):
        why = why_waiting(with_event("FailedMount", NO_CA), hints)
        assert why is not None and why.message.startswith(f"pod x-0: {NO_CA}; kube-controller-manager puts it into every namespace")
        assert containers.missing_object(why) == ("ConfigMap", "kube-root-ca.crt")
    assert containers.missing_object(Notice("VolumeNotMounted", 'Get "https://r/v2": secret is wrong')) is None


def test_a_log_that_tells_of_a_missing_object_is_no_pod_that_waits_for_one() -> None:
    assert containers.missing_object(Notice("ContainerFailed", f"pod x-0: container trainer exited with code 1: {NO_CA}")) is None


def test_only_the_crashes_of_the_container_that_failed_count() -> None:
    pod = crashing(1)
    pod["status"]["containerStatuses"].append({"name": "sidecar", "restartCount": 5, "state": {"running": {}}})
    observed = replace(running(), pods=(pod,))
    why = why_waiting(observed)
    assert why is not None and (why.reason, containers.lasts(why, pod)) == ("ContainerFailed", False)


@pytest.mark.parametrize("reason", ["FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"])
def test_what_events_say_of_volumes_and_network_is_over_once_the_kubelet_has_both(reason: str) -> None:
    def said(status: str) -> str:
        notice = why_waiting(with_event(reason, "no", conditions=[{"type": "PodReadyToStartContainers", "status": status}]))
        return "" if notice is None else notice.message

    assert (said("False"), said("True")) == ("pod x-0: no", "")


def test_a_claim_that_may_not_be_seen_is_not_called_missing() -> None:
    waits = stuck(0, "pod has unbound immediate PersistentVolumeClaims.", volumes=[{"persistentVolumeClaim": {"claimName": "w"}}])
    for sees, words in ((True, "claim w does not exist"), (False, "pod has unbound immediate PersistentVolumeClaims.")):
        why = why_waiting(replace(running(), pods=(waits,), sees_claims=sees))
        assert why is not None and why.message.startswith(words)


def test_node_0_hears_which_volume_a_pod_waits_for() -> None:
    *_, fact = facts_of(with_event("FailedMount", NO_CA), {})
    assert (fact.reason, fact.message) == ("VolumeNotMounted", NO_CA)
