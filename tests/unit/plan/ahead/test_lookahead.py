"""What a plan says of nodes, quotas, claims, admission and what pods need, and the verdict over all of it."""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from golden.plan_cases import CHECKOUT, job, profile
from lockstep.plan.ahead import planned
from lockstep.plan.ahead.forecast import Forecast
from lockstep.plan.ahead.live import Comparison
from lockstep.plan.ahead.planned import EXIT_CODES, MORE_RIGHTS, PlanVerdict, sentence, verdict
from lockstep.plan.cluster.facts import NETWORK, SCC_REVIEW, ClusterFacts, Listing, Sight, Try
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.plan.diff import Change
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.plan.waiting.nodes import request

Object = dict[str, Any]
GPU = "nvidia.com/gpu"
SHARED: Object = {"classRwx": "nfs", "classRwo": "rbd"}
CLASSES = ({"metadata": {"name": "nfs"}}, {"metadata": {"name": "rbd"}, "volumeBindingMode": "WaitForFirstConsumer"})
ADMITTED = {kind: Try(True) for kind in ("TrainingJob", "Pod", "StatefulSet")}


def resolved(profile_spec: Object | None = None, **spec: Any) -> Resolved:
    """Two nodes of four GPUs, 8 CPUs and 64Gi a pod, shared storage."""
    given: Object = {
        "platform": "Kubernetes", "gpus": {"perNode": 4}, "storage": SHARED, "image": "trainer:1",
        "resources": {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "128Gi"}},
    } | (profile_spec or {})  # fmt: skip
    return resolve(job(nodes=2, **spec), profile(**given), PlatformDefaults(namespace="team"))


def node(name: str, gpus: int = 4, **spec: Any) -> Object:
    sizes = {GPU: str(gpus), "cpu": "64", "memory": "512Gi", "pods": "110"}
    return {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}, "spec": spec, "status": {"allocatable": sizes}}


def holder(name: str, on: str, gpus: int, **more: Any) -> Object:
    """Somebody's pod, of a StatefulSet of its name."""
    owner = {"kind": "StatefulSet", "name": name, "controller": True}
    return {
        "metadata": {"name": f"{name}-0", "namespace": "theirs", "uid": name, "ownerReferences": [owner]},
        "spec": {"nodeName": on, "containers": [{"name": "c", "resources": {"requests": {GPU: str(gpus)}}}], **more},
        "status": {"phase": "Running"},
    }


KINDS = {
    "nodes": "Node", "pods": "Pod", "quotas": "ResourceQuota", "ranges": "LimitRange", "claims": "PersistentVolumeClaim",
    "classes": "StorageClass", "networks": NETWORK,
}  # fmt: skip


def around(**changes: Any) -> ClusterFacts:
    """A cluster on which the job would start at once. Lists: their items, None where they may not be read; `present`: kind and name → is it
    there.
    """
    lists: dict[str, Any] = {
        "nodes": (node("a"), node("b"), node("c")),
        "classes": CLASSES,
        **{name: () for name in KINDS if name not in ("nodes", "classes")},
    }
    lists |= {name: changes.pop(name) for name in KINDS if name in changes}
    present = changes.pop("present", {("ServiceAccount", "ml-dev-sa"): True})
    healthy = ClusterFacts(
        namespace="team",
        lists={KINDS[name]: Listing(KINDS[name], sight=Sight.FORBIDDEN) if items is None else Listing(KINDS[name], items) for name,
            items in lists.items()},
        objects={key: Listing(key[0], ({"metadata": {"name": key[1]}},) if there else ()) for key, there in present.items()},
        tries=ADMITTED,
    )  # fmt: skip
    return replace(healthy, **changes)


