"""What LimitRanges and quotas make of pods that state no limit: lint and plan tell what a dry run says, and a discovered file states what
is needed.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import yaml

from golden.plan_cases import job, profile
from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.plan.ahead import planned
from lockstep.plan.checks.lint import lint_against, sized_pod
from lockstep.plan.cluster.facts import ClusterFacts, Listing, Try
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.plan.discovery.file import discovered
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from support.cluster_facts import quota, rdma_cluster, with_namespace_rights

Object = dict[str, Any]


def limit_range(**rule: Any) -> Object:
    return {"metadata": {"name": "core"}, "spec": {"limits": [{"type": "Container"} | rule]}}


USUAL = limit_range(default={"cpu": "500m", "memory": "4Gi"}, defaultRequest={"cpu": "50m", "memory": "256Mi"})
"""As OpenShift's project templates often have it."""


def cluster_file(**resources: Any) -> ClusterFile:
    stated: Object = yaml.safe_load(discovered("c", rdma_cluster())[0])
    stated["resources"] = resources
    return parse_cluster_file(yaml.safe_dump(stated), "c.yaml")


def given(pod: Object, limits: Object, container: str = "trainer") -> Try:
    """The API server's answer to a dry run: this container was given these limits, and as much of requests that it doesn't state."""
    admitted: Object = copy.deepcopy(pod)
    for one in (*admitted["spec"]["containers"], *admitted["spec"]["initContainers"]):
        if one["name"] == container:
            resources = one.setdefault("resources", {})
            resources["limits"] = limits | (resources.get("limits") or {})
            resources["requests"] = limits | (resources.get("requests") or {})
    return Try(True, admitted=admitted)


def linted(found: ClusterFile, answer: Try | None = None, **lists: Any) -> list[tuple[str, str, str]]:
    facts = dataclasses.replace(rdma_cluster(**lists), may_use_scc={"nccl-scc": True}, tries={} if answer is None else {"Pod": answer})
    bad = [one for one in lint_against(found, facts) if one.outcome in (Outcome.FAILED, Outcome.WARNING)]
    assert all(one.fix for one in bad)
    return [(one.subject, one.outcome.value, one.message) for one in bad]


ABOVE = (
    'Pod "lockstep-lint-x" is invalid: spec.containers[0].resources.requests: Invalid value: "63": must be less than or equal to cpu limit'
    " of 500m"
)
LEAST = 'pods "lockstep-lint-x" is forbidden: minimum memory usage per Container is 1Gi, but request is 64Mi'


@pytest.mark.parametrize("message", [ABOVE, LEAST])
def test_lint_says_with_which_sentence_a_pod_of_this_size_is_refused(message: str) -> None:
    """A request above a range's default limit; an amount of Lockstep's own init container, which is tried with the other."""
    assert linted(cluster_file(requests={"cpu": "63"}), Try(False, message)) == [
        ("resources", "failed", f"the API server refuses a pod of this size: {message}")
    ]
    assert [one["name"] for one in sized_pod(cluster_file().profile.spec, "team")["spec"]["initContainers"]] == ["agent"]


def test_lint_warns_of_a_limit_that_nobody_has_stated() -> None:
    found = cluster_file()
    answer = given(sized_pod(found.profile.spec, "nccl-test"), {"cpu": "500m", "memory": "4Gi"})
    assert linted(found, answer) == [
        ("resources.limits.cpu", "warning",
            "it states no limit, and a LimitRange of the namespace then limits every pod to 500m cpu: it is throttled there"),
        ("resources.limits.memory", "warning",
            "it states no limit, and a LimitRange of the namespace then limits every pod to 4Gi memory: what takes more is killed,"
            " OOMKilled"),
    ]  # fmt: skip


def test_who_states_limits_is_told_nothing() -> None:
    found = cluster_file(limits={"cpu": "63", "memory": "500Gi"})
    assert linted(found, given(sized_pod(found.profile.spec, "nccl-test"), {"cpu": "500m", "memory": "4Gi"})) == []


def test_a_default_limit_is_what_a_quota_counts() -> None:
    """Of two pods that a range gives 4Gi each, which are too many for 6Gi."""
    found = cluster_file()
    answer = given(sized_pod(found.profile.spec, "nccl-test"), {"memory": "4Gi"})
    lines = linted(found, answer, ResourceQuota=(quota(limits_memory="6Gi"),))
    assert ("resources.limits.memory", "failed", "a job of 2 nodes needs 8Gi limits.memory, quota team gives 6Gi") in lines


def test_a_quota_of_another_scope_counts_nothing() -> None:
    timed = quota(limits_memory="1Gi")
    timed["spec"]["scopes"] = ["Terminating"]
    assert linted(cluster_file(), ResourceQuota=(timed,)) == []


