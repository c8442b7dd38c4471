"""NCCL's log on a node: asked for, read as it grows, shown as far as wanted, bounded and kept."""

from __future__ import annotations

import importlib
import itertools
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep_gang.agent.ranks import nccl_log
from lockstep_gang.agent.ranks.fabric import gloo_interface
from lockstep_gang.agent.ranks.nccl_log import LogChoice, LogFile, NcclLogs, log_choice
from lockstep_gang.contract.fabric import FabricAsked
from lockstep_spec.choices import DegradedPolicy
from unit.gang.cases import Gang
from unit.gang.fabric.cases import LOGS

PATTERN = "/f/rank-0.%p.log"
ASKED = FabricAsked("RDMA", nccl_debug="WARN")
HEAD = "x-0:71:88 [0] NCCL INFO "
FAKE = """import os, sys, time
rank = int(os.environ["RANK"])
path = os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))
name = open(os.environ["FOLDER"] + f"/log-{os.environ['NODE_RANK']}").read()
with open(path, "w") as file:
    file.write(open(name).read())
"""
UNTIL_TOLD = 'while not os.path.exists(os.environ["FOLDER"] + "/go"): time.sleep(0.01)\n'


@pytest.mark.parametrize(
    ("given", "level", "shown", "unread"),
    [
        ({}, "INFO", "WARN", ""),
        ({"NCCL_DEBUG": "WARN"}, "INFO", "WARN", ""),  # the cluster's own, as the pod has it
        ({"NCCL_DEBUG": "INFO"}, "INFO", "INFO", ""),
        ({"NCCL_DEBUG": "TRACE"}, "TRACE", "TRACE", ""),
        (
            {"NCCL_DEBUG": "VERSION"},
            "VERSION",
            "VERSION",
            "NCCL_DEBUG is VERSION: remove it, or set it to INFO, to have the fabric verified",
        ),
    ],
)
def test_a_level_that_a_person_sets_wins(given: dict[str, str], level: str, shown: str, unread: str) -> None:
    variables = {"NCCL_DEBUG": level, "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET", "NCCL_DEBUG_FILE": PATTERN}
    assert log_choice(ASKED, 1, given, PATTERN) == LogChoice(variables, shown, unread)


def test_a_file_that_a_person_names_is_left_to_them() -> None:
    choice = log_choice(ASKED, 1, {"NCCL_DEBUG_FILE": "/mine.%h"}, PATTERN)
    assert choice.variables == {}
    assert choice.unread.startswith("NCCL_DEBUG_FILE is /mine.%h, so NCCL logs there")


def test_subsystems_that_a_person_names_are_kept() -> None:
    assert log_choice(ASKED, 1, {"NCCL_DEBUG_SUBSYS": "COLL"}, PATTERN).variables["NCCL_DEBUG_SUBSYS"] == "COLL"


@pytest.mark.parametrize(("asked", "gpus"), [(None, 1), (ASKED, 0)])
def test_cpu_ranks_and_runs_of_an_older_version_get_no_variables(asked: FabricAsked | None, gpus: int) -> None:
    assert log_choice(asked, gpus, {}, PATTERN).variables == {}


def logs(folder: Path, shown: str | None = None) -> tuple[NcclLogs, list[str]]:
    lines: list[str] = []
    made = NcclLogs(folder, 1, lambda rank, line, warning: lines.append(f"{rank} {warning} {line}"))
    made.add(0, LogChoice({"NCCL_DEBUG_FILE": "x"}, shown))
    return made, lines


def test_lines_are_read_as_they_become_whole(tmp_path: Path) -> None:
    made, _ = logs(tmp_path)
    path = tmp_path / "nccl-1" / "rank-0.71.log"
    assert made.news() == ()
    with path.open("w") as file:
        file.write(f"{HEAD}Using network I")
        file.flush()
        assert made.news() == ()
        file.write("B\n")
        file.flush()
        assert [rank.networks for rank in made.news()] == [("IB",)]
        assert made.news() == ()
    made.forget_sent()
    assert [rank.networks for rank in made.news()] == [("IB",)]


def test_the_processes_of_a_rank_are_one(tmp_path: Path) -> None:
    made, _ = logs(tmp_path)
    (tmp_path / "nccl-1" / "rank-0.71.log").write_text(f"{HEAD}Using network IB\n")
    (tmp_path / "nccl-1" / "rank-0.72.log").write_text(f"{HEAD}NCCL version 2.29.7+cuda13.0\n")
    (tmp_path / "nccl-1" / "rank-01.72.log").write_text(f"{HEAD}Using network Socket\n")
    (found,) = made.news()
    assert (found.networks, found.version) == (("IB",), "2.29.7")