def lines(facts: ClusterFacts | None, given: Resolved | None = None, compared: list[Comparison] | None = None) -> list[Finding]:
    """Of a cluster whose TrainingCluster is as its file says, unless `facts` has another."""
    given = given or resolved()
    pod = planned.samples(given, given.job)[1]
    name = ("TrainingCluster", given.profile.metadata.name)
    same = {name: Listing("TrainingCluster", ({"spec": given.profile.spec.to_dict()},))}
    known = facts and replace(facts, objects=same | dict(facts.objects))
    return planned.all_findings(given, pod, compared, known, Forecast())


def told(found: list[Finding], *outcomes: Outcome) -> str:
    return " | ".join(f"{line.message} → {line.fix}" for line in found if line.outcome in outcomes)


def test_a_job_that_everything_is_ready_for_fits_now() -> None:
    found = lines(around())
    assert (sentence(found), told(found, Outcome.REFUSED, Outcome.WAITS, Outcome.UNKNOWN)) == ("fits now", "")
    assert "3 of 3 nodes fit now (a, b, c); the job needs 2" in told(found, Outcome.OK)


def test_gpus_that_others_hold_are_not_free_and_their_holder_is_named() -> None:
    found = lines(around(nodes=(node("a"), node("b")), pods=(holder("theirs", "b", 1),)))
    assert sentence(found) == "would wait for room on 1 more node"
    assert "1 of the 2 nodes that the job needs fit now (a)" in told(found, Outcome.WAITS)
    assert "kubectl scale statefulset theirs -n theirs --replicas=0" in told(found, Outcome.WAITS)
    assert f"node b: has 3 of 4 {GPU} free, a pod asks for 4" in told(found, Outcome.NOTE)


def test_pods_that_have_ended_or_have_no_node_and_the_jobs_own_hold_nothing() -> None:
    ended = holder("done", "a", 4) | {"status": {"phase": "Succeeded"}}
    pending = holder("pending", "", 4)
    own = holder("own", "b", 4)
    found = lines(around(nodes=(node("a"), node("b")), pods=(ended, pending, own), own_pods=(own,)))
    assert sentence(found) == "fits now"
    assert "the job has 1 pod now: what they use is counted as free" in told(found, Outcome.NOTE)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (node("b", unschedulable=True), "is cordoned"),
        (node("b", taints=[{"key": "team", "value": "x", "effect": "NoSchedule"}]), "has the taint team=x:NoSchedule"),
        (node("b", gpus=0), f"lacks {GPU}"),
        (node("b", gpus=2), f"has only 2 of the 4 {GPU} that a pod asks for"),
    ],
)
def test_a_node_that_could_never_take_a_pod_is_told_with_why(bad: Object, why: str) -> None:
    found = lines(around(nodes=(node("a"), bad)))
    assert f"node b: {why}" in told(found, Outcome.NOTE)
    assert sentence(found) == "would wait for 1 more node that can take a pod (even when idle only 1 could take a pod)"


def test_nodes_that_the_profile_does_not_name_are_left_out() -> None:
    only = resolved({"nodes": {"gpuNodes": ["a", "b"]}})
    assert "is none of those that the job and its cluster name" in told(lines(around(), only), Outcome.NOTE)
    selected = resolved({"nodes": {"selector": {"pool": "gpu"}}})
    assert verdict(lines(around(), selected)) is PlanVerdict.WAITS


def test_what_may_not_be_seen_of_nodes_is_said_and_not_guessed() -> None:
    blind = lines(around(nodes=None, pods=None))
    assert (sentence(blind), EXIT_CODES[verdict(blind)]) == (f"may wait; not known: nodes ({MORE_RIGHTS})", 3)
    half = lines(around(pods=None))
    assert "your account may not list pods of all namespaces" in told(half, Outcome.UNKNOWN)
    assert verdict(lines(around(nodes=(node("a"),), pods=None))) is PlanVerdict.WAITS


