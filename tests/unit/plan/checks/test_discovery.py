"""What `lockstep cluster discover` makes of a cluster: a file that is valid, with the source of every value in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.api.files.clusterkeys import KEYS
from lockstep.plan.cluster.facts import ClusterFacts, Listing, ProbeFacts, Sight
from lockstep.plan.discovery.draft import Item, stated, write
from lockstep.plan.discovery.file import discovered
from lockstep.plan.discovery.probe import probe_pods
from support.cluster_facts import GROUPS, claim, network, node, policy, quota, rail, rdma_cluster, storage_class, with_namespace_rights


def file_of(facts: ClusterFacts) -> ClusterFile:
    return parse_cluster_file(discovered("mine", facts)[0], "mine.yaml")


def text_of(facts: ClusterFacts) -> str:
    """On one line, without the comments' marks: where they are folded is no matter."""
    return " ".join(discovered("mine", facts)[0].replace("#", " ").split())


def test_an_rdma_cluster_is_described_as_people_would() -> None:
    found = file_of(rdma_cluster())
    spec = found.profile.spec
    assert (found.cluster.name, found.cluster.api, found.cluster.namespace, spec.platform.value) == (
        "mine",
        "api.example.com",
        "nccl-test",
        "OpenShift",
    )
    assert (spec.nodes.gpu_nodes, spec.gpus.per_node, spec.gpus.type, spec.gpus.default_nodes) == (
        ["a", "b"],
        4,
        "NVIDIA H100 80GB HBM3",
        2,
    )
    assert [(one.network, one.resource) for one in spec.network.rdma.rails] == [
        (f"eno{n}np0-network", f"openshift.io/eno{n}np0rdma") for n in (5, 6, 7, 8)
    ]
    assert (spec.network.rdma.interfaces, spec.network.mtu, spec.network.rdma.cross_nic) == (["net1", "net2", "net3", "net4"], 9000, 0)
    assert (spec.security.ipc_lock, spec.storage.mode.value, spec.storage.class_rwx, spec.storage.class_rwo) == (
        True,
        "Shared",
        "nfs",
        "ceph-rbd",
    )
    assert (spec.resources.requests.cpu, spec.resources.requests.memory) == ("63", "500Gi")


def test_every_value_says_where_it_came_from() -> None:
    _, entries = discovered("mine", rdma_cluster())
    assert [entry.key for entry in entries if not entry.source and entry.key != "cluster.name"] == []
    assert [
        entry.key
        for entry in entries
        if entry.key not in KEYS and not any(key.startswith(f"{entry.key}[].") or key.startswith(f"{entry.key}.") for key in KEYS)
    ] == []
    text = text_of(rdma_cluster())
    assert "SCCs that allow IPC_LOCK: nccl-scc" in text and "the network's annotation; RDMA: SR-IOV policy eno5 says isRdma: true" in text


def test_with_rights_in_one_namespace_what_may_not_be_seen_is_unknown() -> None:
    facts = with_namespace_rights(rdma_cluster())
    text, entries = discovered("mine", facts)
    unseen = {entry.key: entry.source for entry in entries if entry.unseen}
    assert {"nodes.gpu_nodes", "gpus.per_node", "gpus.type", "storage.mode", "storage.class_rwx", "pod.tolerations"} <= unseen.keys()
    assert unseen["gpus.type"] == "unknown: you may not list Node objects (403)"
    assert "which SCC allows it is unknown: you may not list SecurityContextConstraints objects (403)" in text_of(facts)
    found = parse_cluster_file(text, "mine.yaml").profile.spec
    assert (len(found.network.rdma.rails), found.nodes.gpu_nodes) == (4, [])  # networks are the namespace's, so they are seen


def test_a_cluster_without_multus_gpus_and_openshift_is_described_too() -> None:
    lists = {"Node": Listing("Node", (node("a", gpus=0, rails=0), node("b", gpus=0, rails=0)))}
    found = file_of(ClusterFacts("default", "https://10.0.0.1:6443", "v1.34.4", lists=lists)).profile.spec
    assert (found.platform.value, found.gpus.per_node, found.network.rdma.enabled, found.nodes.gpu_nodes) == ("Kubernetes", 0, False, [])


def test_nodes_that_differ_are_left_out_and_named() -> None:
    facts = rdma_cluster(
        Node=(node("a"), node("b"), node("old", gpus=8, product="Tesla-V100", rails=0), node("sick", ready=False, unschedulable=True))
    )
    assert file_of(facts).profile.spec.nodes.gpu_nodes == ["a", "b", "sick"]
    assert "old (8 × Tesla-V100)" in text_of(facts) and "sick not Ready, cordoned" in text_of(facts)