@pytest.mark.parametrize(
    ("shown", "levels"),
    [
        (None, ["WARN"]),
        ("WARN", ["WARN", "version"]),
        ("VERSION", ["WARN", "version"]),
        ("INFO", ["INFO", "WARN", "version"]),
        ("TRACE", ["INFO", "TRACE", "WARN", "version"]),
    ],
)
def test_as_much_is_shown_as_nccl_would_have_shown_and_warnings_always(tmp_path: Path, shown: str | None, levels: list[str]) -> None:
    made, lines = logs(tmp_path, shown)
    text = f"{HEAD}i\nx:1:1 [0] f.cc:1 NCCL WARN w\nx:1:1 [0] NCCL TRACE t\nNCCL version 2.21.5+cuda12.4\n"
    (tmp_path / "nccl-1" / "rank-0.71.log").write_text(text)
    made.news()
    assert [level for level in ("INFO", "TRACE", "WARN", "version") if any(level in line for line in lines)] == levels
    assert [line for line in lines if " True " in line] == ["0 True x:1:1 [0] f.cc:1 NCCL WARN w"]


def test_a_log_that_grows_without_end_takes_bounded_room_and_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_log, "PART_BYTES", 20_000)
    monkeypatch.setattr(nccl_log, "READ_BYTES", 20_000)
    path = tmp_path / "rank-0.71.log"
    log = LogFile(path)
    seen = 0
    with path.open("w") as file:  # as NCCL opens it: it goes on at its own place
        for number in range(2000):
            file.write(f"{HEAD}line {number:06} {'x' * 60}\n")
            if number % 100 == 99:
                file.flush()
                seen += sum(f"line {i:06}" in line for i, line in enumerate(log.lines(), start=seen))
                used = sum(p.stat().st_blocks * 512 for p in tmp_path.iterdir())
                assert used < 70_000
    assert seen == 2000
    kept = log.retained().decode()
    assert "line 000000" in kept
    assert "line 001999" in kept
    assert "lines are left out" in kept
    assert "\0" not in kept
    assert len(kept) < 45_000


def test_a_log_that_is_written_faster_than_it_is_read_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_log, "PART_BYTES", 10_000)
    monkeypatch.setattr(nccl_log, "READ_BYTES", 1_000)
    path = tmp_path / "rank-0.71.log"
    path.write_text("".join(f"line {number:06}\n" for number in range(5000)))
    assert "line 004999" in list(LogFile(path).lines())


def test_a_log_that_is_gone_has_nothing_new(tmp_path: Path) -> None:
    assert list(LogFile(tmp_path / "none").lines()) == []
    assert LogFile(tmp_path / "none").retained() == b""


def test_the_kept_log_replaces_that_of_the_attempt_before(tmp_path: Path) -> None:
    target = tmp_path / "run" / "logs" / "nccl"
    for attempt in (1, 2):
        made = NcclLogs(tmp_path, attempt, lambda rank, line, warning: None)
        made.add(0, LogChoice({"NCCL_DEBUG_FILE": "x"}))
        (made.folder / "rank-0.71.log").write_text(f"{HEAD}of attempt {attempt}\n")
        made.news()
        made.keep(target, print)
        made.end(5)
        assert not made.folder.exists()
    assert (target / "rank-0.log").read_text() == f"[lockstep] NCCL's log of rank 0, attempt 2\n{HEAD}of attempt 2\n"


def test_a_volume_that_takes_no_log_is_said(tmp_path: Path) -> None:
    made, _ = logs(tmp_path)
    (tmp_path / "file").write_text("")
    said: list[str] = []
    made.keep(tmp_path / "file", said.append)
    made.end(5)
    assert said
    assert said[0].startswith(f"cannot keep NCCL's logs under {tmp_path / 'file'}")


def test_gloos_interface_is_the_named_one_or_that_of_the_hosts_own_name(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"# 9.9.9.9 {socket.gethostname()}\n::1 {socket.gethostname()}\n127.0.0.1 x {socket.gethostname()} # me\n")
    assert gloo_interface({"GLOO_SOCKET_IFNAME": "net1"}, hosts) == "net1"
    assert gloo_interface({}, hosts) == "lo"
    hosts.write_text("127.0.0.1 localhost\n")
    assert gloo_interface({}, hosts) == ""
    assert gloo_interface({}, tmp_path / "none") == ""


def pretend(agents: Gang, script: str, *names: str, **asked: object) -> None:
    """Two nodes of one rank, each of which writes a log of tests/fabric_logs as NCCL would."""
    for node, name in enumerate(names):
        (agents.folder / f"log-{node}").write_text(str(LOGS / f"{name}.log"))
    agents.write(FAKE + script, gpus_per_node=1, fabric=FabricAsked("RDMA", **asked))  # type: ignore[arg-type]
    agents.start(*range(len(names)))