def test_a_pods_request_is_counted_as_the_scheduler_counts_it() -> None:
    """Containers 2 + 1, a sidecar 1 beside them: 4. An init container of 5 after the sidecar: 6, which is more. Overhead 1: 7."""

    def asks(cpu: str, **more: str) -> Object:
        return {"name": "c", "resources": {"requests": {"cpu": cpu}}, **more}

    spec: Object = {
        "containers": [asks("2"), asks("1000m")],
        "initContainers": [asks("1", restartPolicy="Always"), asks("5")],
        "overhead": {"cpu": "1"},
    }
    assert request({"spec": spec}, "cpu") == Decimal(7)
    spec["initContainers"].pop()
    assert request({"spec": spec}, "cpu") == Decimal(5)


def quota(hard: Object, used: Object | None = None, **spec: Any) -> Object:
    return {"metadata": {"name": "q"}, "spec": {"hard": hard, **spec}, "status": {"hard": hard, "used": used or {}}}


@pytest.mark.parametrize(
    ("hard", "used", "expected"),
    [
        ({f"requests.{GPU}": "8"}, {}, "fits now"),
        ({f"requests.{GPU}": "8"}, {f"requests.{GPU}": "1"}, f"would wait for quota q to have 8 requests.{GPU} free"),
        ({f"requests.{GPU}": "4"}, {}, f"refused: quota q allows 4 in all, the job asks for 8 requests.{GPU}"),
        ({"requests.memory": "100Gi"}, {}, "refused: quota q allows 100.0Gi in all, the job asks for 128.0Gi requests.memory"),
        ({"limits.memory": "256Gi"}, {}, "fits now"),
        ({"memory": "129Gi"}, {"memory": "2Gi"}, "would wait for quota q to have 128.0Gi memory free"),
        ({"pods": "2"}, {"pods": "1"}, "would wait for quota q to have 2 pods free"),
        # The claims: 100Gi for /workspace and 500Gi for /datasets, both of class nfs.
        ({"requests.storage": "599Gi"}, {}, "refused: quota q allows 599.0Gi in all, the job asks for 600.0Gi requests.storage"),
        ({"nfs.storageclass.storage.k8s.io/persistentvolumeclaims": "1"}, {},
            "refused: quota q allows 1 in all, the job asks for 2 nfs.storageclass.storage.k8s.io/persistentvolumeclaims"),
        ({"count/statefulsets.apps": "0", "services": "5"}, {},
            "refused: quota q allows 0 in all, the job asks for 1 count/statefulsets.apps"),
        ({"requests.example.com/other": "0"}, {}, "fits now"),
    ],
)  # fmt: skip
def test_a_quota_is_compared_with_all_pods_and_claims_of_the_job(hard: Object, used: Object, expected: str) -> None:
    assert sentence(lines(around(quotas=(quota(hard, used),)))) == expected


def test_what_the_jobs_own_pods_use_of_a_quota_is_theirs_to_use_again() -> None:
    own = tuple(holder(f"own{index}", "a", 4) for index in range(2))
    seen = around(quotas=(quota({f"requests.{GPU}": "8"}, {f"requests.{GPU}": "8"}),), own_pods=own, pods=own)
    assert sentence(lines(seen)) == "fits now"


@pytest.mark.parametrize(
    ("scope", "counts"),
    [
        ({"scopes": ["BestEffort"]}, False),
        ({"scopes": ["NotTerminating"]}, True),
        ({"scopeSelector": {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}]}}, False),
        ({"scopeSelector": {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "NotIn", "values": ["high"]}]}}, True),
    ],
)
def test_a_quota_counts_only_for_pods_in_its_scope(scope: Object, counts: bool) -> None:
    found = verdict(lines(around(quotas=(quota({"pods": "1"}, **scope),))))
    assert found is (PlanVerdict.REFUSED if counts else PlanVerdict.FITS)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            {"type": "PersistentVolumeClaim", "max": {"storage": "200Gi"}},
            "LimitRange r allows at most 200Gi storage, claim ml-datasets has 500Gi",
        ),
        (
            {"type": "PersistentVolumeClaim", "min": {"storage": "200Gi"}},
            "LimitRange r wants at least 200Gi storage, claim ml-dev-workspace has 100Gi",
        ),
        ({"type": "PersistentVolumeClaim", "max": {"storage": "500Gi"}}, ""),
    ],
)
def test_a_limit_range_refuses_claims_that_are_too_large_or_too_small(rule: Object, said: str) -> None:
    found = told(lines(around(ranges=({"metadata": {"name": "r"}, "spec": {"limits": [rule]}},))), Outcome.REFUSED)
    assert (said in found) if said else found == ""