def planned_findings(resources: Object, limits: Object) -> list[Finding]:
    """Of a job of two nodes, whose pods the API server gives these limits."""
    stated = profile(platform="Kubernetes", gpus={"perNode": 4}, storage={"classRwx": "nfs"}, image="trainer:1", resources=resources)
    resolved = resolve(job(nodes=2), stated, PlatformDefaults(namespace="team"))
    sample = planned.samples(resolved, resolved.job)[1]
    sizes = {"nvidia.com/gpu": "4", "cpu": "64", "memory": "512Gi", "pods": "110"}
    nodes = tuple(
        {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}, "spec": {}, "status": {"allocatable": sizes}}
        for name in ("a", "b")
    )
    lists = {"Node": nodes, "Pod": (), "ResourceQuota": (), "LimitRange": (), "PersistentVolumeClaim": (), "StorageClass": ()}
    answer = given(sample, limits, str(sample["spec"]["containers"][0]["name"]))
    facts = ClusterFacts("team", lists={kind: Listing(kind, items) for kind, items in lists.items()}, tries={"Pod": answer})
    return list(planned.cluster_findings(resolved, sample, None, facts))


def test_a_plan_says_how_far_a_pod_is_limited_that_states_nothing() -> None:
    found = planned_findings({}, {"cpu": "500m", "memory": "4Gi"})
    assert [one.message for one in found if (one.subject, one.outcome) == ("quota", Outcome.NOTE)] == [
        "a LimitRange of the namespace limits container trainer, which states no limit, to 500m cpu (it is throttled there), 4Gi memory"
        " (what takes more is killed, OOMKilled)"
    ]  # fmt: skip


def test_a_default_request_counts_where_nodes_are_looked_for() -> None:
    waits = [one.message for one in planned_findings({}, {"cpu": "65"}) if one.outcome is Outcome.WAITS]
    assert any("nodes that the job needs fit now" in text for text in waits)


CASES: dict[str, tuple[dict[str, Any], Object]] = {
    "defaults": ({"LimitRange": (USUAL,)}, {"cpu": "63", "memory": "500Gi"}),
    "a default of memory alone": ({"LimitRange": (limit_range(default={"memory": "4Gi"}),)}, {"memory": "500Gi"}),
    "a maximum": ({"LimitRange": (limit_range(max={"cpu": "8", "memory": "900Mi"}),)}, {"cpu": "8", "memory": "900Mi"}),
    "less than one CPU": ({"ResourceQuota": (quota(requests_cpu="1"),)}, {}),
    "a quota of limits": ({"ResourceQuota": (quota(limits_cpu="100", limits_memory="400Gi"),)}, {"cpu": "50", "memory": "200Gi"}),
    "a quota of requests": ({"ResourceQuota": (quota(requests_cpu="100"),)}, {}),
    "nothing": ({}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_discovered_file_states_limits_where_they_are_needed_and_has_nothing_to_mend(case: str) -> None:
    lists, limits = CASES[case]
    found = parse_cluster_file(discovered("c", rdma_cluster(**lists))[0], "c.yaml")
    assert found.profile.spec.resources.limits.to_dict() == limits
    assert linted(found, **lists) == []


def text_of(facts: ClusterFacts) -> str:
    return " ".join(discovered("mine", facts)[0].replace("#", " ").split())


def test_a_discovered_file_says_why_it_states_them() -> None:
    text = text_of(rdma_cluster(LimitRange=(USUAL,), ResourceQuota=(quota(limits_cpu="100"),)))
    assert (
        "limit range core limits pods that state none to cpu 500m, memory 4Gi; quota team counts limits.cpu and refuses pods that state"
        " none" in text
    )
    assert "or as much as quota team allows a pod; a choice" in text


def test_without_a_view_of_nodes_what_must_be_said_is_unknown() -> None:
    text, entries = discovered("mine", with_namespace_rights(rdma_cluster(LimitRange=(USUAL,))))
    (entry,) = [entry for entry in entries if entry.key == "resources.limits"]
    assert entry.unseen and "limit range core limits pods that state none to cpu 500m, memory 4Gi" in entry.source
    assert parse_cluster_file(text, "mine.yaml").profile.spec.resources.limits.to_dict() == {}


def test_the_header_prints_the_defaults() -> None:
    assert (
        "limit range core of namespace nccl-test: Container default cpu 500m, memory 4Gi; Container defaultRequest cpu 50m, memory 256Mi"
        in (text_of(rdma_cluster(LimitRange=(USUAL,))))
    )
