"""What a gang leaves on its volume is bounded, however often it is started again; and an agent's own fault is no verdict on the job."""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.platforms.jobs.keeper import VERDICTS
from lockstep_gang.agent.agent import Agent
from lockstep_gang.agent.log import Console
from lockstep_gang.agent.outbox import Outbox, json_bytes
from lockstep_gang.agent.ranks.ranks import LocalNode, RankProcess
from lockstep_gang.agent.ranks.stacks import HANGS, ProcessState, remove_old, shortened, stack_path
from lockstep_gang.contract.messages import Pace, message_to_json
from lockstep_gang.contract.report import HISTORY, Cause, CheckpointReport, Failure, Restart
from lockstep_gang.contract.run import JobIdentity, RestartPolicy
from lockstep_gang.coordinator import records
from lockstep_gang.coordinator.records import Records
from lockstep_gang.lifecycle.gang import Budget, Gang, new_gang
from lockstep_gang.lifecycle.history import AttemptRecord, begun_records, resume_gang, retained_records
from lockstep_spec.codec import ContractError
from lockstep_spec.exits import INTERNAL
from unit.gang.cases import KEY, gang, make_run
from unit.gang.test_scale import endings

WAITING_MAX = 1000
FILE_BYTES = 1024 * 1024
STACKS_BYTES = 512 * 1024 * 1024
LINE_BYTES_MAX = 4 * 1024 * 1024
ATTEMPTS_MAX = 200

RUN = make_run(restart=RestartPolicy(1000, 1))


def attempt(number: int, uid: str = "uid-1", outcome: str = "Failed", failed: bool = True, committed: int | None = None) -> AttemptRecord:
    failure = Failure(f"attempt {number} failed", rank=0, node=0, cause=Cause.FABRIC)
    return AttemptRecord(
        number,
        uid,
        number - 1,
        "2026-01-01T00:00:00Z",
        outcome,
        Restart(number, "2026-01-01T00:00:00Z", failure, 0) if failed else None,
        Budget(number, 3, committed or 0),
        CheckpointReport(committed, f"/c/{committed}", f"2026-01-01T00:{committed % 60:02}:00Z") if committed is not None else None,
    )


def seen(gang: Gang) -> tuple[object, ...]:
    """What a new coordinator goes on from."""
    return gang.known_attempt, gang.attempt, gang.restarts, gang.budget, gang.history, gang.failure, gang.checkpoint, gang.phase


@pytest.mark.parametrize("seed", range(20))
def test_a_coordinator_goes_on_from_the_retained_records_as_from_all(seed: int) -> None:
    draw, all_records, bounded = random.Random(seed), list[AttemptRecord](), list[AttemptRecord]()  # noqa: S311 (no secret)
    for number in range(1, 900):
        uid = "uid-0" if number < draw.choice([1, 300]) else "uid-1"
        outcome = draw.choice(["Failed", "Stopped", "Complete"])
        record = attempt(number, uid, outcome, outcome == "Failed" and draw.random() < 0.1, number if draw.random() < 0.01 else None)
        all_records.append(record)
        bounded = retained_records([*bounded, record])
    assert ATTEMPTS_MAX <= len(bounded) <= ATTEMPTS_MAX + HISTORY + 1
    assert bounded == sorted(bounded, key=lambda record: record.attempt)
    for uid in ("uid-1", "uid-2"):
        run = replace(RUN, job=JobIdentity("x", "ns", uid))
        assert seen(resume_gang(run, bounded, None, 1000.0)) == seen(resume_gang(run, all_records, None, 1000.0))


def test_what_is_written_when_an_attempt_begins_is_what_is_retained() -> None:
    earlier = [attempt(number) for number in range(1, 500)]
    written = begun_records(earlier, replace(new_gang(RUN), attempt=500), RUN, "2026-01-01T00:00:00Z")
    assert len(written) <= ATTEMPTS_MAX + HISTORY + 1
    assert written[-1].attempt == 500


def test_a_script_that_tells_its_pace_too_often_has_some_left_out() -> None:
    outbox = Outbox(3, 512, lambda _: None)
    for step in range(3 * WAITING_MAX):
        outbox.put(Pace(24, step, 1, 1_000_000))
    assert len(outbox._waiting) <= WAITING_MAX + 1


