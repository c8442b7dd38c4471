"""Pairs measured for real, over addresses of the loopback interface; RDMA by a stand-in of ib_write_bw, since no test machine has an
HCA.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.plan.cluster.hardware import MeasuredRail, RailEnd
from lockstep.plan.cluster.pairs import PairRate, PairsMeasured, Way
from lockstep.platforms.inpod import netfacts, netrate, source_of
from lockstep.platforms.jobs import netrates
from lockstep.platforms.jobs.netrates import measure_pairs
from lockstep.programs import ProgramFailed
from support.process_place import ProcessPlace

Object = dict[str, Any]
NAMES = {0: "lab0", 1: "lab1", 2: "lab2"}
PERFTEST_TABLE = """\
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 1048576    46300            0.00               {gbs}             0.046302
---------------------------------------------------------------------------------------
"""


def answering(path: Path, facts: Mapping[str, Any]) -> ProcessPlace:
    """A place whose Python answers the question for facts with these, and is the real program else."""
    program = path / "python3"
    lines = [
        f"#!{sys.executable}", "import json, sys", f"sys.path[:0] = {[str(Path(netrate.__file__).parents[3])]!r}", "import os",
        f"n = int(sys.argv[{len(['-I', '-c', 'BOOT']) + 1}])", "rest = n", "while rest: rest -= len(os.read(0, rest))",
        "from lockstep.platforms.inpod import netrate", f"netrate.network_facts = lambda: json.loads({json.dumps(dict(facts))!r})",
            "netrate.main()",
    ]  # fmt: skip
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    return ProcessPlace(f"host {path.name}", python=(str(program),))


def loopback(node: int, *, hcas: list[Object] | None = None, tools: list[str] | None = None) -> Object:
    port = {
        "name": "lo",
        "address": f"127.0.0.{node + 10}",
        "prefix": 8,
        "mtu": 65536,
        "gbs": None,
        "wireless": False,
    }
    # (the real program leaves lo out, and the name that a rail has is only shown)
    return {
        "host": f"h{node}", "cores": 2.0, "ports": [{**port, "hca": hcas[0]["device"] if hcas else "", "name": "lo"}], "hcas": hcas or [],
        "tools": tools or [],
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _loopback_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    monkeypatch.setattr(netrates, "seconds_each", lambda nodes, rails: 0.2)
    monkeypatch.setattr("lockstep.plan.cluster.hardware.LOCAL_NAMES", re.compile("docker"))


def places(tmp_path: Path, facts: Mapping[int, Object]) -> dict[int, ProcessPlace]:
    made = {}
    for node, answer in facts.items():
        (tmp_path / NAMES[node]).mkdir()
        made[node] = answering(tmp_path / NAMES[node], answer)
    return made


def measure(tmp_path: Path, facts: Mapping[int, Object], way: Way, words: list[str] | None = None) -> PairsMeasured:
    heard = words if words is not None else []
    return asyncio.run(measure_pairs(places(tmp_path, facts), {node: NAMES[node] for node in facts}, way, heard.append))


def test_every_pair_is_measured_in_both_directions(tmp_path: Path) -> None:
    words: list[str] = []
    measured = measure(tmp_path, {node: loopback(node) for node in range(3)}, Way(line_gbs=1000.0), words)
    assert sorted((rate.sender, rate.receiver) for rate in measured.rates) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(rate.gbs > 0.01 and rate.error == "" and rate.microseconds is not None and rate.share for rate in measured.rates)
    assert measured.over == "sockets" and words[0] == "3 nodes, 1 rail of 3 rounds, 0.2 s a direction, by sockets"


def test_a_node_that_is_not_reached_is_a_result_and_not_the_end(tmp_path: Path) -> None:
    facts = {node: loopback(node) for node in range(2)}
    facts[1]["ports"][0]["address"] = "198.51.100.7"  # (not this machine's)
    measured = measure(tmp_path, facts, Way())
    errors = {(rate.sender, rate.receiver): rate.error for rate in measured.rates}
    assert errors[0, 1].startswith("can't listen on 198.51.100.7: ") and "assign" in errors[1, 0]


def test_a_slow_measurement_is_made_once_more_and_the_better_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's traffic passes; a bad cable doesn't."""
    taken: list[tuple[int, int]] = []

    async def rate(bench: object, rail: MeasuredRail, pair: tuple[int, int]) -> PairRate:
        taken.append(pair)
        is_passing = pair == (0, 1) and taken.count(pair) > 1
        return PairRate(rail.name, *pair, gbs=1.0 if pair in ((0, 1), (2, 1)) and not is_passing else 10.0)

    monkeypatch.setattr("lockstep.platforms.jobs.netrates._Sockets.measure", rate)
    words: list[str] = []
    measured = measure(tmp_path, {node: loopback(node) for node in range(3)}, Way(), words)
    assert {(rate.sender, rate.receiver): rate.gbs for rate in measured.rates if rate.gbs < 10} == {(2, 1): 1.0}
    assert sorted(taken[6:]) == [(0, 1), (2, 1)] and words[-1] == "rail lo: measures 2 slow pairs once more"


