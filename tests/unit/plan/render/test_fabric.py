"""NCCL's variables: only what job or cluster state; and what RDMA asks of a pod."""

from __future__ import annotations

from typing import Any

import pytest

from golden.plan_cases import (
    CONTEXT,
    cluster,
    job,
    of_kind,
    profile,
    rdma_profile,
    trainer_of,
    variables_of,
)
from lockstep.api.cluster import TrainingCluster
from lockstep.api.job import TrainingJob
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import resolve


def objects(a_job: TrainingJob, a_profile: TrainingCluster) -> list[dict[str, Any]]:
    return render(resolve(a_job, a_profile), CONTEXT)


def nccl(a_job: TrainingJob, a_profile: TrainingCluster) -> dict[str, str]:
    return {name: value for name, value in variables_of(objects(a_job, a_profile)).items() if name.startswith("NCCL_")}


def test_tcp_sets_three_variables_and_no_more() -> None:
    assert nccl(job(gpusPerNode=4), profile(network={"tcp": {"p2pLevel": "NVL"}})) == {
        "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "^lo,docker0", "NCCL_P2P_LEVEL": "NVL",
    }  # fmt: skip


def test_rdma_sets_nothing_that_the_profile_does_not_state() -> None:
    assert nccl(job(), rdma_profile()) == {}


@pytest.mark.parametrize(
    ("knob", "value", "name", "expected"),
    [
        ("devices", ["mlx5_6", "mlx5_7"], "NCCL_IB_HCA", "=mlx5_6,mlx5_7"),  # exactly these: a bare mlx5_1 is mlx5_10, too
        ("devices", ["mlx5_0:1", "mlx5_bond_0"], "NCCL_IB_HCA", "=mlx5_0:1,mlx5_bond_0"),
        ("devices", ["mlx5"], "NCCL_IB_HCA", "mlx5"),  # a beginning stays one
        ("devices", ["mlx5_1", "rocep:1"], "NCCL_IB_HCA", "mlx5_1,rocep:1"),
        ("interfaces", ["net1", "net2"], "NCCL_SOCKET_IFNAME", "net1,net2"),
        ("gidIndex", 0, "NCCL_IB_GID_INDEX", "0"),
        ("gdrLevel", "SYS", "NCCL_NET_GDR_LEVEL", "SYS"),
        ("crossNic", 0, "NCCL_CROSS_NIC", "0"),
        ("ibTimeout", 22, "NCCL_IB_TIMEOUT", "22"),
        ("minNchannels", 4, "NCCL_MIN_NCHANNELS", "4"),
        ("dmabuf", False, "NCCL_DMABUF_ENABLE", "0"),
        ("dmabuf", True, "NCCL_DMABUF_ENABLE", "1"),
    ],
)
def test_each_stated_rdma_knob_sets_its_variable(knob: str, value: object, name: str, expected: str) -> None:
    assert nccl(job(), rdma_profile(**{knob: value})) == {name: expected}


def test_efa_is_reached_by_libfabric_and_what_is_infinibands_is_left_out_and_said() -> None:
    stated = rdma_profile(devices=["mlx5"], gidIndex=3, crossNic=1, rails=[{"resource": "vpc.amazonaws.com/efa"}] * 2)
    variables = variables_of(objects(job(), stated))
    assert {name: value for name, value in variables.items() if name.startswith(("NCCL_", "FI_"))} == {
        "FI_PROVIDER": "efa",
        "NCCL_CROSS_NIC": "1",
    }
    assert [one.reason for one in resolve(job(), stated).warnings] == ["VariableIgnored"]
    assert resolve(job(), rdma_profile(rails=[{"resource": "vpc.amazonaws.com/efa"}])).warnings == ()


def test_cpu_ranks_get_no_nccl_variables_of_the_clusters() -> None:
    stated = {"nccl": {"debug": "INFO", "env": [{"name": "NCCL_ALGO", "value": "Ring"}]}}
    assert nccl(job(gpusPerNode=0), profile(**stated)) == {}


