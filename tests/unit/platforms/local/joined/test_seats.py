"""Machines that may take part in a launch, the run.json of each, and their numbers under starters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.platforms.local.joined.launch import Launch
from lockstep.platforms.local.joined.machine import NodeMachine, own_address, own_addresses, parse_place, place_text, require_variables
from lockstep.platforms.local.joined.seats import Launched, refusal, rooms, run_there
from lockstep.platforms.local.joined.starters import node_number
from lockstep.platforms.onhost.look import highest_attempt
from lockstep.platforms.places.orders import Door
from lockstep_gang.contract.run import Run
from lockstep_machine.network import interface_of
from lockstep_spec.choices import StorageMode

FIRST = NodeMachine("head", "1.0", "/opt/py/bin/python3", "/data/me", "10.0.0.1", "eth0", ("0", "1"))
SECOND = NodeMachine("other", "1.0", "/home/me/venv/bin/python", "/scratch/me", "10.0.0.2", "enp5s0", ("GPU-a", "GPU-b", "GPU-c"))
TRAINING = {"model": {"name": "/workspace/models/tiny"}, "data": {"path": "/datasets/all.jsonl"}}


def launched(**spec: Any) -> Launched:
    if "script" not in spec:
        spec.setdefault("training", TRAINING)
    job = TrainingJob.model_validate(
        {
            "apiVersion": "lockstep.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "x"},
            "spec": {"nodes": 2, "gpusPerNode": 2, **spec},
        }
    )
    profile = TrainingCluster.model_validate(
        {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingCluster", "metadata": {"name": "local"}, "spec": {}}
    )
    return Launched(job, profile, 2, "uid-1", 29600)


def runs(first: NodeMachine = FIRST, second: NodeMachine = SECOND, **spec: Any) -> list[Run]:
    return [run_there(launched(**spec), [first, second], node) for node in range(2)]


def test_folders_python_interface_and_gpus_are_each_machine_s_own() -> None:
    one, two = runs()
    assert (one.run_dir, two.run_dir) == ("/data/me/workspace/runs/x", "/scratch/me/workspace/runs/x")
    assert (one.command[0], two.command[0]) == ("/opt/py/bin/python3", "/home/me/venv/bin/python")
    assert [run.training and run.training["data"]["path"] for run in (one, two)] == [
        "/data/me/datasets/all.jsonl",
        "/scratch/me/datasets/all.jsonl",
    ]
    assert [run.environment["NCCL_SOCKET_IFNAME"] for run in (one, two)] == ["=eth0", "=enp5s0"]
    assert [run.environment["GLOO_SOCKET_IFNAME"] for run in (one, two)] == ["eth0", "enp5s0"]
    assert [run.environment["CUDA_VISIBLE_DEVICES"] for run in (one, two)] == ["0,1", "GPU-a,GPU-b"]


@pytest.mark.parametrize(("stated", "storage"), [({}, None), ({"storage": {"mode": "Shared"}}, StorageMode.SHARED)])
def test_who_shares_a_folder_is_found_out_unless_the_job_demands_it(stated: dict[str, Any], storage: StorageMode | None) -> None:
    assert [run.storage for run in runs(**stated)] == [storage, storage]


def test_the_shell_of_a_machine_wins_over_the_launch_and_the_job_over_both() -> None:
    shell = replace(SECOND, variables={"NCCL_SOCKET_IFNAME": "ib0"})
    assert runs(second=shell)[1].environment["NCCL_SOCKET_IFNAME"] == "ib0"
    stated = runs(second=shell, env=[{"name": "NCCL_SOCKET_IFNAME", "value": "eth7"}])
    assert [run.environment["NCCL_SOCKET_IFNAME"] for run in stated] == ["eth7", "eth7"]


def test_a_job_that_states_no_number_takes_all_gpus_of_each_machine() -> None:
    one, two = runs(gpusPerNode=None)
    assert [run.environment["CUDA_VISIBLE_DEVICES"] for run in (one, two)] == ["0,1", "GPU-a,GPU-b,GPU-c"]
    assert [(run.gpus_per_node, run.ranks_per_node, run.node_ranks, run.world_size) for run in (one, two)] == [(3, 3, (2, 3), 5)] * 2


def test_machines_of_which_one_has_no_gpu_train_on_cpus_only_if_the_job_says_so() -> None:
    bare = replace(SECOND, gpus=())
    assert (
        refusal(launched(gpusPerNode=None), bare, FIRST, "10.0.0.2")
        == "other (10.0.0.2) has no GPU that may be used, and head (10.0.0.1) has: state gpusPerNode: 0 in the job to train on CPUs"
    )
    assert refusal(launched(gpusPerNode=0), bare, FIRST, "10.0.0.2") is None
    assert refusal(launched(gpusPerNode=None), bare, replace(FIRST, gpus=()), "10.0.0.2") is None
    assert [run.gpus_per_node for run in runs(replace(FIRST, gpus=()), bare, gpusPerNode=None, ranksPerNode=2)] == [0, 0]


def test_attempts_begin_above_those_of_every_machine(tmp_path: Path) -> None:
    assert run_there(launched(), [FIRST, SECOND], 0, 7).attempts_before == 7
    assert highest_attempt(tmp_path) == 0
    (tmp_path / "checkpoints/chain").mkdir(parents=True)
    (tmp_path / "checkpoints/step-40.a3").mkdir()
    assert highest_attempt(tmp_path) == 3
    (tmp_path / "checkpoints/chain/a5.json").touch()
    assert highest_attempt(tmp_path) == 5
    (tmp_path / "gang").mkdir()
    (tmp_path / "gang/attempts.jsonl").write_text('{"attempt": 8}\n')
    assert highest_attempt(tmp_path) == 8


def test_an_interface_that_nobody_knows_and_loopback_are_not_stated() -> None:
    assert "GLOO_SOCKET_IFNAME" not in runs(second=replace(SECOND, interface=""))[1].environment
    assert "GLOO_SOCKET_IFNAME" not in runs(first=replace(FIRST, address="127.0.0.1", interface="lo"))[0].environment


@pytest.mark.parametrize(
    ("change", "peer", "words"),
    [
        (
            {"version": "1.1"},
            "10.0.0.2",
            r"it has lockstep 1\.1, and the launch on head \(10\.0\.0\.1\) lockstep 1\.0: all machines need the same",
        ),
        ({}, "192.0.2.7", r"its address is 10\.0\.0\.2, but its connection comes from 192\.0\.2\.7"),
        ({"address": "127.0.0.1"}, "127.0.0.1", "can't reach each other"),
        ({"address": "10.0.0.1", "workspace": "/data/me"}, "10.0.0.1", "it is the machine of the launch"),
        ({"gpus": ("0",)}, "10.0.0.2", r"gpusPerNode is 2, and other \(10\.0\.0\.2\) has 1 GPU that may be used: lower gpusPerNode"),
    ],
)
def test_a_machine_that_can_not_take_part_is_told_why(change: dict[str, Any], peer: str, words: str) -> None:
    reason = refusal(launched(), replace(SECOND, **change), FIRST, peer)
    assert reason is not None
    with pytest.raises(ConfigError, match=words):
        raise ConfigError(reason)


def test_a_machine_that_can_take_part_is_not_refused() -> None:
    assert refusal(launched(), SECOND, FIRST, "10.0.0.2") is None


def test_machines_without_a_number_get_those_that_are_left() -> None:
    assert rooms([2], 4) == [1, 3]
    assert rooms([], 1) == []


def test_variables_of_the_cluster_must_be_in_the_shell() -> None:
    secret = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
    names = launched(env=[secret]).variables
    require_variables(names, {"HF_TOKEN": "x"})
    with pytest.raises(ConfigError, match="HF_TOKEN from the cluster, which is not there: set it in this shell"):
        require_variables(names, {})
    assert "HF_TOKEN" not in runs(env=[secret])[1].environment


STARTED = [
    ({"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "0", "PMIX_RANK": "1"}, 1, 2),
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "SLURM_NODEID": "0"}, 3, 4),
    ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, 0, 2),
    ({"PMIX_RANK": "1"}, 1, None),
]


@pytest.mark.parametrize(("environment", "index", "nodes"), STARTED)
def test_a_starter_says_which_node_this_is(environment: dict[str, str], index: int, nodes: int | None) -> None:
    number = node_number("auto", environment)
    assert (number.index, number.nodes) == (index, nodes)


@pytest.mark.parametrize(
    ("text", "environment", "words"),
    [
        ("auto", {}, "no starter has numbered this process"),
        ("two", {}, "--node is 'two', must be the number of this node from 0 on, or auto"),
        (
            "auto",
            {"SLURM_NODEID": "0", "SLURM_LOCALID": "3"},
            r"srun has started several processes on this node: start one a node \(--ntasks-per-node=1\)",
        ),
        ("auto", {"LSF_PM_TASKID": "1"}, r"the numbers of blaunch: let a shell on each node say --node \$\(\(LSF_PM_TASKID - 1\)\)"),
        ("auto", {"JSM_NAMESPACE_RANK": "1"}, r"the numbers of jsrun: let a shell on each node say --node \$JSM_NAMESPACE_RANK"),
        ("auto", {"PMI_RANK": "x"}, "the variable PMI_RANK is 'x'"),
    ],
)
def test_a_number_that_can_not_be_is_refused(text: str, environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        node_number(text, environment)


@pytest.mark.parametrize(
    ("text", "place"), [("10.0.0.1:29600", ("10.0.0.1", 29600)), ("[fd00::1]:7", ("fd00::1", 7)), ("head:80", ("head", 80))]
)
def test_a_place_is_an_address_and_a_port(text: str, place: tuple[str, int]) -> None:
    assert parse_place(text) == place
    assert place_text(*place) == text


@pytest.mark.parametrize("text", ["10.0.0.1", ":29600", "a:", "a:0", "a:70000", "fd00::1:29600", "a:٣"])
def test_anything_else_is_no_place(text: str) -> None:
    with pytest.raises(ConfigError, match="is no ADDRESS:PORT"):
        parse_place(text)


def test_this_machine_knows_its_addresses_and_their_interfaces() -> None:
    assert "127.0.0.1" in own_addresses() and interface_of("127.0.0.1") == "lo"
    assert own_address("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("localhost", "which no other reaches: give the address as a number"),
        ("::", "every interface"),
        ("192.0.2.9", "is no address of this machine"),
    ],
)
def test_an_address_that_others_can_not_reach_is_refused(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        own_address(host)


@pytest.mark.parametrize(("port", "words"), [(65471, "a launch takes 66 ports from 65471 on: name one up to 65470"), (65470, "192.0.2.1")])
def test_a_launch_takes_66_ports(tmp_path: Path, port: int, words: str) -> None:
    one = launched()
    with pytest.raises(ConfigError, match=words):
        Launch(cast(Any, SimpleNamespace(job=one.job)), Door(("192.0.2.1", port), "1.0"), tmp_path)