def taint(key: str, effect: str = "NoSchedule", value: str = "") -> dict[str, str]:
    return {"key": key, "effect": effect} | ({"value": value} if value else {})


def test_taints_of_all_gpu_nodes_are_tolerated_by_the_file() -> None:
    both = [taint("dedicated", value="true"), taint("team", "NoExecute"), taint("nvidia.com/gpu"), taint("slow", "PreferNoSchedule")]
    passing = taint("node.kubernetes.io/disk-pressure")
    facts = rdma_cluster(Node=(node("a", taints=[*both, taint("repair"), passing]), node("b", taints=[*both, passing]), node("c", gpus=0)))
    assert [one.to_dict() for one in file_of(facts).profile.spec.pod.tolerations] == [
        {"key": "dedicated", "operator": "Equal", "value": "true", "effect": "NoSchedule"},
        {"key": "team", "operator": "Exists", "effect": "NoExecute"},
    ]
    assert "taints of all of nodes.gpu_nodes, besides nvidia.com/gpu's" in text_of(facts) and "tainted repair:NoSchedule" in text_of(facts)


def test_without_taints_the_file_has_no_tolerations() -> None:
    assert "tolerations" not in text_of(rdma_cluster(Node=(node("a", taints=[taint("nvidia.com/gpu")]), node("b"))))


def test_all_nodes_are_listed_not_the_first_ten() -> None:
    facts = rdma_cluster(Node=tuple(node(f"n{number}") for number in range(25)))
    assert len(file_of(facts).profile.spec.nodes.gpu_nodes) == 25


def test_of_a_large_cluster_1024_nodes_are_listed_and_64_looked_at_for_three_minutes() -> None:
    facts = rdma_cluster(Node=tuple(node(f"n{number}") for number in range(1030)))
    assert [len(entry.value) for entry in discovered("mine", facts)[1] if entry.key == "nodes.gpu_nodes"] == [1024]
    pods = list(probe_pods(facts, "t", "agent:1"))
    assert len(pods) == 64 and {pod["spec"]["activeDeadlineSeconds"] for pod in pods} == {180}


@pytest.mark.parametrize(
    ("networks", "policies", "rails"),
    [
        ((network("eno5np0-network"),), (), 1),  # by its name only: as far as one can see, that is the resource
        ((network("library-net", resource="openshift.io/eno5np0rdma"),), (policy(5, isRdma=False),), 0),
        ((network("library-net"),), (), 0),  # `ib` inside of another word
        ((network("eno5np0-network", resource="openshift.io/absent"),), (), 0),
        ((), (), 0),
    ],
)
def test_a_network_is_a_rail_when_it_has_a_device_that_is_rdma(networks: Any, policies: Any, rails: int) -> None:
    facts = rdma_cluster(NetworkAttachmentDefinition=networks, SriovNetworkNodePolicy=policies)
    spec = file_of(facts).profile.spec
    assert (len(spec.network.rdma.rails), spec.network.rdma.enabled, spec.security.ipc_lock) == (rails, rails > 0, rails > 0)


def test_a_guess_is_said_to_be_one() -> None:
    assert "a guess: their names are alike" in text_of(rdma_cluster(NetworkAttachmentDefinition=(network("eno5np0-network"),)))


def test_a_network_that_can_not_be_read_does_no_harm() -> None:
    broken = {"metadata": {"name": "eno5np0-network", "namespace": "nccl-test"}, "spec": {"config": "{"}}
    assert len(file_of(rdma_cluster(NetworkAttachmentDefinition=(broken, rail(6)))).profile.spec.network.rdma.rails) == 2


def test_different_mtus_are_told_and_none_is_chosen() -> None:
    facts = rdma_cluster(NetworkAttachmentDefinition=(rail(5), rail(6, mtu=1500)))
    assert file_of(facts).profile.spec.network.mtu is None
    assert "not the same for all rails: eno5np0-network 9000, eno6np0-network 1500" in text_of(facts)


def test_shared_devices_that_need_no_network_are_shown_as_rails_to_take() -> None:
    nodes = [node(name, rails=0) for name in ("a", "b")]
    for one in nodes:
        one["status"]["allocatable"]["rdma/hca_shared_devices_a"] = "63"
    facts = rdma_cluster(NetworkAttachmentDefinition=(), Node=tuple(nodes))
    assert file_of(facts).profile.spec.network.rdma.enabled is False
    assert "- {resource: rdma/hca_shared_devices_a}" in text_of(facts)


