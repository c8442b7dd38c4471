"""Real ranks of which one is slower: its own time says so, though all steps take all ranks equally long."""

from __future__ import annotations

import json
import socket
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rank_harness import ForkServer, RunFile

from lockstep_gang.contract.messages import Pace
from lockstep_gang.contract.run import JobIdentity, RestartPolicy, Run, WhenDone
from lockstep_gang.lifecycle.gang import new_gang
from lockstep_gang.lifecycle.stragglers import with_sample, with_stragglers

STEPS = 22
RUN = Run(
    JobIdentity("x", "ns", "u"), 2, 1, 0, ("127.0.0.1",) * 2, 29400, 29500, "/r", "/k", ("python",), "/", RestartPolicy(0, 0), WhenDone.EXIT
)


def paces(ranks: ForkServer, path: Path, socket_path: Path, slow_rank: int) -> list[dict[str, Any]]:
    """What two ranks tell, of which one works 2.5 times as long as the other."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(socket_path))
        agent.settimeout(60)
        arguments = {"rank": slow_rank, "times": 2.5}
        outputs = ranks.start("straggle", [path] * 2, arguments=arguments, LOCKSTEP_REPORT_SOCKET=str(socket_path))
        heard: list[dict[str, Any]] = []
        while not heard or heard[-1]["event"] not in {"end", "error"}:  # read as they come: a socket holds few of them
            heard.append(json.loads(agent.recv(65536)))
        ended = ranks.wait(outputs)
        assert ended.codes == [0, 0], ended.output
    return [event for event in heard if event["event"] == "pace"]


@pytest.mark.parametrize("stage", ["Stage2", "Stage3"])
def test_a_slow_rank_is_known_by_its_own_time(ranks: ForkServer, run_file: RunFile, tmp_path: Path, stage: str) -> None:
    """Stage3 gathers parameters all the time, so that there every part of a step waits for the slowest rank."""
    path = run_file(
        "slow",
        zeroStage=stage,
        evaluation=None,
        optimization={"maxSteps": STEPS, "globalBatchSize": 4, "epochs": 20},
        checkpoint={"everySteps": 100},
    )
    told = paces(ranks, path, tmp_path / "agent.sock", slow_rank=1)
    own = [statistics.median(event["microseconds"] for event in told if event["rank"] == rank) for rank in (0, 1)]
    assert own[1] > 1.5 * own[0], own
    gang = new_gang(RUN)
    for event in sorted(told, key=lambda event: (event["step"], -event["rank"])):
        pace = Pace(event["rank"], event["step"], event["steps"], event["microseconds"])
        before = gang.ranks[pace.rank]
        gang = gang.with_rank(pace.rank, replace(before, paces=with_sample(before.paces, pace)))
    assert [straggler.rank for straggler in with_stragglers(gang, RUN).stragglers] == [1]


def test_on_gpus_waits_are_found_whether_an_operation_is_asynchronous_or_not(ranks: ForkServer) -> None:
    ranks.run("count_waits", [None])
