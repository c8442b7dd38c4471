"""What `lockstep cluster lint` finds: each finding at its key, with what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.plan.checks.alone import lint_alone
from lockstep.plan.checks.lint import lint_against
from lockstep.plan.cluster.facts import POD_SECURITY, ClusterFacts, Listing, Sight, Try
from lockstep.plan.cluster.finding import Finding, Outcome, line_of
from lockstep.plan.discovery.file import discovered
from lockstep.plan.discovery.rails import cluster_hardware, unused
from support.cluster_facts import (
    claim,
    namespace_seen,
    network,
    node,
    policy,
    quota,
    rail,
    rdma_cluster,
    storage_class,
    with_namespace_rights,
)

MAY = {"nccl-scc": True, "restricted-v2": True}


OPERATOR = "lockstep-operator:0.1.0"


def cluster_file(**sections: Any) -> ClusterFile:
    """The RDMA cluster's file; sections are merged into it."""
    stated: dict[str, Any] = yaml.safe_load(discovered("c", rdma_cluster())[0])
    for name, keys in sections.items():
        stated[name] = merged(stated.get(name), keys)
    return parse_cluster_file(yaml.safe_dump(stated, sort_keys=False), "c.yaml")


def merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {
            key: value
            for key, value in (old | {key: merged(old.get(key), value) for key, value in new.items()}).items()
            if value is not None
        }
    return new


def bad(findings: Any) -> list[tuple[str, str]]:
    return [(one.subject, one.outcome.value) for one in findings if one.outcome in (Outcome.FAILED, Outcome.WARNING)]


def seen(facts: ClusterFacts) -> ClusterFacts:
    return dataclasses.replace(facts, may_use_scc=MAY)


def said(findings: Any) -> str:
    return " | ".join(f"{one.message} → {one.fix}" for one in findings)


def test_what_was_discovered_has_nothing_to_mend() -> None:
    found = cluster_file()
    assert bad([*lint_alone(found, OPERATOR), *lint_against(found, seen(rdma_cluster()))]) == []


def env(name: str, value: str) -> dict[str, Any]:
    return {"nccl": {"env": [{"name": name, "value": value}]}}


def rdma(**keys: Any) -> dict[str, Any]:
    return {"network": {"rdma": keys}}


ALONE: dict[str, tuple[dict[str, Any], str, str]] = {
    "devices that aren't as many as rails": (rdma(devices="mlx5_0,mlx5_1"), "network.rdma.devices", "failed"),
    "interfaces that aren't as many as rails": (rdma(interfaces="net1"), "network.rdma.interfaces", "failed"),
    "interfaces that Multus doesn't make": (rdma(interfaces="eth0,net2,net3,net4"), "network.rdma.interfaces", "warning"),
    "no rails": (rdma(rails=None, interfaces=None), "network.rdma.rails", "warning"),
    "rails that GPUs can't share evenly": ({"gpus": {"per_node": 6}}, "network.rdma.rails", "warning"),
    "a rail without its resource": (
        rdma(rails=[{"network": "a"}, {"network": "b", "resource": "x.com/b"}], interfaces=None),
        "network.rdma.rails[0]",
        "warning",
    ),
    "an interface that no network makes": (
        rdma(rails=[{"resource": "rdma/a"}], interfaces="net1"),
        "network.rdma.interfaces",
        "failed",
    ),
    "the GID of RoCE v1": (rdma(gid_index=2), "network.rdma.gid_index", "warning"),
    "DMA-BUF switched off": (rdma(dmabuf=False), "network.rdma.dmabuf", "warning"),
    "GPUDirect switched off": (rdma(gdr_level="LOC"), "network.rdma.gdr_level", "warning"),
    "an MTU that cuts packets": ({"network": {"mtu": 1500}}, "network.mtu", "warning"),
    "RDMA switched off by a variable": (env("NCCL_IB_DISABLE", "1"), "nccl.env[0]", "failed"),
    "a list that excludes": (env("NCCL_IB_HCA", "^mlx5_"), "nccl.env[0]", "failed"),
    "a variable that hides a key": (env("NCCL_SOCKET_IFNAME", "eth0"), "nccl.env[0]", "warning"),
    "shared memory beyond the limit": ({"resources": {"limits": {"memory": "500Gi"}}, "shm_size": "500Gi"}, "shm_size", "failed"),
    "a key without effect": (
        {"cluster": {"platform": "kubernetes"}, "security": {"requires_privileged_scc": True}},
        "security.requires_privileged_scc",
        "warning",
    ),
    "the loopback": ({"network": {"tcp": {"interface_exclude": "^docker0"}}}, "network.tcp.interface_exclude", "warning"),
}


