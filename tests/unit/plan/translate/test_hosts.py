"""Machines that other tools list become a cluster file of hosts, and nothing of their files is dropped silently."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.api.errors import ConfigError
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.hosts import HostsCluster
from lockstep.plan.translate.hosts import Machines, cluster_text, from_words, read_machines
from lockstep.plan.translate.leaves import leaves_of, leftover_lines

NODES = """\
cluster:
  nodes:
    - hostname: worker1
      ip: 192.168.1.101
      gpus: 8
    - hostname: master
      ip: 192.168.1.100
      gpus: 4
      rack: 7
  network:
    master_addr: 192.168.1.100
    master_port: 29500
    backend: nccl
    interface: ib0  # InfiniBand interface
model:
  name: meta-llama/Llama-2-70b-hf
  tensor_parallel_size: 8
  pipeline_parallel_size: 1
paths:
  model_cache: /shared/models
  checkpoint_dir: /shared/checkpoints
  log_dir: /shared/logs
mail: ada@example.com
"""
SSH = """\
Include ~/.ssh/more
# a comment
Host *
  ServerAliveInterval 5
Host lab0 lab0.home
  HostName 192.168.1.100
  User ada
Host=lab1
  HostName=10.1.1.1
  ProxyJump ada@bastion:22
Host bastion
  HostName 1.2.3.4
Host lab2 lab[3-9] lab10
Match host lab2 exec "true"
  User bob
"""


def cluster(machines: Machines) -> HostsCluster:
    """The hosts of the file that they become, read again."""
    file = parse_cluster_file(cluster_text("lab", "imported", machines), "lab.yaml")
    assert file.hosts is not None
    return file.hosts


def test_a_hostfile_of_deepspeed_or_mpi_names_hosts_and_their_gpus() -> None:
    text = "# two racks\nlab0\tslots=2\n\nada@lab1:3   # two\n10.0.0.7 slots = 1 max-slots=4\nplain\nlab1\n"
    machines = read_machines(text, "hostfile")
    hosts = cluster(machines).hosts
    assert [(host.name, host.user, host.address, host.gpus) for host in hosts] == [
        ("lab0", None, None, 2), ("lab1", "ada", None, 4), ("10.0.0.7", None, "10.0.0.7", 1), ("plain", None, None, None),
    ]  # fmt: skip
    assert list(leftover_lines("hostfile", machines.leftovers)) == [
        "hostfile:5: max-slots=4: a job never starts more ranks than it has GPUs or states in ranksPerNode"
    ]


def test_every_line_that_is_none_of_a_hostfile_is_named() -> None:
    with pytest.raises(ConfigError) as refused:
        read_machines("lab0 slots=2\nlab1 slots=two\nlab2 gpus=1\nlab3,lab4\n", "h")
    assert [str(line) for line in refused.value.args] == [
        "h:2: 'lab1 slots=two' is no line of a hostfile: write NAME slots=2 or NAME:2",
        "h:3: 'lab2 gpus=1' is no line of a hostfile: write NAME slots=2 or NAME:2",
        "h:4: 'lab3,lab4' is no host: write NAME, USER@NAME, or NAME:8 for one with 8 GPUs",
    ]


def test_ssh_s_configuration_names_hosts_and_keeps_what_it_says_about_them() -> None:
    machines = read_machines(SSH, "config")
    assert [(host.name, host.address, host.user) for host in cluster(machines).hosts] == [
        ("lab0", "192.168.1.100", None), ("lab1", None, None), ("lab2", None, None), ("lab10", None, None),
    ]  # fmt: skip
    listed = {(one.line, one.what) for one in machines.leftovers}
    assert listed == {
        (1, "Include ~/.ssh/more"), (3, "Host *"), (4, "ServerAliveInterval 5"), (5, "Host lab0.home"), (7, "User ada"),
        (9, "HostName 10.1.1.1"), (10, "ProxyJump ada@bastion:22"), (11, "Host bastion"), (13, "Host lab[3-9]"),
            (14, 'Match host lab2 exec "true"'),
        (15, "User bob"),
    }  # fmt: skip


def test_a_config_with_nodes_gives_hosts_addresses_gpus_interface_ports_and_folder() -> None:
    machines = read_machines(NODES, "config.yaml")
    hosts = cluster(machines)
    assert [(host.name, host.address, host.gpus, host.interface, host.workspace) for host in hosts.hosts] == [
        ("master", "192.168.1.100", 4, "ib0", "/shared"), ("worker1", "192.168.1.101", 8, "ib0", "/shared"),
    ]  # fmt: skip
    assert hosts.port_range == (29500, 29599)


def test_folders_on_one_line_have_one_workspace_too() -> None:
    machines = read_machines("cluster:\n  nodes: [a, b]\npaths: {data: /shared/data, models: /shared/models}\n", "c")
    assert [host.workspace for host in cluster(machines).hosts] == ["/shared", "/shared"]


def test_every_value_of_a_config_with_nodes_is_taken_over_or_listed() -> None:
    machines = read_machines(NODES, "config.yaml")
    text = cluster_text("lab", "imported", machines)
    for leaf in leaves_of(NODES, "config.yaml"):
        listed = any(one.line == leaf.line and one.what == f"{leaf.path}: {leaf.value}" for one in machines.leftovers)
        assert listed or str(leaf.value) in text, leaf
    assert "config.yaml:9: cluster.nodes[1].rack: 7: hosts has no such key" in leftover_lines("config.yaml", machines.leftovers)
    assert "config.yaml:23: mail: ada@example.com: a cluster file of hosts has nothing like it" in leftover_lines(
        "config.yaml", machines.leftovers
    )


@pytest.mark.parametrize(
    ("network", "listed"),
    [
        ("master_addr: 10.9.9.9", "no node is there; the first of hosts has the coordinator"),
        ("master_port: 65530", "is no port from 1024 to 65436; ports names a range"),
    ],
)
def test_what_can_not_be_taken_over_says_why(network: str, listed: str) -> None:
    machines = read_machines(f"cluster:\n  nodes: [a, b]\n  network: {{{network}}}\n", "c")
    assert cluster(machines).names == ["a", "b"]
    assert [one.reason for one in machines.leftovers] == [listed]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: lists no host"),
        ("Host *\n  User x\n", "f:1: Host *: a pattern, and no host"),
        ("cluster:\n  name: x\n", "f: is no list of machines"),
        ("cluster:\n  nodes:\n    - gpus: 2\n", "f: cluster.nodes[0] has neither a hostname nor an ip"),
        ("cluster:\n  nodes:\n    - {hostname: a, hostname: b}\n", "duplicate key"),
        ("cluster:\n\t- x\n", "is not valid YAML"),
    ],
)
def test_a_file_without_hosts_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_machines(text, "f")
    assert message in str(refused.value)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A good file with a piece cut out or put in."""
    text = draw(st.sampled_from([NODES, SSH, "lab0 slots=2\nlab1:4\n"]))
    at, length = draw(st.integers(0, len(text))), draw(st.integers(0, 20))
    return (
        text[:at]
        + draw(st.sampled_from(["", "\n", ":", "[", "null", "\x00", "é", "- ", "Host ", "slots=", "{}", '"']))
        + text[at + length :]
    )