def test_the_jobs_variables_win_over_the_profiles_list_and_that_over_its_knobs() -> None:
    stated = {"nccl": {"env": [{"name": "NCCL_CROSS_NIC", "value": "list"}, {"name": "NCCL_ALGO", "value": "list"}]}}
    env = [{"name": "NCCL_ALGO", "value": "job"}]
    expected = {"NCCL_ALGO": "job", "NCCL_CROSS_NIC": "list", "NCCL_IB_TIMEOUT": "20"}
    assert nccl(job(env=env), rdma_profile(crossNic=1, ibTimeout=20, spec=stated)) == expected


def test_rails_become_networks_and_resources_of_every_rdma_pod() -> None:
    made = objects(job(), cluster("barcelona"))
    (stateful_set,) = of_kind(made, "StatefulSet")
    resources = trainer_of(made)["resources"]
    rails = {f"openshift.io/eno{i}np0rdma": "1" for i in (5, 6, 7, 8)}
    annotations = stateful_set["spec"]["template"]["metadata"]["annotations"]
    assert annotations["k8s.v1.cni.cncf.io/networks"] == "eno5np0-network,eno6np0-network,eno7np0-network,eno8np0-network"
    assert {key: resources["limits"][key] for key in rails} == {key: resources["requests"][key] for key in rails} == rails


def test_two_rails_of_one_resource_are_counted() -> None:
    rails = [{"network": "a", "resource": "x.io/nic"}, {"network": "b", "resource": "x.io/nic"}]
    assert trainer_of(objects(job(), rdma_profile(rails=rails)))["resources"]["limits"]["x.io/nic"] == "2"


def annotations_of(made: list[dict[str, Any]]) -> dict[str, str]:
    (stateful_set,) = of_kind(made, "StatefulSet")
    return dict(stateful_set["spec"]["template"]["metadata"]["annotations"])


def test_one_network_may_attach_several_nics() -> None:
    made = objects(job(), rdma_profile(rails=[{"network": "ib-net", "resource": "x.io/ib"}] * 3))
    assert annotations_of(made)["k8s.v1.cni.cncf.io/networks"] == "ib-net,ib-net,ib-net"
    assert trainer_of(made)["resources"]["limits"]["x.io/ib"] == "3"


def test_a_device_plugin_without_networks_brings_the_resource_and_leaves_the_annotation_to_the_job() -> None:
    rails = [{"resource": "rdma/hca_shared_devices_a"}]
    own = job(podTemplate={"annotations": {"k8s.v1.cni.cncf.io/networks": "storage"}})
    made = objects(own, rdma_profile(rails=rails))
    assert trainer_of(made)["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"
    assert annotations_of(made)["k8s.v1.cni.cncf.io/networks"] == "storage"
    assert list(annotations_of(objects(job(), rdma_profile(rails=rails)))) == [
        "kubectl.kubernetes.io/default-container",
        "lockstep.dev/run-hash",
    ]


def test_rails_without_a_network_make_no_interface_for_others_to_be_counted_by() -> None:
    rails = [{"resource": "rdma/a"}, {"network": "b"}, {"resource": "rdma/c"}, {"network": "ns/d"}]
    assert annotations_of(objects(job(), rdma_profile(rails=rails)))["k8s.v1.cni.cncf.io/networks"] == "b,ns/d"


def test_a_tcp_job_leaves_the_rails_to_others() -> None:
    made = objects(job(fabric={"mode": "TCP"}), cluster("barcelona"))
    (stateful_set,) = of_kind(made, "StatefulSet")
    assert list(stateful_set["spec"]["template"]["metadata"]["annotations"]) == [
        "kubectl.kubernetes.io/default-container",
        "lockstep.dev/run-hash",
    ]
    assert sorted(trainer_of(made)["resources"]["limits"]) == ["cpu", "memory", "nvidia.com/gpu"]


def test_the_rails_mtu_is_told_to_rdma_ranks_only() -> None:
    rdma, tcp = (variables_of(objects(job(fabric={"mode": mode}), cluster("barcelona"))) for mode in ("RDMA", "TCP"))
    assert (rdma.get("LOCKSTEP_RAIL_MTU"), tcp.get("LOCKSTEP_RAIL_MTU")) == ("9000", None)