def test_beginnings_of_names_are_not_counted_against_rails() -> None:
    assert bad(lint_alone(cluster_file(**rdma(devices="mlx5")), OPERATOR)) == []


@pytest.mark.parametrize("case", ALONE)
def test_the_file_alone_shows(case: str) -> None:
    sections, key, verdict = ALONE[case]
    assert bad(lint_alone(cluster_file(**sections), OPERATOR)) == [(key, verdict)]


@pytest.mark.parametrize(("minimum", "findings"), [("150", []), ("185", [("network.minimum_busbw", "failed")])])
def test_a_threshold_beyond_what_was_measured_is_told(minimum: str, findings: list[tuple[str, str]]) -> None:
    measured = [{"transport": "RDMA", "nodes": 2, "ranks": 8, "day": "2026-11-21", "sweep": [{"bytes": 2**28, "busbw": "181"}]}]
    assert bad(lint_alone(cluster_file(network={"minimum_busbw": minimum}, calibration=measured), OPERATOR)) == findings


def test_one_resource_without_a_network_may_stand_for_all_nics() -> None:
    keys = rdma(rails=[{"resource": "rdma/a"}], interfaces="eth0", devices="mlx5_0,mlx5_1,mlx5_2,mlx5_3")
    assert bad(lint_alone(cluster_file(**keys, gpus={"per_node": 6}), OPERATOR)) == []


def test_rails_of_one_network_are_neither_counted_by_networks_nor_told_twice() -> None:
    rails = [{"network": "eno5np0-network", "resource": "openshift.io/eno5np0rdma"}] * 4
    nodes = tuple(node(name, rails=4) for name in ("a", "b"))
    found = cluster_file(**rdma(rails=rails, cross_nic=None))
    assert bad([*lint_alone(found, OPERATOR), *lint_against(found, seen(rdma_cluster(Node=nodes)))]) == []
    keys = [one.subject for one in lint_against(found, seen(rdma_cluster())) if one.subject.startswith("network.rdma.rails")]
    assert keys == ["network.rdma.rails[0].resource", "network.rdma.rails"]  # the other NICs stand idle


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"gpus": {"per_node": 2}}, ["note gpus.per_node: nodes have 4 GPUs"]),
        ({"gpus": {"per_node": 2, "default_nodes": 1}, "nodes": {"gpu_nodes": ["small"]}}, []),
        ({"network": {"mtu": None}}, ["note network.mtu: the rails have 9000"]),
        (
            rdma(rails=[{"resource": "openshift.io/eno5np0rdma"}]),
            ["note network.rdma.rails: network eno6np0-network has openshift.io/eno6np0rdma"],
        ),
        (rdma(enabled=False, rails=None), ["warning network.rdma.enabled: network eno5np0-network has openshift.io/eno5np0rdma"]),
    ],
)
def test_what_the_file_leaves_unused_is_told_of_the_nodes_that_it_names(changes: dict[str, Any], told: list[str]) -> None:
    facts = seen(rdma_cluster(Node=(node("a"), node("b"), node("c"), node("small", gpus=2))))
    spec = cluster_file(**changes).profile.spec
    lines = [f"{one.outcome.value} {one.subject}: {one.message}" for one in unused(spec, cluster_hardware(facts, spec))]
    assert [line[: len(words)] for line, words in zip(lines, told, strict=True)] == told