def test_agents_report_what_nccl_logs_and_keep_it(agents: Gang) -> None:
    pretend(agents, UNTIL_TOLD, "2.18-ib-peermem", "2.18-ib-peermem")
    agents.until("fabric: RDMA over mlx5_0, mlx5_1 (IB), GPUDirect by nvidia-peermem, verified on 2 of 2 ranks")
    (agents.folder / "go").touch()
    assert agents.codes() == [0, 0]
    kept = [agents.folder / "run" / "logs" / "nccl" / f"rank-{rank}.log" for rank in (0, 1)]
    assert all("Using network IB" in path.read_text() for path in kept)
    assert "Using network IB" not in agents.log(0)


def test_a_fabric_that_is_refused_ends_the_job_with_its_sentence(agents: Gang) -> None:
    pretend(agents, "time.sleep(60)\n", "2.18-ib-peermem", "2.18-sockets-no-libibverbs", degraded_policy=DegradedPolicy.FAIL)
    assert agents.codes() == [1, 1]
    end = agents.record("end.json")
    sentence = "asked for RDMA, rank 1 on node 1 uses sockets (enp1s0): libibverbs could not be opened"
    assert (end["state"], end["message"], end["failure"]["cause"]) == ("Failed", sentence, "Fabric")
    assert len(agents.record("attempts.jsonl")) == 1
    assert f"warning, fabric: {sentence}" in agents.log(0)


def test_nccls_warning_is_shown_and_names_the_failure_of_a_rank_that_ends_at_once(agents: Gang) -> None:
    pretend(agents, "if rank == 1:\n    os.abort()\ntime.sleep(60)\n", "2.18-ib-peermem", "fault-2.18-completion-error-12")
    assert agents.codes() == [1, 1]
    failure = agents.record("end.json")["failure"]
    assert (failure["rank"], failure["cause"]) == (1, "Fabric")
    assert "NCCL says: NET/IB : Got completion from peer 10.0.0.12<52042> with error 12" in failure["message"]
    assert any("NCCL WARN" in line for line in failure["lastLines"])
    assert "[rank 1] x-0:71:88 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion" in agents.log(1)


def test_cpu_ranks_say_that_gloo_leaves_nothing_to_verify(agents: Gang) -> None:
    agents.write(
        f"import os, time\n{UNTIL_TOLD}",
        fabric=FabricAsked("TCP"),
        environment={"FOLDER": str(agents.folder), "GLOO_SOCKET_IFNAME": "eth7"},
    )
    agents.start(0, 1)
    agents.until("fabric: CPU ranks over gloo (over eth7): nothing to verify")
    (agents.folder / "go").touch()
    assert agents.codes() == [0, 0]


REAL = """import ctypes, sys
sys.exit(ctypes.CDLL(sys.argv[1]).ncclGetUniqueId(ctypes.create_string_buffer(128)))
"""


def test_the_real_library_logs_where_it_is_told_and_is_read(agents: Gang) -> None:
    """Without a GPU it comes as far as its bootstrap network: what it says of that is read, relayed and named like all else."""
    (folder,) = list(importlib.import_module("nvidia.nccl").__path__)
    command = (sys.executable, "-S", "rank.py", f"{folder}/lib/libnccl.so.2")
    asked, environment = FabricAsked("RDMA"), {"NCCL_SOCKET_IFNAME": "none7"}
    agents.write(REAL, gpus_per_node=1, nodes=1, fabric=asked, command=command, environment=environment)
    agents.run(codes=[1])
    failure = agents.record("end.json")["failure"]
    assert failure["cause"] == "Fabric"
    assert failure["message"].endswith("NCCL says: Bootstrap : no socket interface found")
    assert "NCCL_SOCKET_IFNAME" in (agents.folder / "run" / "logs" / "nccl" / "rank-0.log").read_text()


def test_a_log_is_read_a_mebibyte_at_a_time_and_two_mebibytes_of_each_end_are_kept(tmp_path: Path) -> None:
    path, line = tmp_path / "rank-0.71.log", b"x" * 1023 + b"\n"
    log = LogFile(path)
    path.write_bytes(line * 2048)
    assert [len(list(log.lines())) for _ in range(3)] == [1024, 1024, 0]
    with path.open("ab") as file:
        file.write(line)
    assert len(list(log.lines())) == 1
    assert path.stat().st_size == 0
    assert log.retained() == line * 2048 + b"\n[lockstep] lines are left out here\n"


def test_of_a_rank_s_logs_64_are_read_and_of_a_full_folder_4096_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, lines = logs(tmp_path)
    for number in range(70):
        (tmp_path / "nccl-1" / f"rank-0.{number}.log").write_text("x:1:1 [0] f.cc:1 NCCL WARN w\n")
    made.news()
    assert len(lines) == 64
    names = (SimpleNamespace(name=f"{number}.log") for number in itertools.count())
    monkeypatch.setattr(nccl_log.os, "scandir", lambda folder: nullcontext(names))
    made.news()
    assert next(names).name == "4096.log"