@settings(max_examples=200)
@given(damaged())
def test_a_damaged_file_becomes_a_cluster_file_or_an_error(text: str) -> None:
    try:
        parse_cluster_file(cluster_text("lab", "imported", read_machines(text, "f")), "lab.yaml")
    except ConfigError as error:
        assert all(str(line).startswith(("f:", "lab.yaml:", "f.")) for line in error.args)


def test_hosts_are_taken_as_they_are_typed() -> None:
    hosts = cluster(from_words(["lab0", "ada@192.168.1.101", "bob@lab2:8"])).hosts
    assert [(host.name, host.user, host.gpus, host.address) for host in hosts] == [
        ("lab0", None, None, None), ("192.168.1.101", "ada", None, "192.168.1.101"), ("lab2", "bob", 8, None),
    ]  # fmt: skip
    for word in ("lab0:ssh", "lab0:²", "lab0:", "a b"):
        with pytest.raises(ConfigError, match=f"'{word}' is no host"):
            from_words([word])


@pytest.mark.parametrize("read", [lambda word: from_words([word]), lambda word: read_machines(word, "h")], ids=["typed", "hostfile"])
def test_a_number_behind_a_name_is_that_of_its_slots_and_a_port_has_another_place(read: Callable[[str], Machines]) -> None:
    assert [(host.name, host.gpus, host.port) for host in cluster(read("ada@lab0:8")).hosts] == [("lab0", 8, None)]
    for word in ("lab0:2222", "ada@lab0:22"):
        with pytest.raises(ConfigError, match=rf"'{word}': the number .* at most 64; a port, such as 22, has its place in ~/.ssh/config"):
            read(word)


def test_slots_of_a_hostfile_are_refused_in_the_words_of_its_line() -> None:
    assert [host.gpus for host in cluster(read_machines("lab0 slots=22\nlab1 slots=64\n", "h")).hosts] == [22, 64]
    with pytest.raises(ConfigError) as refused:
        read_machines("lab0:4 slots=8\nlab1 slots=65\n", "h")
    assert [str(line) for line in refused.value.args] == [
        "h:1: 'lab0:4 slots=8' is no line of a hostfile: write NAME slots=2 or NAME:2",
        "h:2: 'lab1 slots=65': a host has at most 64 slots, one for each of its GPUs",
    ]


def test_only_the_chosen_hosts_are_taken_in_their_order() -> None:
    machines = read_machines("a\nb\nc slots=1\n", "h")
    assert cluster(machines.only(["c", "a", "c"])).names == ["c", "a"]
    with pytest.raises(ConfigError, match="there is no host d; there are a, b, c"):
        machines.only(["d"])


def test_a_file_in_which_no_host_has_an_address_says_that_one_needs_it() -> None:
    assert "address: 192.168.1.100" in cluster_text("lab", "x", from_words(["a", "b"])).replace("\n# ", " ")
    assert "address: 192.168.1.100" not in cluster_text("lab", "x", from_words(["a", "10.0.0.1"])).replace("\n# ", " ")


def test_a_file_of_hosts_says_that_rdma_is_off_and_how_to_use_it() -> None:
    text = cluster_text("lab", "x", from_words(["a", "10.0.0.1"]))
    assert "ranks send over TCP" in text and "    # enabled: true\n" in text
    assert parse_cluster_file(text, "lab.yaml").profile.spec.network.rdma.enabled is False