def test_slots_of_one_gpu_are_not_counted_as_gpus() -> None:
    nodes = tuple(node(name) for name in ("a", "b"))
    for one in nodes:
        one["metadata"]["labels"] |= {"nvidia.com/gpu.count": "1", "nvidia.com/gpu.replicas": "4"}
    findings = lint_against(cluster_file(), seen(rdma_cluster(Node=nodes)))
    (failed,) = [one.message for one in findings if one.subject == "gpus.default_nodes" and one.outcome is Outcome.FAILED]
    assert "0 of the 2 nodes" in failed and "of a, its 4 nvidia.com/gpu are slots of 1 GPU" in failed


@pytest.mark.parametrize("sight", Sight)
def test_rails_without_a_network_need_no_multus(sight: Sight) -> None:
    found, facts = cluster_file(**rdma(rails=[{"resource": "openshift.io/eno5np0rdma"}], interfaces=None)), seen(rdma_cluster())
    hidden = {**facts.lists, "NetworkAttachmentDefinition": Listing("NetworkAttachmentDefinition", sight=sight)}
    findings = list(lint_against(found, dataclasses.replace(facts, lists=hidden)))
    assert [one.outcome for one in findings if one.subject.startswith("network.rdma.rails[")] == [Outcome.OK]


def routed(number: int) -> Any:
    ipam = {"type": "whereabouts", "range": f"10.0.{number}.0/24", "routes": [{"dst": "10.0.0.0/16"}]}
    return rail(number, ipam=ipam)


def rails(**changes: Any) -> tuple[Any, ...]:
    """The four rails with one of them, eno6, changed."""
    return (rail(5), rail(6, **changes), rail(7), rail(8))


WITHOUT_NODE_B = {"Node": (node("a"),)}
CLUSTER: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "nodes that don't exist": (WITHOUT_NODE_B, {"gpus": {"default_nodes": 1}}, "nodes.gpu_nodes", "failed"),
    "too few nodes": ({"Node": (node("a"), node("b", gpus=3))}, {}, "gpus.default_nodes", "failed"),
    "nodes that differ": ({"Node": (node("a"), node("b", product="A100"))}, {}, "nodes.gpu_nodes", "warning"),
    "a rail whose network is missing": ({"NetworkAttachmentDefinition": tuple(map(rail, (5, 7, 8)))}, {}, "network.rdma.rails[1].network",
        "failed"),
    "a network that can't be read": ({"NetworkAttachmentDefinition": (*map(rail, (5, 7, 8)),
        {"metadata": {"name": "eno6np0-network", "namespace": "nccl-test"}, "spec": {"config": "{"}})}, {}, "network.rdma.rails[1].network",
            "failed"),
    "a network of another device": ({"NetworkAttachmentDefinition": (*map(rail, (5, 7, 8)),
        network("eno6np0-network", resource="x.com/y", mtu=9000))}, {}, "network.rdma.rails[1].resource", "failed"),
    "MTUs that differ": ({"NetworkAttachmentDefinition": rails(mtu=1500)}, {"network": {"mtu": None}}, "network.rdma.rails", "failed"),
    "an MTU that isn't the rails'": ({}, {"network": {"mtu": 4500}}, "network.mtu", "failed"),
    "rails in one subnet": ({"NetworkAttachmentDefinition": rails(subnet="10.0.103.0/24")}, {}, "network.rdma.rails", "failed"),
    "isolated rails": ({}, rdma(cross_nic=None), "network.rdma.cross_nic", "warning"),
    "a node without the device": ({"Node": (node("a"), node("b"), node("c", rails=0))}, {"nodes": {"gpu_nodes": ["a", "b", "c"]}},
        "network.rdma.rails[0].resource", "warning"),
    "a policy without RDMA": ({"SriovNetworkNodePolicy": (policy(5), policy(6, isRdma=False))}, {}, "network.rdma.rails[1].resource",
        "failed"),
    "a class that isn't there": ({"StorageClass": (storage_class("other", "nfs.csi.k8s.io"),)}, {}, "storage.class_rwx", "failed"),
    "a class for one node": ({"StorageClass": (storage_class("nfs", "openshift-storage.rbd.csi.ceph.com"),)}, {}, "storage.class_rwx",
        "failed"),
    "a class whose claims wait": ({"PersistentVolumeClaim": (claim("ml-dev-workspace", "nfs", "Pending"),)}, {}, "storage.class_rwx",
        "warning"),
    "no default class": ({}, {"storage": {"mode": "volumeClaimTemplates", "class_rwo": "gone"}}, "storage.class_rwo", "failed"),
    "no SCC with IPC_LOCK": ({"SecurityContextConstraints": ()}, {}, "security.ipc_lock", "failed"),
    "too small a quota for GPUs": ({"ResourceQuota": (quota(requests_nvidia_com__gpu="4"),)}, {}, "gpus.default_nodes", "failed"),
    "the wrong platform": ({}, {"cluster": {"platform": "kubernetes"}}, "cluster.platform", "warning"),
}  # fmt: skip


