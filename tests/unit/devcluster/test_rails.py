"""Rails of the embedded cluster: networks and devices as on an RDMA cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.job import TrainingJob
from lockstep.devcluster import rails
from lockstep.devcluster.binary import MULTUS_OPTIONS, MULTUS_SOURCE, source_key
from lockstep.devcluster.cluster import ClusterGoal
from lockstep.devcluster.host.layout import Layout
from lockstep.plan.cluster.railnetworks import are_isolated, read_network, stem
from lockstep.plan.render.resolve import resolve

LAYOUT = Layout("lockstep1", 1, Path("/cache"))


def test_rails_are_named_and_counted_as_on_a_real_cluster() -> None:
    assert [(rails.network_name(rail), rails.resource(rail)) for rail in (1, 4)] == [
        ("eno5np0-network", "openshift.io/eno5np0rdma"),
        ("eno8np0-network", "openshift.io/eno8np0rdma"),
    ]
    assert stem(rails.network_name(1)) == stem(rails.resource(1))


def test_each_rail_is_a_subnet_of_its_own() -> None:
    networks = [read_network(rails.attachment(LAYOUT, rail, "n")) for rail in range(1, 9)]
    assert [network.problem for network in networks] == [""] * 8
    assert are_isolated(networks) and {network.mtu for network in networks} == {9000}


def test_no_network_names_a_resource_since_no_real_plugin_has_given_out_a_device() -> None:
    assert "annotations" not in json.dumps(rails.attachment(LAYOUT, 1, "n"))


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (ClusterGoal(), None),
        (ClusterGoal(rails=2), {"openshift.io/eno5np0rdma": 1, "openshift.io/eno6np0rdma": 1}),
        (ClusterGoal(rails=0), {}),
        (ClusterGoal(rails=2, resources={0: {"a/b": 1}}), {"a/b": 1}),
    ],
)
def test_a_node_has_one_device_a_rail_unless_resources_are_said(wanted: ClusterGoal, expected: dict[str, int] | None) -> None:
    assert wanted.of_node(0) == expected


def test_the_number_of_rails_is_remembered_for_a_repair(tmp_path: Path) -> None:
    layout = Layout("x", 1, tmp_path)
    layout.state.mkdir(parents=True)
    assert rails.recorded(layout) == 0
    rails.record(layout, 4)
    assert rails.recorded(layout) == 4


def test_multus_is_built_again_when_its_module_changes(tmp_path: Path) -> None:
    before = source_key(MULTUS_SOURCE, MULTUS_OPTIONS)
    for path in MULTUS_SOURCE.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert source_key(tmp_path, MULTUS_OPTIONS) == before
    (tmp_path / "go.mod").write_bytes((MULTUS_SOURCE / "go.mod").read_bytes() + b"\n")
    assert source_key(tmp_path, MULTUS_OPTIONS) != before


@pytest.mark.parametrize(("mode", "interface"), [("RDMA", "net1"), ("TCP", None)])
def test_gloo_is_told_the_first_rail_where_rdma_is_asked(mode: str, interface: str | None) -> None:
    text = (
        "cluster: {name: c, namespace: n}\nimage: i\nsecurity: {ipc_lock: true}\nnetwork: {rdma: {enabled: true, interfaces:"
        " 'net1,net2'}}\n"
    )
    job = TrainingJob.model_validate({"metadata": {"name": "x"}, "spec": {"script": {"path": "a.py"}, "fabric": {"mode": mode}}})
    variable = resolve(job, parse_cluster_file(text, "c").profile).nccl.get("GLOO_SOCKET_IFNAME")
    assert (None if variable is None else variable.value) == interface
