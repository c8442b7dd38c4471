"""What is made of the nodes' answers, by table; and who is slow, by pairs. No node, no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep_gang.contract.preflight import (
    Expected,
    ExpectedPath,
    ExpectedRdma,
    Finding,
    GpuFacts,
    HcaFacts,
    Kind,
    Looked,
    Measured,
    Met,
    PathFact,
    RdmaFacts,
    VolumeFacts,
)
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.preflight.all_reduce import Measurement, busbw, judge, judge_pairs, next_pairs
from lockstep_gang.lifecycle.preflight.checks import cause_of, judge_all, skews
from lockstep_spec.choices import Severity, StorageMode
from unit.gang.cases import make_run

GIB = 1024**3
MODEL = ExpectedPath("spec.training.model.name", "/m", Kind.FOLDER)
EXPECTED = Expected(paths=(MODEL,), shm_bytes=GIB, rdma=ExpectedRdma(("mlx5_0",), 1, 3, ("net1",), 9000))
HCA = HcaFacts("mlx5_0", 1, "ACTIVE", "Ethernet", "400 Gb/sec (4X NDR)", "0000:0000:0000:0000:0000:ffff:0a00:0105", "RoCE v2")
RDMA = RdmaFacts((HCA,), (), True, 8 * 1024**2, {"net1": 9000})
GOOD = Looked(
    port=4000, paths=(PathFact("/m", "Folder"),), volume=VolumeFacts("", 100 * GIB, 0), shm_bytes=GIB, gpus=GpuFacts(4, "580.65.06"),
        rdma=RDMA,
    versions={"python": "3.11.7", "torch": "2.15.0", "numpy": "2.4.0"}, environment={"NCCL_DEBUG": "INFO"}, received_ms=1_000_000,
        sent_ms=1_000_100,
)  # fmt: skip


def run(**changes: Any) -> Run:
    given = {"nodes": 3, "gpus_per_node": 4, "ranks_per_node": 4, "storage": StorageMode.SHARED, "preflight": EXPECTED}
    return make_run(**{**given, "addresses": tuple(f"x-{node}.x-headless.ns.svc" for node in range(3)), **changes})


def found(looked: dict[str, Any] | None = None, met: Met | None = None, everywhere: bool = False, **changes: Any) -> list[Finding]:
    """What is found when node 2 (or every node) differs in this from nodes where all is well."""
    odd = replace(GOOD, **(looked or {}))
    nodes = [odd if node == 2 or everywhere else GOOD for node in range(3)]
    meetings = {0: Met(), 1: Met(sees_marker=True), 2: met or Met(sees_marker=True)}
    return judge_all(run(**changes), [(node, facts, 1000.0, 1000.1) for node, facts in enumerate(nodes)], meetings)


def test_nothing_is_found_where_all_is_well() -> None:
    assert found() == []


CASES: list[tuple[dict[str, Any], str, str, str, str]] = [
    ({"unresolved": {"x-1.x-headless.ns.svc": "Name or service not known"}}, "names", "Error", "Setup",
        "node 2 (x-2) can't resolve x-1.x-headless.ns.svc"),
    ({"port": 0}, "peers", "Error", "Fabric", "node 2 (x-2) could not open a port"),
    ({"paths": (PathFact("/m"),)}, "paths", "Error", "Configuration", "spec.training.model.name: there is no folder /m on node 2 (x-2)"),
    ({"paths": (PathFact("/m", "Folder", interpreter="bash"),)}, "paths", "Error", "Configuration",
        "spec.training.model.name: /m on node 2 (x-2) is a program of bash, which Python can't read"),
    ({"paths": (PathFact("/m", "File"),)}, "paths", "Error", "Configuration", "there is no folder /m"),
    ({"paths": (PathFact("/m", error="Stale file handle"),)}, "paths", "Error", "Configuration", "Stale file handle: /m on node 2 (x-2)"),
    ({"volume": VolumeFacts("Read-only file system")}, "writable", "Error", "Storage",
        "node 2 (x-2) can't write in /workspace/runs/x: Read-only"),
    ({"shm_bytes": GIB // 2}, "sharedMemory", "Warning", "Setup", "has 512 MiB on node 2 (x-2), the cluster asks for 1 GiB"),
    ({"gpus": GpuFacts(3, "580.65.06")}, "gpus", "Error", "Setup", "node 2 (x-2) has 3 of 4 GPUs"),
    ({"gpus": GpuFacts(4, "570.1")}, "driver", "Warning", "Setup",
        "the NVIDIA driver is 570.1 on node 2 (x-2) and 580.65.06 on other nodes"),
    ({"versions": {**GOOD.versions, "python": "3.12.1"}}, "python", "Warning", "Setup", "Python is 3.12.1 on node 2 (x-2) and 3.11.7"),
    ({"versions": {**GOOD.versions, "torch": "2.14.0"}}, "libraries", "Error", "Setup",
        "torch is 2.14.0 on node 2 (x-2) and 2.15.0 on other nodes"),
    ({"versions": {"python": "3.11.7", "torch": "2.15.0"}}, "libraries", "Warning", "Setup",
        "numpy is not installed on node 2 (x-2) and 2.4.0"),
    ({"environment": {}}, "environment", "Warning", "Setup", "NCCL_DEBUG is not set on node 2 (x-2) and 'INFO' on other nodes"),
    ({"received_ms": 1_003_000, "sent_ms": 1_003_100}, "clock", "Warning", "Setup", "the clock of node 2 (x-2) is 3.0 s ahead of node 0's"),
    ({"rdma": replace(RDMA, has_ipc_lock=False)}, "lockedMemory", "Error", "Setup", "may lock 8 MiB of memory and has no CAP_IPC_LOCK"),
    ({"rdma": replace(RDMA, hcas=())}, "hcas", "Error", "Fabric", "no mlx5_0 on node 2 (x-2); there are none"),
    ({"rdma": replace(RDMA, hcas=(replace(HCA, state="DOWN"),))}, "hcas", "Error", "Fabric",
        "port 1 of mlx5_0 is DOWN on node 2 (x-2), not ACTIVE"),
    ({"rdma": replace(RDMA, unusable=("mlx5_0",))}, "hcas", "Error", "Fabric",
        "mlx5_0 on node 2 (x-2): /dev/infiniband has no device for it"),
    ({"rdma": replace(RDMA, hcas=(replace(HCA, rate="100 Gb/sec (4X EDR)"),))}, "rates", "Warning", "Fabric",
        "mlx5_0 on node 2 (x-2): Ethernet at 100 Gb/sec (4X EDR); on other nodes Ethernet at 400 Gb/sec"),
    ({"rdma": replace(RDMA, hcas=(replace(HCA, gid=""),))}, "gids", "Error", "Fabric", "GID 3 of mlx5_0 on node 2 (x-2) is empty"),
    ({"rdma": replace(RDMA, hcas=(replace(HCA, gid_type="IB/RoCE v1"),))}, "gids", "Warning", "Fabric", "is IB/RoCE v1, not RoCE v2"),
    ({"rdma": replace(RDMA, mtus={"net1": 1500})}, "mtu", "Warning", "Fabric", "net1 on node 2 (x-2): MTU 1500, the cluster says 9000"),
    ({"volume": None, "unfinished": ("volume",)}, "writable", "Error", "Storage", "could not finish the check of writable in time"),
]  # fmt: skip


@pytest.mark.parametrize(("odd", "check", "severity", "cause", "text"), CASES, ids=[f"{case[1]}-{i}" for i, case in enumerate(CASES)])
def test_what_is_wrong_on_one_node_is_named_with_the_node(odd: dict[str, Any], check: str, severity: str, cause: str, text: str) -> None:
    (finding,) = found(odd)
    assert (finding.check, finding.severity.value, finding.node, cause_of(finding).value) == (check, severity, 2, cause)
    assert text in finding.message
    assert finding.fix


def test_images_without_a_network_plugin_for_efa_are_told_once_and_stop_nothing() -> None:
    assert found({"net_plugin": True}) == []
    (finding,) = found({"net_plugin": False}, everywhere=True)
    assert (finding.check, finding.severity.value, finding.node, cause_of(finding).value) == ("netPlugin", "Warning", None, "Setup")
    assert "on node 0 (x-0), node 1 (x-1), node 2 (x-2): over EFA" in finding.message


def test_a_node_with_folders_of_its_own_is_named_with_its_own_path() -> None:
    field = "spec.training.model.name"
    assert found({"paths": (PathFact("/home/m", "Folder", field=field),)}) == []
    (missing,) = found({"paths": (PathFact("/home/m", field=field),)})
    assert missing.message == f"{field}: there is no folder /home/m on node 2 (x-2)"
    (full,) = found({"volume": VolumeFacts("No space left on device", path="/home/runs/x")})
    assert full.message == "node 2 (x-2) can't write in /home/runs/x: No space left on device"


def test_a_variable_that_is_each_node_s_own_is_not_compared() -> None:
    odd = {"environment": {**GOOD.environment, "NCCL_SOCKET_IFNAME": "eth1"}}
    assert [finding.check for finding in found(odd)] == ["environment"]
    assert found(odd, preflight=replace(EXPECTED, own_variables=("NCCL_SOCKET_IFNAME",))) == []


def test_a_node_needs_as_many_gpus_as_it_has_ranks() -> None:
    (finding,) = found({"gpus": GpuFacts(1, "580.65.06")}, node_ranks=(4, 4, 2))
    assert finding.message == "node 2 (x-2) has 1 of 2 GPUs"
    assert found({"gpus": GpuFacts(2, "580.65.06")}, node_ranks=(4, 4, 2)) == []


def test_a_node_that_another_can_t_reach_is_named_with_the_reason() -> None:
    (finding,) = found(met=Met({"1": "Connection refused"}, True))
    assert finding.message == "node 2 (x-2) can't reach node 1 (x-1): Connection refused"


def test_a_missing_input_is_final_and_a_volume_that_stumbles_is_not() -> None:
    assert [f.final for f in found({"paths": (PathFact("/m"),)})] == [True]
    assert [f.final for f in found({"paths": (PathFact("/m", error="Stale file handle"),)})] == [False]


@pytest.mark.parametrize(("storage", "sees", "errors"), [
    (StorageMode.SHARED, True, 0), (StorageMode.SHARED, False, 1), (StorageMode.PER_POD, False, 0), (StorageMode.PER_POD, True, 1),
    (StorageMode.SHARED, None, 0), (None, True, 0),
])  # fmt: skip
def test_a_volume_must_be_shared_exactly_as_claimed(storage: StorageMode | None, sees: bool | None, errors: int) -> None:
    seen = {1: Met(sees_marker=storage is StorageMode.SHARED), 2: Met(sees_marker=sees)}
    looked = [(node, GOOD, 1000.0, 1000.1) for node in range(3)]
    findings = judge_all(run(storage=storage), looked, seen)
    assert [(f.check, f.node, f.final) for f in findings] == [("shared", 2, True)] * errors


@pytest.mark.parametrize(("free", "checkpoint", "severities"), [
    (GIB, 0, []), (GIB - 1, 0, ["Warning"]), (GIB // 8, 0, ["Error"]), (20 * GIB, 30 * GIB, ["Warning"]), (40 * GIB, 30 * GIB, []),
])  # fmt: skip
def test_free_space_is_held_against_the_newest_checkpoint(free: int, checkpoint: int, severities: list[str]) -> None:
    findings = found({"volume": VolumeFacts("", free, checkpoint)}, everywhere=True)
    assert [f.severity.value for f in findings] == severities  # one volume, told once


@pytest.mark.parametrize(
    ("rate", "slow"),
    [("400 Gb/sec (4X NDR)", 0), ("800 Gb/sec (8X NDR)", 0), ("100 Gb/sec (4X EDR)", 1), ("2.5 Gb/sec (1X SDR)", 1), ("", 0)],
)
def test_a_port_below_the_profile_s_rate_is_told_once_also_where_all_nodes_agree(rate: str, slow: int) -> None:
    preflight = replace(EXPECTED, rdma=ExpectedRdma(("mlx5_0",), rate=400))
    unused = replace(HCA, device="mlx5_9", rate="10 Gb/sec (4X SDR)")
    findings = found({"rdma": replace(RDMA, hcas=(replace(HCA, rate=rate), unused))}, everywhere=True, preflight=preflight)
    assert [(f.check, f.severity.value, f.node) for f in findings] == [("rates", "Warning", None)] * slow
    names = "node 0 (x-0), node 1 (x-1), node 2 (x-2)"
    assert all(f.message == f"port 1 of mlx5_0 on {names} at {rate}, the cluster says 400" for f in findings)
    (odd,) = found({"rdma": replace(RDMA, hcas=(replace(HCA, rate="100 Gb/sec (4X EDR)"),))}, preflight=preflight)
    assert odd.message == "port 1 of mlx5_0 on node 2 (x-2) at 100 Gb/sec (4X EDR), the cluster says 400"


@pytest.mark.parametrize(
    ("devices", "count", "slow", "says"),
    [
        (("mlx5_1",), 1, ["mlx5_1"], []),  # mlx5_10 is another device
        (("mlx5",), 3, ["mlx5_0", "mlx5_1", "mlx5_10"], []),
        (("mlx5_1", "mlx5"), 3, ["mlx5_0", "mlx5_1", "mlx5_10"], []),
        (("mlx5",), 4, ["mlx5_0", "mlx5_1", "mlx5_10"], ["3 of 4 RDMA devices can be opened on "]),
        (("mlx5_1", "rocep"), 1, ["mlx5_1", "mlx5_10"], ["no rocep on "]),
    ],
)
def test_whole_names_are_held_against_devices_and_beginnings_against_all_that_begin_so(
    devices: tuple[str, ...], count: int, slow: list[str], says: list[str]
) -> None:
    preflight = replace(EXPECTED, rdma=ExpectedRdma(devices, count, rate=800))
    there = tuple(replace(HCA, device=f"mlx5_{number}") for number in (0, 1, 10))
    findings = found({"rdma": replace(RDMA, hcas=there)}, everywhere=True, preflight=preflight)
    assert [f.message.split(" on ")[0] for f in findings if f.check == "rates"] == [", ".join(f"port 1 of {name}" for name in slow)]
    told = [f.message for f in findings if f.check == "hcas"]
    assert len(told) == len(says)
    assert all(said in message for said, message in zip(says, told, strict=True))


def test_nodes_that_could_use_rdma_and_are_to_use_tcp_are_told_once() -> None:
    preflight = replace(EXPECTED, rdma=None)
    (told,) = found(preflight=preflight)
    assert (told.check, told.severity, told.node) == ("unusedRdma", Severity.WARNING, None)
    assert told.message == "mlx5_0 on node 0 (x-0), node 1 (x-1), node 2 (x-2) could carry RDMA, and ranks use TCP"
    assert found({"rdma": replace(RDMA, unusable=("mlx5_0",))}, preflight=preflight) == []  # one node can't
    assert found(preflight=preflight, gpus_per_node=0) == []


def test_a_node_with_too_few_gpus_is_left_out_only_when_others_have_enough() -> None:
    few = {"gpus": GpuFacts(3, "580.65.06")}
    assert [f.excludes for f in found(few)] == [True]
    assert [f.excludes for f in found(few, everywhere=True)] == [False]


def test_with_two_nodes_node_zero_is_taken_for_the_usual_one() -> None:
    odd = replace(GOOD, versions={**GOOD.versions, "torch": "2.14.0"})
    pair = run(nodes=2, addresses=("x-0", "x-1"))
    findings = judge_all(pair, [(0, GOOD, 1000.0, 1000.1), (1, odd, 1000.0, 1000.1)], {1: Met(sees_marker=True)})
    assert [(f.check, f.node) for f in findings] == [("libraries", 1)]


def test_a_clock_is_judged_without_the_time_that_question_and_answer_took() -> None:
    slow_way = replace(GOOD, received_ms=1_000_500, sent_ms=1_002_500)
    assert skews([(0, GOOD, 1000.0, 1000.1), (1, slow_way, 1000.0, 1003.0)])[1] == pytest.approx(0.0, abs=0.001)


@pytest.mark.parametrize(("ahead", "checks"), [(990, []), (1010, ["clock"]), (-1010, ["clock"])])
def test_a_clock_more_than_a_second_off_is_reported(ahead: int, checks: list[str]) -> None:
    odd = {"received_ms": GOOD.received_ms + ahead, "sent_ms": GOOD.sent_ms + ahead}
    assert [finding.check for finding in found(odd)] == checks


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert busbw(Measured(microseconds=1_000_000, ranks=2, bytes=10**9)) == 10**9
    assert busbw(Measured(microseconds=1_000_000, ranks=8, bytes=10**9)) == 1_750_000_000


def search(nodes: int, bad: set[int]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(bad, unclear, rounds) of a search among nodes of which these are slow with everyone."""
    pairs: list[Measurement] = []
    rounds = 0
    while groups := next_pairs(nodes, pairs, 100, rounds):
        assert all(len(group) == 2 for group in groups)
        assert len({node for group in groups for node in group}) == 2 * len(groups), "a node is in one pair a round"
        pairs += [Measurement(group, 10 if bad & set(group) else 200) for group in groups]
        rounds += 1
    verdict = judge(nodes, pairs, 100)
    return verdict.bad, verdict.unclear, rounds