@pytest.mark.parametrize("case", CLUSTER)
def test_the_cluster_shows(case: str) -> None:
    lists, sections, key, verdict = CLUSTER[case]
    findings = bad(lint_against(cluster_file(**sections), seen(rdma_cluster(**lists))))
    assert (key, verdict) in findings
    assert {found for found, _ in findings} == {key} or case == "a node without the device"


MUST_STATE = 'pods "lockstep-lint-x" is forbidden: failed quota: team: must specify limits.memory for: trainer'
EXCEEDED = 'pods "lockstep-lint-x" is forbidden: exceeded quota: team, requested: pods=1, used: pods=9, limited: pods=9'


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Try(True), []),
        (Try(False, MUST_STATE), [("resources", "failed")]),
        (Try(False, EXCEEDED), []),  # what the quota has left is counted for all pods of a job
        (Try(None, "your account may not create one"), [("resources", "unknown")]),
    ],
)
def test_a_pod_that_the_api_server_refuses_is_told_in_its_words(answer: Try, expected: list[tuple[str, str]]) -> None:
    findings = list(lint_against(cluster_file(), dataclasses.replace(seen(rdma_cluster()), tries={"Pod": answer})))
    assert [(one.subject, one.outcome.value) for one in findings if one.subject == "resources"] == expected
    assert bad(findings) == [one for one in expected if one[1] != "unknown"]
    assert not expected or answer.message in said(findings)


def test_rails_with_routes_between_them_are_not_isolated() -> None:
    networks = tuple(map(routed, (5, 6, 7, 8)))
    assert bad(lint_against(cluster_file(**rdma(cross_nic=None)), seen(rdma_cluster(NetworkAttachmentDefinition=networks)))) == []


def tainted(name: str, key: str, **changes: Any) -> Any:
    return node(name, taints=[{"key": key, "effect": "NoSchedule"}], **changes)


TOLERANT = {"pod": {"tolerations": [{"key": "dedicated", "operator": "Exists"}]}}


@pytest.mark.parametrize(
    ("nodes", "sections", "expected"),
    [
        ((tainted("a", "dedicated"), tainted("b", "dedicated")), TOLERANT, []),
        ((tainted("a", "nvidia.com/gpu"), tainted("b", "nvidia.com/gpu")), {}, []),
        ((tainted("a", "node.kubernetes.io/disk-pressure"), node("b")), {}, []),
        ((node("a"), tainted("b", "dedicated")), {}, [("pod.tolerations", "warning"), ("gpus.default_nodes", "failed")]),
        ((node("a"), node("b"), tainted("c", "dedicated")), {"nodes": {"gpu_nodes": None}}, []),  # others' nodes
        (
            (node("a"), tainted("b", "dedicated"), node("c", gpus=0)),
            {"nodes": {"gpu_nodes": None}},
            [("pod.tolerations", "warning"), ("gpus.default_nodes", "failed")],
        ),
        (
            (node("a"), node("b"), tainted("m", "node-role.kubernetes.io/control-plane", gpus=0, rails=0)),
            {"nodes": {"gpu_nodes": None}},
            [],
        ),
    ],
)
def test_a_taint_that_the_profile_does_not_tolerate_keeps_jobs_off(nodes: Any, sections: Any, expected: list[tuple[str, str]]) -> None:
    findings = list(lint_against(cluster_file(**sections), seen(rdma_cluster(Node=nodes))))
    assert bad(findings) == expected
    assert ("node b has the taint dedicated:NoSchedule" in said(findings)) == bool(expected)