def claim(
    name: str, *, phase: str = "Bound", mode: str = "ReadWriteMany", size: str = "1Ti", storage_class: str = "nfs", **metadata: Any
) -> Object:
    spec = {"accessModes": [mode], "storageClassName": storage_class, "resources": {"requests": {"storage": size}}}
    return {"metadata": {"name": name, **metadata}, "spec": spec, "status": {"phase": phase, "capacity": {"storage": size}}}


@pytest.mark.parametrize(
    ("there", "outcome", "said"),
    [
        (claim("ml-datasets"), Outcome.OK, "claim ml-datasets is Bound, 1Ti, ReadWriteMany"),
        (claim("ml-datasets", size="10Gi"), Outcome.NOTE, "claim ml-datasets has 10Gi, the cluster asks for 500Gi"),
        (
            claim("ml-datasets", mode="ReadWriteOnce"),
            Outcome.REFUSED,
            "claim ml-datasets is ReadWriteOnce: 2 nodes can't mount it together",
        ),
        (claim("ml-datasets", phase="Lost"), Outcome.REFUSED, "claim ml-datasets has lost its volume"),
        (claim("ml-datasets", phase="Pending"), Outcome.WAITS, "claim ml-datasets is Pending"),
        (claim("ml-datasets", phase="Pending", storage_class="rbd"), Outcome.OK, "claim ml-datasets is Pending"),
        (claim("ml-datasets", deletionTimestamp="2026-11-21T09:00:00Z"), Outcome.REFUSED, "claim ml-datasets is being deleted"),
    ],
)
def test_a_claim_that_is_there_must_be_usable(there: Object, outcome: Outcome, said: str) -> None:
    assert said in told(lines(around(claims=(there,))), outcome)


@pytest.mark.parametrize(
    ("storage", "classes", "outcome", "said"),
    [
        (SHARED, CLASSES, Outcome.OK, "ml-datasets (500Gi), ml-dev-workspace (100Gi) would be made, ReadWriteMany, of storage class nfs"),
        ({"classRwx": "gone"}, CLASSES, Outcome.REFUSED,
            "of storage class gone, which does not exist → choose one of nfs, rbd in the cluster file"),
        ({}, CLASSES, Outcome.REFUSED, "of the default storage class, but the cluster has none"),
        (SHARED, None, Outcome.UNKNOWN, "your account may not list classes"),
        (SHARED | {"mode": "PerPod"}, CLASSES, Outcome.OK,
            "workspace-x-0 (100Gi), workspace-x-1 (100Gi), datasets-x-0 (500Gi), datasets-x-1 (500Gi) would be made"),
    ],
)  # fmt: skip
def test_a_claim_that_is_made_needs_its_class(storage: Object, classes: Any, outcome: Outcome, said: str) -> None:
    assert said in told(lines(around(classes=classes), resolved({"storage": storage})), outcome)


def test_a_claim_that_nobody_makes_must_exist() -> None:
    given = resolved(storage={"workspaceClaimName": "mine"})
    assert sentence(lines(around(), given)) == "refused: claim mine does not exist, and it is not one that Lockstep makes"


def test_a_volume_of_one_pod_may_be_read_write_once() -> None:
    there = tuple(
        claim(f"{volume}-x-{index}", mode="ReadWriteOnce", storage_class="rbd") for volume in ("workspace", "datasets") for index in (0, 1)
    )
    assert sentence(lines(around(claims=there), resolved({"storage": SHARED | {"mode": "PerPod"}}))) == "fits now"