@pytest.mark.parametrize(("nodes", "bad"), [
    (3, {0}), (3, {1}), (3, {2}), (4, {0}), (4, {3}), (5, {4}), (8, {3}), (8, {0, 7}), (16, {4, 5}), (64, {17}), (1024, {1, 500, 1023}),
])  # fmt: skip
def test_pairs_name_exactly_the_bad_nodes(nodes: int, bad: set[int]) -> None:
    found, unclear, rounds = search(nodes, bad)
    assert (found, unclear) == (tuple(sorted(bad)), ())
    assert rounds <= 3


def test_the_search_ends_after_four_rounds_when_all_are_slow_and_after_one_when_none_is() -> None:
    assert search(6, set(range(6)))[0] == ()
    assert search(16, set(range(16)))[2] == 4
    assert search(6, set()) == ((), (), 1)


def test_a_bad_node_is_named_with_its_figure_and_the_profile_s() -> None:
    pairs = [Measurement((0, 1), 12_000_000_000), Measurement((0, 2), 1_500_000_000)]
    (finding,) = judge_pairs(run(), Measurement((0, 1, 2), 1_400_000_000), pairs, 10_000_000_000)
    assert (finding.node, finding.severity, finding.excludes) == (2, Severity.ERROR, True)
    assert (
        finding.message == "node 2 (x-2) is slow with every node that it was paired with (0): 1.5 GB/s busbw, the cluster asks for 10 GB/s"
    )


def test_two_nodes_are_not_told_apart() -> None:
    (finding,) = judge_pairs(run(nodes=2, addresses=("a", "b")), Measurement((0, 1), 10**9), [], 10**10)
    assert (finding.node, finding.excludes) == (None, False)
    assert "two nodes can't tell" in finding.fix


def test_without_a_threshold_only_a_failure_to_measure_is_told() -> None:
    assert judge_pairs(run(), Measurement((0, 1, 2), 10), [], None) == []
    (finding,) = judge_pairs(run(), Measurement((0, 1, 2), 0, "on node 1: not done after 60 s, in: rendezvous"), [], None)
    assert finding.severity is Severity.WARNING