def test_used_quota_is_a_warning_that_it_waits() -> None:
    held = quota(requests_nvidia_com__gpu="8") | {"status": {"used": {"requests.nvidia.com/gpu": "4"}}}
    findings = list(lint_against(cluster_file(), seen(rdma_cluster(ResourceQuota=(held,)))))
    assert bad(findings) == [("gpus.default_nodes", "warning")]
    assert "4 of 8 requests.nvidia.com/gpu are used, a job of 2 nodes needs 8 more" in said(findings)


@pytest.mark.parametrize(
    ("may", "key", "verdict"),
    [({"nccl-scc": False}, "security.service_account", "failed"), (None, "security.ipc_lock", "unknown"), (MAY, "security.ipc_lock", "ok")],
)
def test_whether_the_service_account_may_use_the_scc(may: Any, key: str, verdict: str) -> None:
    facts = dataclasses.replace(rdma_cluster(), may_use_scc=may)
    assert (key, verdict) in [(one.subject, one.outcome.value) for one in lint_against(cluster_file(), facts)]


@pytest.mark.parametrize(
    ("groups", "warned"),
    [
        ({"nccl-scc": "MustRunAs"}, False),
        ({"nccl-scc": "RunAsAny"}, True),
        ({"nccl-scc": "RunAsAny", "lockstep-rdma": "MustRunAs"}, False),  # the more restrictive one counts
        ({"nccl-scc": "RunAsAny", "not-ours": "MustRunAs"}, True),
    ],
)
def test_an_scc_that_gives_rdma_pods_no_group_of_the_volumes_is_told(groups: dict[str, str], warned: bool) -> None:
    rights = {"allowedCapabilities": ["IPC_LOCK"], "runAsUser": {"type": "RunAsAny"}}
    sccs = tuple({"metadata": {"name": name}, **rights, "fsGroup": {"type": kind}} for name, kind in groups.items())
    facts = dataclasses.replace(rdma_cluster(SecurityContextConstraints=sccs), may_use_scc={name: name != "not-ours" for name in groups})
    findings = list(lint_against(cluster_file(), facts))
    assert bad(findings) == ([("security.ipc_lock", "warning")] if warned else [])
    assert ("nccl-scc gives RDMA pods no fsGroup" in said(findings)) == warned


def test_pod_security_that_refuses_ipc_lock_is_told_with_the_command() -> None:
    findings = list(
        lint_against(
            cluster_file(), dataclasses.replace(seen(rdma_cluster()), objects=namespace_seen("nccl-test", **{POD_SECURITY: "restricted"}))
        )
    )
    assert bad(findings) == [("security.ipc_lock", "failed")]
    assert "kubectl label namespace nccl-test pod-security.kubernetes.io/enforce=privileged" in said(findings)


def test_with_rights_in_one_namespace_what_may_not_be_seen_is_unknown_and_nothing_fails() -> None:
    findings = list(lint_against(cluster_file(), with_namespace_rights(rdma_cluster())))
    assert bad(findings) == []
    assert {"nodes.gpu_nodes", "storage.class_rwx", "cluster.namespace", "security.ipc_lock"} <= {
        one.subject for one in findings if one.outcome is Outcome.UNKNOWN
    }