def test_a_range_of_ports_is_kept_to(tmp_path: Path) -> None:
    receiver = netrate.Receiver()
    bound = receiver.listen("00" * 32, ["127.0.0.40", "127.0.0.41"], (29450, 29459))["ports"]
    assert all(29450 <= port <= 29459 for port in bound.values())


def test_a_connection_without_the_token_is_not_counted() -> None:
    port = netrate.Receiver().listen("11" * 32, ["127.0.0.42"])["ports"]["127.0.0.42"]
    assert "error" in netrate.send_for("22" * 32, "127.0.0.43", "lo", "127.0.0.42", port, 0.1, 1)
    assert netrate.send_for("11" * 32, "127.0.0.43", "lo", "127.0.0.42", port, 0.1, 2)["gbs"] > 0


def stub_perftest(folder: Path, script: str) -> None:
    program = folder / "ib_write_bw"
    program.write_text(f"#!{sys.executable}\nimport sys, time\nserver = sys.argv[-1] == '1048576' or sys.argv[-2] == '-x'\n{script}\n")
    program.chmod(0o755)


HCA = {"device": "mlx5_3", "port": 1, "gbs": 100.0}


def test_rdma_is_measured_by_a_server_and_a_client_of_perftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "argv"
    table = PERFTEST_TABLE.format(gbs="97.10")
    stub_perftest(
        tmp_path, f"open({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\ntime.sleep(30 if server else 0)\nprint({table!r})"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = {node: loopback(node, hcas=[HCA], tools=["ib_write_bw"]) for node in range(2)}
    measured = measure(tmp_path, facts, Way(rdma=True, gid_index=3))
    assert [(rate.gbs, rate.share) for rate in measured.rates] == [(97.1, 0.971)] * 2 and measured.over == "ib_write_bw"
    common = "-d mlx5_3 -i 1 -p 18515 -D 1 -F --report_gbits -s 1048576 -x 3"
    assert log.read_text().splitlines() == [common, f"{common} 127.0.0.11", common, f"{common} 127.0.0.10"]


def test_perftests_own_words_are_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_perftest(tmp_path, 'print("Couldn\'t allocate MR", flush=True)\nraise SystemExit(1)')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    measured = measure(tmp_path, {node: loopback(node, hcas=[HCA], tools=["ib_write_bw"]) for node in range(2)}, Way(rdma=True))
    assert {rate.error for rate in measured.rates} == {"Couldn't allocate MR"}


@pytest.mark.parametrize(
    ("hcas", "tools", "why"),
    [
        ([], [], "lab0, lab1 show no RDMA device that is up"),
        ([HCA], [], "ib_write_bw (perftest; the trainer image has it) is missing on lab0, lab1"),
    ],
)
def test_where_rdma_can_not_be_measured_sockets_are_and_that_is_said(
    tmp_path: Path, hcas: list[Object], tools: list[str], why: str
) -> None:
    words: list[str] = []
    facts = {node: loopback(node, hcas=hcas, tools=tools) for node in range(2)}
    assert measure(tmp_path, facts, Way(rdma=True), words).over == "sockets"
    assert words[0] == f"measures by sockets, not by RDMA: {why}"


def test_what_is_no_answer_ends_it_with_the_places_name(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match=r"host lab1: its answer\.cores is missing"):
        measure(tmp_path, {0: loopback(0), 1: {"host": "x"}}, Way())


@pytest.mark.parametrize("gbs", ["nan", "inf", "many", None])
def test_a_rate_that_is_no_number_is_no_measurement(gbs: str | None) -> None:
    rail = MeasuredRail("net1", {node: RailEnd("net1", f"10.0.0.{node}") for node in range(2)})
    with pytest.raises(ProgramFailed, match="which is no measurement"):
        netrates._rate(rail, (0, 1), {"gbs": gbs}, None)


def test_the_real_program_tells_this_machines_facts() -> None:
    """As it is sent: its text for any Python."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", source_of(netrate)], input='{"what": "facts"}\n', capture_output=True, text=True, check=True
    )
    facts = json.loads(done.stdout)
    assert facts.keys() >= {"host", "cores", "ports", "hcas", "tools"} and facts["cores"] > 0
    assert all(port["name"] != "lo" for port in facts["ports"])


def test_sysfs_says_what_a_port_is(tmp_path: Path) -> None:
    device = tmp_path / "sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:01.0/0000:3d:00.0"
    for folder in (device / "infiniband/mlx5_0", device / "infiniband_verbs/uverbs0", tmp_path / "dev/infiniband/uverbs0"):
        folder.mkdir(parents=True)
    hca = tmp_path / "sys/class/infiniband/mlx5_0"
    (hca / "ports/1").mkdir(parents=True)
    (hca / "ports/1/state").write_text("4: ACTIVE\n")
    (hca / "ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
    (hca / "device").symlink_to(device)
    assert netfacts.network_facts(tmp_path)["hcas"] == [{"device": "mlx5_0", "port": 1, "gbs": 400.0}]
    (hca / "ports/1/state").write_text("1: DOWN\n")
    assert netfacts.network_facts(tmp_path)["hcas"] == []
    (hca / "ports/1/state").write_text("4: ACTIVE\n")
    (tmp_path / "dev/infiniband/uverbs0").rmdir()  # another pod's
    assert netfacts.network_facts(tmp_path)["hcas"] == []


def test_of_a_node_s_rdma_ports_64_are_told(tmp_path: Path) -> None:
    for number in range(65):
        port = tmp_path / f"sys/class/infiniband/mlx5_{number:02}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        for folder in (port.parents[1] / f"device/infiniband_verbs/uverbs{number}", tmp_path / f"dev/infiniband/uverbs{number}"):
            folder.mkdir(parents=True)
    assert [hca["device"] for hca in netfacts.network_facts(tmp_path)["hcas"]] == [f"mlx5_{number:02}" for number in range(64)]


def test_bytes_count_without_the_warm_up_and_what_comes_late() -> None:
    arrivals = netrate.Arrivals(1, 1.0)
    arrivals.add(0, 5.0)
    for hundredth in range(200):
        arrivals.add(10_000_000 if 25 <= hundredth < 100 else 1_000_000_000, 5 + (hundredth + 0.5) / 100)
    assert arrivals.gigabits() == pytest.approx(8.0)


def test_of_many_rounds_every_sixteenth_and_the_last_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(node: int, what: str, **request: Any) -> Object:
        return {"facts": loopback(node), "listen": {"ports": {f"127.0.0.{node + 10}": 1}}, "send": {"gbs": 1.0}}[what]

    @asynccontextmanager
    async def programs(nodes: Mapping[int, object]) -> AsyncIterator[Object]:
        yield {node: SimpleNamespace(name=str(node), ask=partial(ask, node)) for node in nodes}

    monkeypatch.setattr(netrates, "network_programs", programs)
    words: list[str] = []
    asyncio.run(measure_pairs(dict.fromkeys(range(34), Any), {node: str(node) for node in range(34)}, Way(), words.append))
    assert [line for line in words if "round " in line] == [f"rail lo: round {number} of 33" for number in (16, 32, 33)]


def test_arrivals_are_counted_by_hundredths_of_a_second() -> None:
    arrivals = netrate.Arrivals(1, 0.3)
    for millisecond in (0, 77, 83):
        arrivals.add(10**9, millisecond / 1000)
    assert arrivals.gigabits() == pytest.approx(8 / 0.22)  # from the eighth hundredth to the thirtieth


def test_a_round_trip_is_the_best_of_eight() -> None:
    with socket.create_server(("127.0.0.44", 0)) as listening:
        heard: list[bytes] = []

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(60, socket.MSG_WAITALL)
                while byte := connection.recv(1):
                    heard.append(byte)
                    connection.sendall(byte)
                connection.sendall(b"1.5\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        answered = netrate.send_for("11" * 32, "127.0.0.45", "lo", "127.0.0.44", listening.getsockname()[1], 0.0, 1)
        thread.join(30)
    assert answered["gbs"] == 1.5 and len(heard) == 8
