"""Preflight between real agents on loopback: what is wrong on one node is named, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.agent.preflight import answers, network
from lockstep_gang.agent.preflight.programs import AllReduceRanks
from lockstep_gang.contract.preflight import (
    PREFLIGHT_RESULT,
    Check,
    Checked,
    Expected,
    ExpectedPath,
    Group,
    Kind,
    PreflightReport,
    SelfTest,
    Stage,
)
from lockstep_gang.contract.run import RestartPolicy, run_text
from lockstep_spec.choices import StorageMode
from lockstep_spec.codec import from_json
from unit.gang.cases import KEY, Gang, gang, make_run
from unit.virtual_time import VirtualClock

PROOF_BYTES_MAX = 8 * 1024

SAY = 'import os\nprint("rank", os.environ["RANK"], "runs", flush=True)\n'
RIGHT_TORCH = """
class Right:
    type, index = "cpu", 0
    __int__ = lambda self: 0
    __getattr__ = __call__ = __matmul__ = __mod__ = __getitem__ = __eq__ = __ne__ = lambda self, *given, **named: self
def __getattr__(name): return Right()
"""
"""Stand-in for torch, of whose numbers none is wrong. Its import takes no seconds."""


def result(agents: Gang) -> PreflightReport:
    line = next(line for line in agents.log().splitlines() if PREFLIGHT_RESULT in line)
    return from_json(PreflightReport, json.loads(line.partition(PREFLIGHT_RESULT)[2]), "result")


def start(agents: Gang, *, node_1: dict[str, Any] | None = None, **changes: Any) -> None:
    """Two agents; node 1 reads a run.json of its own where `node_1` says how it differs."""
    run = agents.write(SAY, **changes)
    agents.start(0)
    if node_1 is None:
        agents.start(1)
        return
    path = agents.folder / "run-1.json"
    path.write_text(run_text(replace(run, **node_1)))
    agents.start(1, run_path=path)


def test_the_all_reduce_has_a_process_for_each_gpu_of_nodes_with_unlike_numbers_of_them() -> None:
    run = make_run(nodes=3, ranks_per_node=2, gpus_per_node=2, node_ranks=(2, 1, 2))
    group = Group((2, 1), 29500, 60)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GPUS_PER_NODE")
    environments = [AllReduceRanks(run, node, group).environment(local) for node, local in ((2, 0), (2, 1), (1, 0))]
    assert [[environment[name] for name in names] for environment in environments] == [list("00232"), list("11232"), list("20131")]


@pytest.mark.parametrize(("environment", "has"), [({}, None), ({"FI_PROVIDER": "efa"}, False)])
def test_a_network_plugin_is_looked_for_where_pods_have_efa(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], has: bool | None
) -> None:
    monkeypatch.setattr(answers.facts, "has_net_plugin", lambda variables: variables["FI_PROVIDER"] != "efa")
    run = make_run(environment=environment, preflight=Expected(), run_dir=str(tmp_path))

    async def look() -> Checked:
        answer = asyncio.get_running_loop().create_future()
        node = answers.NodePreflight(run, KEY, 0, answer.set_result)
        node.take(Check(1, Stage.LOOK, "t"))
        try:
            return await answer
        finally:
            node.end()

    looked = asyncio.run(look()).looked
    assert looked is not None and looked.net_plugin is has


def test_ranks_start_after_a_preflight_that_says_one_line(agents: Gang) -> None:
    start(agents, preflight=Expected(), storage=StorageMode.SHARED)
    assert agents.codes() == [0, 0]
    (line,) = [line for line in agents.log().splitlines() if "preflight" in line]
    assert line.startswith("[lockstep] preflight: 10 checks on 2 nodes passed in ")
    assert agents.log().index("preflight") < agents.log().index("attempt 1 starts")
    assert not list((agents.folder / "run/gang").glob(".preflight*"))


def test_a_script_s_ranks_begin_after_the_self_test(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(RIGHT_TORCH)
    with gang(tmp_path, python_options=()) as agents:  # which finds torch among the packages
        agents.write(SAY, preflight=Expected(self_test=SelfTest("FP32")), environment={"PYTHONPATH": str(tmp_path)})
        agents.run(codes=[0, 0])
    assert agents.log().index("; 2 CPUs compute right, ") < agents.log().index("[rank 0] rank 0 runs")


def test_data_that_is_missing_on_one_node_is_named_with_the_node_and_no_attempt_is_spent(agents: Gang) -> None:
    (agents.folder / "all.jsonl").touch()
    (agents.folder / "other").mkdir()
    expected = Expected(paths=(ExpectedPath("spec.training.data.path", "all.jsonl", Kind.FILE),))
    start(agents, preflight=expected, node_1={"working_directory": str(agents.folder / "other")})
    assert agents.codes() == [1, 1]
    end = agents.record("end.json")
    assert (end["attempt"], end["state"], end["failure"]["node"], end["failure"]["cause"]) == (0, "Failed", 1, "Configuration")
    assert end["message"].startswith("preflight: spec.training.data.path: there is no file all.jsonl on node 1: put it there")
    assert "runs" not in agents.log(0)


def test_a_folder_that_is_said_to_be_shared_and_is_not_stops_the_start(agents: Gang) -> None:
    start(agents, preflight=Expected(), storage=StorageMode.SHARED, node_1={"run_dir": str(agents.folder / "run-1")})
    assert agents.codes() == [1, 1]
    failure = agents.record("end.json")["failure"]
    assert (failure["node"], failure["cause"]) == (1, "Storage")
    assert "node 1 does not see what node 0 writes" in failure["message"]


def test_a_shared_folder_that_is_said_to_be_each_node_s_own_stops_the_start(agents: Gang) -> None:
    start(agents, preflight=Expected(), storage=StorageMode.PER_POD)
    assert agents.codes() == [1, 1]
    assert "node 1 sees what node 0 writes" in agents.record("end.json")["message"]


def test_a_difference_between_the_nodes_variables_is_a_warning_and_ranks_start(agents: Gang) -> None:
    start(agents, preflight=Expected(), node_1={"environment": {"NCCL_IB_HCA": "mlx5_1", "HF_TOKEN": "secret"}})
    assert agents.codes() == [0, 0]
    assert "preflight warning: NCCL_IB_HCA is 'mlx5_1' on node 1 and not set on other nodes" in agents.log()
    assert "secret" not in agents.log()
    assert "[rank 0] rank 0 runs" in agents.log()


def test_each_attempt_has_a_preflight_of_its_own(agents: Gang) -> None:
    run = {"preflight": Expected(), "restart": RestartPolicy(1, 0)}
    agents.write('import os, sys\nsys.exit(1 if os.environ["LOCKSTEP_ATTEMPT"] == "1" else 0)', **run)
    agents.run(codes=[0, 0])
    assert agents.log().count("checks on 2 nodes passed") == 2


def test_preflight_alone_starts_no_rank_and_leaves_nothing_behind(agents: Gang) -> None:
    start(agents, preflight=Expected(only=True), storage=StorageMode.SHARED)
    assert agents.codes() == [0, 0]
    found = result(agents)
    assert (found.ok, len(found.checks), found.nodes, found.findings) == (True, 10, 2, ())
    assert "runs" not in agents.log()
    assert not (agents.folder / "run").exists()


def test_preflight_alone_fails_at_once_and_leaves_the_records_of_the_job_as_they_are(agents: Gang) -> None:
    (agents.folder / "run").write_text("no folder")
    start(agents, preflight=Expected(only=True))
    assert agents.codes() == [1, 1]
    assert [(f.check, f.node) for f in result(agents).findings] == [("writable", 0), ("writable", 1)]
    assert (agents.folder / "run").read_text() == "no folder"


async def test_a_check_that_hangs_is_given_up_and_named(clock: VirtualClock) -> None:
    never, good = threading.Event(), threading.Event()
    looking = asyncio.ensure_future(answers._all_in_time({"good": good.set, "hangs": never.wait}))
    await asyncio.sleep(0)
    good.wait(20)
    found = await looking
    never.set()
    assert found == {"good": None} and clock.now == 1000.0 + 8.0


def knocking(key: bytes) -> str:
    """What somebody with this key meets at the door of node 0."""

    async def knock() -> str:
        run = make_run()
        door = network.ProbePort(run, KEY, 0)
        port = await door.open()
        try:
            return await network.why_unreachable(run, key, 1, 0, port)
        finally:
            door.close()

    return asyncio.run(knock())


def test_a_node_s_port_opens_to_the_job_s_key_only() -> None:
    assert knocking(KEY) == ""
    assert knocking(b"another key, of thirty-two bytes") == "the other side closed the connection"


async def test_a_stranger_at_the_door_gets_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PROOF_SECONDS", 600.0)
    door = network.ProbePort(make_run(), KEY, 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", await door.open())
    try:
        await reader.readline()
        writer.write(b"x" * 2 * PROOF_BYTES_MAX)  # no end of its line, and nothing after it
        assert await asyncio.wait_for(reader.read(), 60.0) == b""
    finally:
        writer.close()
        door.close()