@pytest.mark.parametrize(
    ("sight", "verdict", "words"),
    [
        (Sight.NO_SUCH_KIND, "failed", "the cluster knows no NetworkAttachmentDefinition"),
        (Sight.FORBIDDEN, "unknown", "whether the networks are there"),
    ],
)
def test_networks_that_are_not_to_be_seen(sight: Sight, verdict: str, words: str) -> None:
    facts = seen(rdma_cluster())
    hidden = {**facts.lists, "NetworkAttachmentDefinition": Listing("NetworkAttachmentDefinition", sight=sight)}
    found = [one for one in lint_against(cluster_file(), dataclasses.replace(facts, lists=hidden)) if one.subject == "network.rdma.rails"]
    assert [one.outcome.value for one in found] == [verdict] and words in found[0].message


@pytest.mark.parametrize(("there", "verdict"), [(False, "failed"), (None, "unknown")])
def test_a_namespace_that_is_not_there(there: bool | None, verdict: str) -> None:
    findings = lint_against(cluster_file(), dataclasses.replace(seen(rdma_cluster()), objects=namespace_seen("nccl-test", there)))
    assert ("cluster.namespace", verdict) in [(one.subject, one.outcome.value) for one in findings]


def test_every_failure_and_warning_says_what_to_do() -> None:
    findings: list[Finding] = []
    for sections, *_ in ALONE.values():
        findings += lint_alone(cluster_file(**sections), OPERATOR)
    for lists, sections, *_ in CLUSTER.values():
        findings += lint_against(cluster_file(**sections), seen(rdma_cluster(**lists)))
    assert [one for one in findings if one.outcome in (Outcome.FAILED, Outcome.WARNING) and not one.fix] == []


def test_a_finding_is_at_the_line_of_its_key_or_of_the_section_around_it() -> None:
    lines = {"": 1, "network": 4, "network.rdma": 5, "network.rdma.rails[0]": 7}
    assert [line_of(key, lines) for key in ("network.rdma.rails[0].network", "network.rdma.cross_nic", "image")] == [7, 5, 1]


@pytest.mark.parametrize(
    ("operator_image", "verdict", "said"),
    [
        (OPERATOR, Outcome.OK, "jobs without an image run lockstep-trainer:0.1.0, from the operator's registry"),
        ("r.example.com/t/lockstep-operator:2", Outcome.OK, "jobs without an image run r.example.com/t/lockstep-trainer:2, "),
        (
            "r.example.com/mine:1",
            Outcome.WARNING,
            "jobs without an image are refused: the operator's image r.example.com/mine:1 isn't called",
        ),
    ],
)
def test_a_file_without_an_image_says_what_runs_then(operator_image: str, verdict: Outcome, said: str) -> None:
    (found,) = [one for one in lint_alone(cluster_file(), operator_image) if one.subject == "image"]
    assert found.outcome is verdict and said in found.message


@pytest.mark.parametrize(
    ("image", "env", "said"),
    [
        ("registry.example.com/team/ml-dev-env:pytorch-2.9", [], "nothing says that registry.example.com/team/ml-dev-env:pytorch-2.9 has"),
        ("lockstep-trainer-old:1", [], "nothing says"),
        ("registry.example.com:5000/a/lockstep-trainer:0.1.0", [], ""),
        ("lockstep-trainer@sha256:" + "0" * 64, [], ""),
        ("lockstep-trainer", [], ""),
        ("base:1", [{"name": "PYTHONPATH", "value": "/opt/lockstep/code"}], ""),
    ],
)
def test_an_image_that_may_lack_the_trainer_is_noted(image: str, env: list[dict[str, str]], said: str) -> None:
    found = [one for one in lint_alone(cluster_file(image=image, pod={"env": env}), OPERATOR) if one.subject == "image"]
    assert [(one.outcome, said in one.message) for one in found] == ([(Outcome.NOTE, True)] if said else [])


def test_a_calibration_that_is_missing_is_advised_for_the_file_as_it_was_given() -> None:
    file = cluster_file(gpus={"default_nodes": 2})
    advised = [one.fix for one in lint_alone(file, OPERATOR, "'my files/a.yaml'") if one.subject == "calibration"]
    assert advised == ["lockstep cluster calibrate 'my files/a.yaml' --save"]