def test_files_of_hangs_stay_for_the_newest_attempts(tmp_path: Path) -> None:
    others = ["train.log", "hang-attempt-x-rank-1.txt", "nccl-timeout-rank-0", "hang-attempt-1-rank-0.txt.bak"]
    names = [
        f"{what}-attempt-{number}-rank-{rank}.{end}"
        for number in (2, 9, 10, 11, 1000)
        for rank in (0, 7)
        for what, end in (("hang", "txt"), ("nccl", "json"))
    ]
    for name in [*others, *names]:
        (tmp_path / name).write_text("x")
    remove_old(tmp_path)
    left = {path.name for path in tmp_path.iterdir()} - set(others)
    assert len(left) == HANGS * 4
    assert {name.split("-")[2] for name in left} == {"10", "11", "1000"}
    assert {path.name for path in tmp_path.iterdir()} >= set(others)
    remove_old(tmp_path / "nowhere")


def test_stacks_of_all_ranks_together_are_bounded_and_the_main_thread_stays() -> None:
    lines = [f'  File "/m.py", line {number} in f' for number in range(100_000)]
    for ranks in (1, 8, 8192):
        text = "\n".join(shortened(lines, ranks))
        assert len(text) <= min(FILE_BYTES, STACKS_BYTES // ranks) + 100
        assert text.endswith(lines[-1])
        assert text.splitlines()[0].endswith("lines left out")
    assert shortened(lines[:10], 8192) == lines[:10]


def test_what_a_rank_wrote_when_it_hung_is_shortened_before_it_is_written(tmp_path: Path) -> None:
    run = make_run(nodes=1024, ranks_per_node=8, gpus_per_node=8, run_dir=str(tmp_path))
    rank = RankProcess.__new__(RankProcess)  # without a process
    rank.rank, rank.pid = 7, 1
    rank._attempt, rank._asked_for_stacks, rank._state_before = 1, True, ProcessState("S", "futex_wait")
    rank._relay = SimpleNamespace(captured=[f"line {number}" for number in range(100_000)])  # type: ignore[assignment]
    told = rank.dumped(LocalNode(run, 0, "run.json", tmp_path / "report.sock", tmp_path))
    assert told is not None and told.stacks == str(stack_path(run.run_dir, 1, 7))
    assert Path(told.stacks).stat().st_size < STACKS_BYTES // 8192 + 1000


def test_what_an_agent_says_of_its_ranks_when_it_connects_is_bounded() -> None:
    run = make_run(nodes=1, ranks_per_node=64)
    with tempfile.TemporaryDirectory(prefix="lockstep-", dir="/tmp") as folder:
        agent = Agent(run, KEY, LocalNode(run, 0, "run.json", Path(folder, "report.sock"), Path(folder)), Console(1))
        try:
            ranks = SimpleNamespace(states=lambda: endings(64, "😀"))
            agent._ranks, agent._fabric = ranks, SimpleNamespace(forget_sent=lambda _: None)  # type: ignore[assignment]
            assert json_bytes(message_to_json(agent._hello())) < LINE_BYTES_MAX * 3 // 4
        finally:
            agent._socket.close()


def test_an_attempt_that_begins_removes_what_older_hangs_left(tmp_path: Path) -> None:
    with gang(tmp_path) as agents:
        run = agents.write("", nodes=1)
        old = [stack_path(run.run_dir, number, 0) for number in range(101, 107)]
        old[0].parent.mkdir(parents=True)
        for path in old:
            path.write_text("stacks")
        agents.run(codes=[0])
        assert [path.exists() for path in old] == [False] * 3 + [True] * 3


BROKEN = """
import sys
from lockstep_gang.agent import agent, main
def hello(self):
    raise {error}
agent.Agent._hello = hello
raise SystemExit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("error", ["KeyError('x')", "RecursionError()", "MemoryError()"])
def test_an_agents_own_fault_ends_with_a_code_that_is_no_verdict(error: str, tmp_path: Path) -> None:
    assert INTERNAL not in VERDICTS
    with gang(tmp_path) as agents:
        agents.program = ("-c", BROKEN.format(error=error))
        agents.write("", nodes=1)
        agents.run(codes=[INTERNAL])
        assert "ends with an internal error, which says nothing about the job" in agents.log()


def test_a_fault_before_the_agent_has_begun_is_no_verdict_either(tmp_path: Path) -> None:
    with gang(tmp_path) as agents:
        agents.program = (
            "-c",
            (
                "import sys\nfrom lockstep_gang.agent import main\nmain.make_folder = lambda _: 1 / 0\nraise"
                " SystemExit(main.main(sys.argv[1:]))"
            ),
        )
        agents.write("", nodes=1)
        agents.run(codes=[INTERNAL])


def test_a_record_of_more_than_sixteen_mebibytes_is_refused(tmp_path: Path) -> None:
    own, path = Records(str(tmp_path)), tmp_path / "gang/goodput.json"
    own.write_goodput(records.GoodputRecord("uid-1"))
    os.truncate(path, (16 << 20) + 1)
    with pytest.raises(ContractError, match="it has more than 16777216 bytes"):
        own.goodput("uid-1")
