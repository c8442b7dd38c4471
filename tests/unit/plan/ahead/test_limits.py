"""What LimitRanges and quotas make of pods that state no limit: lint and plan say it before the API server does, and a discovered file states what is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from golden.plan_cases import job, profile
from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.plan.ahead import planned
from lockstep.plan.checks.cluster import lint_against
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.limitrange import as_admitted
from lockstep.plan.cluster.lookahead import Around, Line, Outcome
from lockstep.plan.cluster.seen import Verdict
from lockstep.plan.discovery.file import discovered
from lockstep.plan.render.resolve import PlatformDefaults, resolve
from support.cluster_facts import quota, rdma_cluster, with_namespace_rights

Object = dict[str, Any]


def limit_range(**rule: Any) -> Object:
    return {"metadata": {"name": "core"}, "spec": {"limits": [{"type": "Container"} | rule]}}


USUAL = limit_range(default={"cpu": "500m", "memory": "4Gi"}, defaultRequest={"cpu": "50m", "memory": "256Mi"})
"""As OpenShift's project templates often have it."""


def pod(requests: Object | None = None, limits: Object | None = None, **more: Object) -> Object:
    return {"spec": {"containers": [{"name": "trainer", "resources": {"requests": requests or {}, "limits": limits or {}}}], **more}}


@pytest.mark.parametrize(
    ("rule", "stated", "expected"),
    [
        ({"default": {"cpu": "2"}}, {}, ({"cpu": "2"}, {"cpu": "2"})),  # a default limit is the default request, too
        ({"default": {"cpu": "2"}, "defaultRequest": {"cpu": "1"}}, {}, ({"cpu": "1"}, {"cpu": "2"})),
        ({"max": {"cpu": "8"}}, {}, ({"cpu": "8"}, {"cpu": "8"})),  # and so is a maximum
        ({"min": {"cpu": "1"}}, {}, ({"cpu": "1"}, {})),
        ({"default": {"cpu": "2"}}, {"requests": {"cpu": "1"}}, ({"cpu": "1"}, {"cpu": "2"})),
        ({"default": {"cpu": "2"}, "defaultRequest": {"cpu": "1"}}, {"limits": {"cpu": "9"}}, ({"cpu": "9"}, {"cpu": "9"})),
        ({"type": "Pod", "max": {"cpu": "8"}}, {}, ({}, {})),
    ],
)
def test_a_pod_is_completed_as_the_api_server_does(rule: Object, stated: Object, expected: tuple[Object, Object]) -> None:
    done, _ = as_admitted(pod(**stated), [limit_range(**rule)])
    resources = done["spec"]["containers"][0]["resources"]
    assert (resources["requests"], resources["limits"]) == expected


def cluster_file(**resources: Any) -> ClusterFile:
    stated: Object = yaml.safe_load(discovered("c", rdma_cluster())[0])
    stated["resources"] = resources
    return parse_cluster_file(yaml.safe_dump(stated), "c.yaml")


def linted(found: ClusterFile, **lists: Any) -> list[tuple[str, str, str]]:
    facts = dataclasses.replace(rdma_cluster(**lists), may_use_scc={"nccl-scc": True})
    bad = [one for one in lint_against(found, facts) if one.verdict in (Verdict.FAILED, Verdict.WARNING)]
    assert all(one.fix for one in bad)
    return [(one.key, one.verdict.value, one.said) for one in bad]


HALF = {"requests": {"cpu": "63", "memory": "500Gi"}}


def test_lint_says_that_a_request_above_the_default_limit_is_refused_and_with_which_sentence() -> None:
    assert linted(cluster_file(**HALF), LimitRange=(USUAL,)) == [
        ("resources.limits.cpu", "failed", 'LimitRange core limits container trainer, which states no limit, to 500m cpu, and it requests 63: pods would be refused with "must be less than or equal to cpu limit of 500m"'),
        ("resources.limits.memory", "failed", 'LimitRange core limits container trainer, which states no limit, to 4Gi memory, and it requests 500Gi: pods would be refused with "must be less than or equal to memory limit of 4Gi"'),
    ]  # fmt: skip


def test_lint_warns_of_a_limit_that_nobody_has_stated() -> None:
    assert linted(cluster_file(), LimitRange=(USUAL,)) == [
        ("resources.limits.cpu", "warning", "it states no limit, and LimitRange core then limits every pod to 500m cpu: its ranks are throttled there"),
        ("resources.limits.memory", "warning", "it states no limit, and LimitRange core then limits every pod to 4Gi memory: what takes more is killed (OOMKilled)"),
    ]  # fmt: skip


def test_who_states_limits_is_told_nothing() -> None:
    assert linted(cluster_file(**HALF, limits={"cpu": "63", "memory": "500Gi"}), LimitRange=(USUAL,)) == []


