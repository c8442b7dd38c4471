"""The next attempt's ranks that import while the gang backs off: taken when they are who was meant, and else out of the way."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lockstep_gang.agent.ranks.standby import Standby, changes
from lockstep_gang.contract.run import RestartPolicy, WhenDone
from unit.gang.cases import Gang, now

WAITS = (
    "import json, os, sys\n"
    "os.environ.update({k: v or '' for k, v in json.loads(sys.stdin.readline())['environment'].items()})\n"
    "print(os.environ['RANK'], os.environ['MASTER_PORT'], flush=True)\n"
)
ENDED = {"RANK": "3", "LOCKSTEP_ATTEMPT": "1", "MASTER_PORT": "29500", "PATH": os.environ["PATH"]}
NEXT = {**ENDED, "LOCKSTEP_ATTEMPT": "2", "MASTER_PORT": "29501"}


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[Standby]:
    """One process waits, for rank 3 of attempt 2."""
    made = Standby()
    made.prepare((sys.executable, "-S", "-c", WAITS), str(tmp_path), [ENDED])
    yield made
    made.drop()


def test_an_order_has_what_is_otherwise_and_what_is_gone() -> None:
    assert changes({"A": "1", "B": "2", "C": "3"}, {"A": "1", "B": "4", "D": "5"}) == {"B": "4", "C": None, "D": "5"}


def test_the_process_that_waits_becomes_the_rank_with_the_attempt_s_own_variables(standby: Standby) -> None:
    (pid,) = standby.leaders
    taken = standby.take(NEXT)
    assert taken[0] == pid
    os.set_blocking(taken[1], True)
    with os.fdopen(taken[1]) as output:
        assert output.read() == "3 29501\n"
    assert os.waitpid(pid, 0)[1] == 0
    assert not standby.leaders


@pytest.mark.parametrize("other", [{"RANK": "2"}, {"LOCKSTEP_ATTEMPT": "3"}])
def test_who_waits_as_another_rank_or_attempt_is_not_taken(standby: Standby, other: Mapping[str, str]) -> None:
    assert standby.take(NEXT | other) is None
    assert len(standby.leaders) == 1


def test_what_waits_in_vain_is_killed(standby: Standby) -> None:
    (pid,) = standby.leaders
    standby.drop()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9


def test_one_that_ended_before_its_time_is_not_taken(tmp_path: Path) -> None:
    standby = Standby()
    standby.prepare((sys.executable, "-S", "-c", ""), str(tmp_path), [ENDED])
    (pid,) = standby.leaders
    os.waitpid(pid, 0)
    assert standby.take(NEXT) is None  # nobody has said so yet: the pipe does
    standby.prepare((sys.executable, "-S", "-c", ""), str(tmp_path), [ENDED])
    (pid,) = standby.leaders
    os.waitpid(pid, 0)
    standby.ended(pid)
    assert not standby.leaders


def test_a_command_that_can_t_be_started_is_left_for_the_start_to_tell(tmp_path: Path) -> None:
    standby = Standby()
    standby.prepare((str(tmp_path / "absent"),), str(tmp_path), [ENDED])
    assert not standby.leaders


# As Lockstep's trainer does: attempt 1 fails, attempt 2 reports its end.
TRAINER = """
import json, os, socket, sys
waited = "LOCKSTEP_STANDBY" in os.environ
if waited:
    for name, value in json.loads(sys.stdin.readline())["environment"].items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
rank, attempt = int(os.environ["RANK"]), os.environ["LOCKSTEP_ATTEMPT"]
print("here", json.dumps([rank, attempt, waited, os.environ["TORCHELASTIC_RESTART_COUNT"], os.getpid()]), flush=True)
if attempt == "1":
    sys.exit(1 if rank == 1 else __import__("signal").pause())
reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
reports.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
reports.send(json.dumps({"event": "end", "rank": rank}).encode())
"""


def told(agents: Gang, node: int) -> list[list[object]]:
    lines = [line.partition("] here ")[2] for line in agents.log(node).splitlines()]
    return [json.loads(line) for line in lines if line]


def test_after_a_failure_the_ranks_are_those_that_waited_and_nothing_is_left_of_them(agents: Gang) -> None:
    agents.write(TRAINER, training={}, restart=RestartPolicy(1, 0))
    agents.run(codes=[0, 0], seconds=60)
    for node in (0, 1):
        assert told(agents, node)[-1][:4] == [node, "2", True, "1"]


def waiting(folder: Path) -> list[str]:
    """Processes of a run in `folder` that wait."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if b"LOCKSTEP_STANDBY=1" in variables and f"FOLDER={folder}".encode() in variables:
                found.append(process.name)
    return found


def test_a_job_that_has_failed_for_good_leaves_nobody_waiting(agents: Gang) -> None:
    """Though its agent stays."""
    script = 'import os, signal\nif "LOCKSTEP_STANDBY" in os.environ:\n    signal.pause()\nraise SystemExit(1)'
    agents.write(script, nodes=1, training={}, restart=RestartPolicy(0, 0), when_done=WhenDone.WAIT)
    agents.start(0)
    agents.until("Failed: ")
    end = now() + 10
    while waiting(agents.folder):
        assert now() < end