def test_a_network_with_several_devices_a_node_may_be_listed_for_each() -> None:
    facts = rdma_cluster(NetworkAttachmentDefinition=(rail(5),), Node=(node("a", rails=8), node("b", rails=4)))
    assert "nodes have 4 of it: one entry like this for each" in text_of(facts)


def test_rails_with_routes_leave_cross_nic_to_nccl() -> None:
    routed = {"type": "whereabouts", "range": "10.0.1.0/24", "routes": [{"dst": "192.168.77.0/24"}]}
    assert file_of(rdma_cluster(NetworkAttachmentDefinition=(rail(5, ipam=routed), rail(6)))).profile.spec.network.rdma.cross_nic is None


def test_a_class_whose_shared_claims_wait_is_not_believed() -> None:
    cephfs = storage_class("cephfs", "openshift-storage.cephfs.csi.ceph.com")
    facts = rdma_cluster(StorageClass=(cephfs,), PersistentVolumeClaim=(claim("ml-dev-workspace", "cephfs", "Pending"),))
    assert file_of(facts).profile.spec.storage.mode.value == "PerPod"
    assert "ReadWriteMany claims of it wait and none is bound (ml-dev-workspace)" in text_of(facts)


def test_a_bound_shared_volume_is_better_evidence_than_the_provisioners_name() -> None:
    odd = storage_class("odd", "example.com/odd")
    facts = rdma_cluster(StorageClass=(odd,), PersistentVolume=(claim("pv-1", "odd"),))
    assert (file_of(facts).profile.spec.storage.class_rwx, "ReadWriteMany volumes of it are bound (pv-1)" in text_of(facts)) == (
        "odd",
        True,
    )


def test_a_quota_for_fewer_gpus_lowers_the_default_nodes_and_is_told() -> None:
    facts = rdma_cluster(ResourceQuota=(quota(requests_nvidia_com__gpu="4"),))
    assert file_of(facts).profile.spec.gpus.default_nodes == 1
    assert "quota team of namespace nccl-test: requests.nvidia.com/gpu 4" in text_of(facts)


def test_probe_pods_tell_what_the_api_does_not() -> None:
    probes = (ProbeFacts("a", gpus=4, hcas={"mlx5_6": "ACTIVE"}), ProbeFacts("b", gpus=4, hcas={"mlx5_6": "ACTIVE"}))
    facts = dataclasses.replace(with_namespace_rights(rdma_cluster()), probes=probes)
    spec = file_of(facts).profile.spec
    assert (spec.gpus.per_node, spec.network.rdma.memlock.value, spec.security.ipc_lock) == (4, "Unlimited", False)
    assert "devices: mlx5_6" in text_of(facts) and "Probe pods looked at a, b." in text_of(facts)


def test_an_ipv6_server_is_told_in_a_comment() -> None:
    facts = dataclasses.replace(rdma_cluster(), server="https://[fd00::1]:6443")
    assert file_of(facts).cluster.api is None


@pytest.mark.parametrize("value", ["yes", "0x10", "2e-4", "a: b", "# no", "'", '"', "^lo,docker0", "{x}", "a #b", "@x", "- x"])
def test_any_text_can_stand_in_the_file(value: str) -> None:
    text = write(
        ["x"],
        [
            stated("a.b", value, "s"),
            stated("a.c", [Item(value, "t"), Item({"k": value})], "u"),
            stated("a.d", {"k": value, "l": value}, "v"),
        ],
    )
    assert yaml.safe_load(text) == {"a": {"b": value, "c": [value, {"k": value}], "d": {"k": value, "l": value}}}


@pytest.mark.parametrize("sight", [Sight.FORBIDDEN, Sight.NO_SUCH_KIND])
@pytest.mark.parametrize("kind", sorted(rdma_cluster().lists))
def test_whatever_one_kind_hides_the_file_is_valid(kind: str, sight: Sight) -> None:
    facts = rdma_cluster()
    file_of(dataclasses.replace(facts, groups=GROUPS, lists={**facts.lists, kind: Listing(kind, sight=sight)}))


def test_no_line_is_longer_than_118_characters_and_no_comment_behind_a_value_than_72() -> None:
    entries = [stated("a.short", 1, "x" * 72), stated("a.long", 2, "x" * 73), stated("a.longer", 3, "word " * 60)]
    lines = write(["word " * 60], entries).splitlines()
    assert f"  short: 1  # {'x' * 72}" in lines and "  long: 2" in lines and "  longer: 3" in lines
    assert max(map(len, lines)) <= 118 and sum("word" in line for line in lines) == 6