def test_a_refused_dry_run_is_told_in_the_servers_words_and_its_warnings_too() -> None:
    said = 'pods "x-0" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
    found = lines(around(tries=ADMITTED | {"Pod": Try(False, said), "StatefulSet": Try(True, warnings=("would violate", "would violate"))}))
    assert sentence(found) == f"refused: the API server refuses the Pod: {said}"
    assert "an administrator: kubectl label namespace" in told(found, Outcome.REFUSED)
    assert told(found, Outcome.NOTE).count("the API server warns of the StatefulSet: would violate") == 1


RDMA: Object = {
    "network": {"rdma": {"enabled": True, "rails": [{"network": "rail1", "resource": "x.com/rail1"}]}}, "security": {"ipcLock": True},
}  # fmt: skip


def test_without_the_right_to_try_pods_their_admission_is_unknown() -> None:
    no_right = ADMITTED | {"Pod": Try(None, "your account may not create one")}
    found = lines(around(tries=no_right))
    assert "whether a Pod would be admitted: your account may not create one" in told(found, Outcome.UNKNOWN)
    assert sentence(found) == f"may wait; not known: admission ({MORE_RIGHTS})"


FULL = 'pods "x-0" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2'


def test_a_quota_that_is_used_up_now_is_waited_for_and_no_refusal() -> None:
    tries = ADMITTED | {"Pod": Try(False, FULL)}
    counted = lines(around(tries=tries, quotas=(quota({"pods": "2"}, {"pods": "2"}),)))
    assert sentence(counted) == "would wait for quota q to have 2 pods free"
    assert f"the API server has no room for the Pod now: {FULL}" in told(counted, Outcome.NOTE)
    unseen = lines(around(tries=tries, quotas=None))
    assert (
        sentence(unseen)
        == "would wait for the namespace's quota to have room; not known: quota (--context NAME, of an account with more rights)"
    )


@pytest.mark.parametrize(
    "message",
    [
        'pods "x-0" is forbidden: failed quota: q: must specify limits.cpu for: trainer',
        'pods "x-0" is forbidden: maximum memory usage per Container is 100Gi, but limit is 128Gi',
        'Pod "x-0" is invalid: spec.containers[0].resources.requests: Invalid value: "8": must be less than or equal to cpu limit of 500m',
    ],
)
def test_a_pod_of_the_wrong_size_is_refused_in_the_servers_words(message: str) -> None:
    found = lines(around(tries=ADMITTED | {"Pod": Try(False, message)}))
    assert sentence(found) == f"refused: the API server refuses the Pod: {message}"
    assert "kubectl describe quota,limitrange -n team" in told(found, Outcome.REFUSED)


@pytest.mark.parametrize(
    ("answer", "outcome", "said"),
    [
        (Try(True, " (SCC restricted-v2)"), Outcome.OK, "service account ml-dev-sa may run such pods (SCC restricted-v2)"),
        (
            Try(False),
            Outcome.REFUSED,
            "no SCC of service account ml-dev-sa admits the job's pods → an administrator: oc adm policy add-scc-to-user",
        ),
        (Try(None, "your account may not ask"), Outcome.UNKNOWN, "which SCC service account ml-dev-sa gets: your account may not ask"),
        (None, Outcome.UNKNOWN, "which SCC service account ml-dev-sa gets"),
    ],
)
def test_on_openshift_the_service_accounts_sccs_are_asked_for(answer: Try | None, outcome: Outcome, said: str) -> None:
    tries = ADMITTED | ({SCC_REVIEW: answer} if answer is not None else {})
    assert said in told(lines(around(tries=tries), resolved({"platform": "OpenShift"})), outcome)


