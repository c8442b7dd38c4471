"""What a node's answer becomes, and which of its ports make a rail."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.plan.cluster.hardware import NodeHardware, rdma_rails, read_hardware, socket_rails

Object = dict[str, Any]


def port(name: str, address: str, prefix: int = 24, **values: Any) -> Object:
    return {
        "name": name, "address": address, "prefix": prefix, "mtu": 1500, "gbs": None, "wireless": False, "hca": "",
            **values,
    }  # fmt: skip


def hca(device: str, gbs: float = 400.0) -> Object:
    return {"device": device, "port": 1, "gbs": gbs}


def node(*ports: Object, hcas: tuple[Object, ...] = (), **values: Any) -> NodeHardware:
    return read_hardware({"host": "h", "cores": 4.0, "ports": list(ports), "hcas": list(hcas), "tools": [], **values})


def shown(nodes: dict[int, NodeHardware], addresses: dict[int, str] | None = None) -> dict[str, list[str]]:
    return {rail.name: [end.address for _, end in sorted(rail.ends.items())] for rail in socket_rails(nodes, addresses)}


def test_interfaces_of_one_name_are_a_rail_even_where_each_node_has_its_own_subnet() -> None:
    nodes = {0: node(port("eth0", "10.244.0.3"), port("net1", "10.1.0.3")), 1: node(port("eth0", "10.244.1.3"), port("net1", "10.1.0.4"))}
    assert shown(nodes) == {"eth0": ["10.244.0.3", "10.244.1.3"], "net1": ["10.1.0.3", "10.1.0.4"]}


def test_interfaces_of_unlike_names_are_a_rail_by_their_subnet() -> None:
    nodes = {0: node(port("enp5s0", "192.168.1.4")), 1: node(port("wlp2s0", "192.168.1.5"), port("tun0", "10.8.0.2"))}
    assert shown(nodes) == {"enp5s0 / wlp2s0": ["192.168.1.4", "192.168.1.5"]} or shown(nodes) == {"192.168.1.0/24": ["192.168.1.4",
        "192.168.1.5"]}  # fmt: skip


@pytest.mark.parametrize("name", ["docker0", "br-7", "cni0", "mine0"])
def test_a_bridge_inside_of_each_node_is_no_rail(name: str) -> None:
    assert shown({0: node(port(name, "172.17.0.1")), 1: node(port(name, "172.17.0.1"))}) == {}


def test_stated_addresses_come_first() -> None:
    nodes = {0: node(port("a", "10.0.0.1"), port("c", "10.9.0.1")), 1: node(port("b", "10.0.0.2"), port("c", "10.9.0.2"))}
    assert list(shown(nodes, {0: "10.0.0.1", 1: "10.0.0.2"}).values()) == [["10.0.0.1", "10.0.0.2"], ["10.9.0.1", "10.9.0.2"]]


def test_an_rdma_rail_is_its_ports_device_with_that_ones_rate() -> None:
    nodes = {
        number: node(
            port("eth0", f"10.0.0.{number}"), port("net1", f"10.1.0.{number}", hca=f"mlx5_{number}"), hcas=(hca(f"mlx5_{number}"),)
        )
        for number in (1, 2)
    }
    (rail,) = rdma_rails(nodes, socket_rails(nodes))
    assert [(end.hca, end.address, end.gbs) for end in rail.ends.values()] == [("mlx5_1", "10.1.0.1", 400.0), ("mlx5_2", "10.1.0.2", 400.0)]
    assert rail.line_gbs(1, 2) == 400.0


def test_infiniband_without_addresses_meets_over_the_first_network() -> None:
    nodes = {number: node(port("eth0", f"10.0.0.{number}"), hcas=(hca("mlx5_0"), hca("mlx5_1", 200.0))) for number in (1, 2)}
    rails = rdma_rails(nodes, socket_rails(nodes))
    assert [(rail.name, rail.ends[1].address, rail.ends[1].gbs) for rail in rails] == [
        ("mlx5_0", "10.0.0.1", 400.0),
        ("mlx5_1", "10.0.0.1", 200.0),
    ]
    assert rdma_rails(nodes, []) == []


def test_the_line_rate_of_a_pair_is_the_slower_ports_and_else_what_a_person_states() -> None:
    nodes = {0: node(port("e", "10.0.0.1", gbs=25.0)), 1: node(port("e", "10.0.0.2", gbs=1.0)), 2: node(port("e", "10.0.0.3"))}
    (rail,) = socket_rails(nodes)
    assert (rail.line_gbs(0, 1), rail.line_gbs(0, 2), rail.line_gbs(0, 2, 10.0)) == (1.0, None, 10.0)


@pytest.mark.parametrize(
    "change",
    [{"ports": None}, {"ports": [{}]}, {"ports": [port("e", "not an address")]}, {"ports": [port("e", "10.0.0.1", prefix=99)]},
        {"hcas": [7]}, {"cores": "many"}, {"cores": float("inf")}, {"host": "x" * 201}, {"hcas": [hca("mlx5_0")] * 65}],
)  # fmt: skip
def test_what_is_no_answer_is_refused(change: Object) -> None:
    with pytest.raises(ValueError):
        node(**change)


def test_an_answer_s_words_do_not_act_on_a_terminal() -> None:
    (one,) = node(port("e\x1b[31m", "10.0.0.1")).ports
    assert one.name == "e\\x1b[31m"