def test_a_default_limit_is_what_a_quota_counts() -> None:
    """Without the range the quota would refuse a pod that states none; with it, two pods of 4Gi are too many for 6Gi."""
    counted = {"ResourceQuota": (quota(limits_memory="6Gi"),)}
    ((key, verdict, said),) = linted(cluster_file(), **counted)
    assert (key, verdict) == ("resources.limits.memory", "failed") and "counts limits.memory, so every pod must state it" in said
    found = linted(cluster_file(), LimitRange=(limit_range(default={"memory": "4Gi"}),), **counted)
    assert ("resources.limits.memory", "failed", "a job of 2 nodes needs 8Gi limits.memory, quota team gives 6Gi") in found


def test_a_quota_of_another_scope_counts_nothing() -> None:
    timed = quota(limits_memory="1Gi")
    timed["spec"]["scopes"] = ["Terminating"]
    assert linted(cluster_file(), ResourceQuota=(timed,)) == []


def test_what_lockstep_s_own_init_container_states_is_checked_too() -> None:
    ((key, verdict, said),) = linted(cluster_file(**HALF), LimitRange=(limit_range(min={"memory": "1Gi"}),))
    assert (key, verdict) == ("cluster.namespace", "failed")
    assert said == 'LimitRange core wants at least 1Gi memory, container agent has 64Mi: pods would be refused with "minimum memory usage per Container is 1Gi, but request is 64Mi"'  # fmt: skip


def planned_lines(resources: Object, ranges: tuple[Object, ...] = (), quotas: tuple[Object, ...] = ()) -> list[Line]:
    given = profile(platform="Kubernetes", gpus={"perNode": 4}, storage={"classRwx": "nfs"}, image="trainer:1", resources=resources)
    resolved = resolve(job(nodes=2), given, PlatformDefaults(namespace="team"))
    sample = planned.samples(resolved, resolved.job)[1]
    sizes = {"nvidia.com/gpu": "4", "cpu": "64", "memory": "512Gi", "pods": "110"}
    nodes = tuple(
        {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}, "spec": {}, "status": {"allocatable": sizes}}
        for name in ("a", "b")
    )
    seen = Around("team", namespace_labels={}, nodes=nodes, pods=(), own_pods=(), quotas=quotas, ranges=ranges, claims=(), classes=())
    return list(planned.cluster_lines(resolved, sample, seen))


def said(found: list[Line], outcome: Outcome) -> list[str]:
    return [line.said for line in found if line.section == "quota" and line.outcome is outcome]


def test_a_plan_says_with_which_sentence_the_pod_would_be_refused() -> None:
    found = planned_lines({"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"cpu": "8"}}, (USUAL,))
    assert said(found, Outcome.REFUSED) == [
        'LimitRange core limits container trainer, which states no limit, to 4Gi memory, and it requests 64Gi: refused with "must be less than or equal to memory limit of 4Gi"'
    ]  # fmt: skip
    assert said(found, Outcome.NOTE) == []


def test_a_plan_says_how_far_a_pod_is_limited_that_states_nothing() -> None:
    found = planned_lines({}, (USUAL,))
    assert said(found, Outcome.REFUSED) == []
    assert said(found, Outcome.NOTE) == [
        "LimitRange core limits container trainer, which states no limit, to 500m cpu (it is throttled there), 4Gi memory (what takes more is killed, OOMKilled)"
    ]  # fmt: skip


def test_a_default_request_counts_where_nodes_are_looked_for() -> None:
    waits = [line.said for line in planned_lines({}, (limit_range(default={"cpu": "65"}),)) if line.outcome is Outcome.WAITS]
    assert any("nodes that the job needs fit now" in text for text in waits)


def test_a_pod_s_maximum_is_refused_where_none_of_it_is_stated() -> None:
    rule = limit_range(type="Pod", max={"ephemeral-storage": "1Ti"})
    assert said(planned_lines({}, (rule,)), Outcome.REFUSED) == [
        'LimitRange core allows at most 1Ti ephemeral-storage, a pod states no limit: refused with "maximum ephemeral-storage usage per Pod is 1Ti.  No limit is specified"'
    ]  # fmt: skip


def test_a_plan_says_what_a_quota_wants_stated_and_that_the_init_container_states_it() -> None:
    counting = {"metadata": {"name": "q"}, "spec": {"hard": {"limits.cpu": "99", "limits.memory": "999Gi", "requests.cpu": "99"}}}
    found = said(planned_lines({"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}, quotas=(counting,)), Outcome.REFUSED)
    assert found == ['quota q counts limits.cpu, so every container must state it: refused with "failed quota: q: must specify limits.cpu for: trainer"']  # fmt: skip


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
        "limit range core limits pods that state none to cpu 500m, memory 4Gi; quota team counts limits.cpu and refuses pods that state none"
        in text
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