def test_a_pod_that_no_scc_admits_is_refused_with_what_an_administrator_types() -> None:
    listed = (
        '[provider restricted-v2: .x: Invalid value: "IPC_LOCK": no, provider "lockstep-rdma": Forbidden: not usable by user or'
        " serviceaccount]"
    )
    refusal = f'pods "x-0" is forbidden: unable to validate against any security context constraint: {listed}'
    found = told(lines(around(tries=ADMITTED | {"Pod": Try(False, refusal)})), Outcome.REFUSED)
    assert 'restricted-v2 says .x: Invalid value: "IPC_LOCK": no → RDMA pods need the SCC lockstep-rdma' in found


TAINT = {"key": "team", "value": "x", "effect": "NoSchedule"}


def test_a_taint_that_the_profile_tolerates_is_no_obstacle() -> None:
    tolerant = resolved({"pod": {"tolerations": [{"key": "team", "operator": "Exists"}]}})
    seen = around(nodes=(node("a", taints=[TAINT]), node("b", taints=[TAINT])))
    assert sentence(lines(seen, tolerant)) == "fits now" and sentence(lines(seen)) != "fits now"


def test_a_registry_login_of_the_profile_that_is_missing_is_noted() -> None:
    seen = around(present={("Secret", "pull"): False, ("ServiceAccount", "ml-dev-sa"): True})
    found = lines(seen, resolved({"pod": {"imagePullSecrets": ["pull"]}}))
    assert "Secret pull (the cluster's pod.image_pull_secrets) is not in namespace team" in told(found, Outcome.NOTE)
    assert "or remove it from the cluster file" in told(found, Outcome.NOTE)


NEEDS: Object = {
    "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
        {"name": "O", "valueFrom": {"configMapKeyRef": {"name": "o", "key": "k", "optional": True}}}],
    "envFrom": [{"secretRef": {"name": "all"}}],
    "imagePullSecrets": [{"name": "pull"}],
    "podTemplate": {"volumes": [{"name": "v", "mountPath": "/v", "configMap": {"name": "scripts"}}]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("missing", "outcome", "said"),
    [
        (("Secret", "hf"), Outcome.REFUSED, "Secret hf (env HF_TOKEN) is not in namespace team → kubectl create secret generic hf -n team"),
        (("Secret", "all"), Outcome.REFUSED, "Secret all (envFrom) is not"),
        (("ConfigMap", "scripts"), Outcome.REFUSED, "ConfigMap scripts (podTemplate.volumes[v]) is not"),
        (("ServiceAccount", "ml-dev-sa"), Outcome.REFUSED, "→ kubectl create serviceaccount ml-dev-sa -n team"),
        (("Secret", "pull"), Outcome.NOTE, "Secret pull (imagePullSecrets) is not"),
        (("ConfigMap", "o"), Outcome.NOTE, "ConfigMap o (env O) is not"),
    ],
)
def test_what_pods_name_must_exist(missing: tuple[str, str], outcome: Outcome, said: str) -> None:
    every = [
        ("Secret", "hf"),
        ("Secret", "all"),
        ("Secret", "pull"),
        ("ConfigMap", "o"),
        ("ConfigMap", "scripts"),
        ("ServiceAccount", "ml-dev-sa"),
    ]
    present = {name: name != missing for name in every}
    found = lines(around(present=present), resolved(**NEEDS))
    assert said in told(found, outcome)
    assert verdict(found) is (PlanVerdict.REFUSED if outcome is Outcome.REFUSED else PlanVerdict.FITS)


def test_a_rails_network_must_be_in_the_namespace() -> None:
    assert "there is no NetworkAttachmentDefinition rail1 in namespace team" in told(lines(around(), resolved(RDMA)), Outcome.REFUSED)
    assert "you may not list NetworkAttachmentDefinition objects" in told(lines(around(networks=None), resolved(RDMA)), Outcome.UNKNOWN)


def test_rails_without_a_network_are_not_looked_for_and_one_network_only_once() -> None:
    several = [{"network": "rail1", "resource": "x.com/rail1"}] * 2 + [{"resource": "x.com/rail2"}]
    profile = RDMA | {"network": {"rdma": {"enabled": True, "rails": several}}}
    assert "there is no NetworkAttachmentDefinition rail1 in" in told(lines(around(), resolved(profile)), Outcome.REFUSED)
    alone = RDMA | {"network": {"rdma": {"enabled": True, "rails": [{"resource": "x.com/rail2"}]}}}
    assert "NetworkAttachmentDefinition" not in told(lines(around(networks=None), resolved(alone)), Outcome.UNKNOWN)


def test_the_clusters_profile_must_be_there_and_a_difference_is_said() -> None:
    gone = around(present={("ServiceAccount", "ml-dev-sa"): True, ("TrainingCluster", "p"): False})
    spec = resolved().profile.spec.to_dict()
    other = replace(
        gone,
        objects={**gone.objects, ("TrainingCluster", "p"): Listing("TrainingCluster", ({"spec": spec | {"gpus": {"perNode": 8}}},))},
    )
    assert "is not on the cluster → lockstep deploy" in told(lines(gone), Outcome.REFUSED)
    assert "differs from its file in gpus: the cluster's counts" in told(lines(other), Outcome.NOTE)


def test_objects_of_others_are_in_the_way_and_new_ones_are_listed() -> None:
    compared = [Comparison("Service/x-headless", absent=True), Comparison("StatefulSet/x", foreign=True)]
    found = lines(around(), compared=compared)
    assert sentence(found) == "refused: StatefulSet/x is there and belongs to something else"
    assert "would be made: Service/x-headless" in told(found, Outcome.OK)


def test_offline_only_the_files_are_told() -> None:
    found = lines(None)
    assert sentence(found, offline=True) == "fits as far as can be seen; not known: cluster (leave out --offline)"
    assert EXIT_CODES[verdict(found, offline=True)] == 0
    assert "StatefulSet/x" in told(found, Outcome.NOTE)


def test_a_refusal_weighs_more_than_a_risk_a_risk_more_than_a_wait_and_a_wait_more_than_what_is_unknown() -> None:
    refused, risk, waits, unknown = (
        Finding("quota", outcome, outcome.value, awaited="w") for outcome in (Outcome.REFUSED, Outcome.RISK, Outcome.WAITS, Outcome.UNKNOWN)
    )
    cases = ([unknown, waits, risk, refused], [unknown, waits, risk], [unknown, waits], [unknown], [])
    assert [verdict(found) for found in cases] == [
        PlanVerdict.REFUSED, PlanVerdict.MAY_FAIL, PlanVerdict.WAITS, PlanVerdict.MAY_WAIT, PlanVerdict.FITS,
    ]  # fmt: skip
    assert sentence(cases[1]) == f"may fail once it runs: risk; would wait for w; not known: quota ({MORE_RIGHTS})"
    assert sentence(cases[2]) == f"would wait for w; not known: quota ({MORE_RIGHTS})"
    assert [EXIT_CODES[found] for found in PlanVerdict] == [0, 0, 3, 3, 4, 1]


def test_the_page_lists_every_verdict_with_its_exit_code() -> None:
    page = (CHECKOUT / "docs/how-to/plan.md").read_text(encoding="utf-8")
    assert [
        found.value for found in PlanVerdict if not re.search(rf"^\| `{found.value}.*` \| {EXIT_CODES[found]} \|", page, re.MULTILINE)
    ] == []


def test_what_only_the_run_itself_will_show_says_nothing_of_its_start() -> None:
    assert verdict([Finding("time", Outcome.UNKNOWN, "how long")]) is PlanVerdict.FITS


def test_of_a_value_that_would_change_sixty_characters_are_shown() -> None:
    (finding,) = [
        one
        for one in lines(around(), compared=[Comparison("ConfigMap/x", changes=(Change("a", "b" * 100, 1),))])
        if "would change" in one.message
    ]
    assert finding.message.endswith(f': a: 1 → "{"b" * 59}…')
