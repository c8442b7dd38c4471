"""One owner of a run's folder: two jobs of one name on one volume, jobs made anew, coordinators that were replaced, and what a power cut
leaves.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.contract.messages import Exited, RankExit, Started
from lockstep_gang.contract.report import Cause, State
from lockstep_gang.contract.run import POD_IPS, HostPlace, JobIdentity, RestartPolicy, Run, WhenDone
from lockstep_gang.coordinator import coordinator
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.owner import DEAD_SECONDS, Ownership, Replaced, place_of
from lockstep_gang.coordinator.records import Records
from lockstep_gang.lifecycle.gang import Phase
from lockstep_gang.lifecycle.history import AttemptRecord
from lockstep_gang.lifecycle.summary import summarize
from lockstep_spec import files
from unit.gang.cases import KEY, Gang, gang, gone, make_run
from unit.gang.coordinator.test_volume import Wire
from unit.gang.story import hello
from unit.virtual_time import VirtualClock

IN_A, IN_B = JobIdentity("x", "a", "uid-a"), JobIdentity("x", "b", "uid-b")


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POD_IPS, "10.0.0.7,fd00::7")


PLACE_A = "job x in namespace a (node 0 at 10.0.0.7)"


def run_of(job: JobIdentity, folder: Path, **changes: Any) -> Run:
    return make_run(job=job, run_dir=str(folder), restart=RestartPolicy(3, 0), when_done=WhenDone.WAIT, **changes)


class Folder:
    """A run's folder, and jobs that want it; each watches the others on the same clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = VirtualClock()

    def of(self, job: JobIdentity) -> Ownership:
        return Ownership(run_of(job, self.path), self.clock.monotonic)

    def taken(self, job: JobIdentity) -> Ownership:
        made = self.of(job)
        assert made.take() is None
        return made

    @property
    def newest(self) -> Path:
        return max(self.path.glob("gang/owner.*.json"), key=lambda path: int(path.name.split(".")[1]))

    def change(self, **values: Any) -> None:
        self.newest.write_text(json.dumps(json.loads(self.newest.read_text()) | values))


@pytest.fixture
def folder(tmp_path: Path, address: None) -> Folder:
    return Folder(tmp_path)


def test_a_job_made_anew_starts_at_once_and_one_that_was_killed_after_a_minute_by_the_watchers_clock(folder: Folder) -> None:
    folder.taken(IN_A).let_go()
    folder.taken(IN_B)
    waits = folder.of(IN_A)
    for _ in range(int(DEAD_SECONDS / 5)):
        assert waits.take() == ("job x in namespace b (node 0 at 10.0.0.7)", False)
        folder.clock.sleep(5)
    assert waits.take() is None
    assert [path.name for path in (folder.path / "gang").iterdir()] == ["owner.3.json"]


def test_a_job_that_lives_is_seen_by_its_second_sign(folder: Folder) -> None:
    lives, waits = folder.taken(IN_A), folder.of(IN_B)
    assert waits.take() == (PLACE_A, False)
    text = folder.newest.read_text()
    folder.newest.write_text("")  # as a look finds it that comes at a bad moment
    assert waits.take() == ("another job", False)
    folder.newest.write_text(text)
    assert waits.take() == (PLACE_A, False)
    lives.beat()
    assert waits.take() == (PLACE_A, True)


def test_the_same_job_takes_over_at_once_and_the_coordinator_before_hears_it(folder: Folder) -> None:
    older, newer = folder.taken(IN_A), folder.taken(IN_A)
    older.let_go()
    newer.beat()
    older = folder.taken(IN_A)
    with pytest.raises(Replaced) as error:
        newer.beat()
    assert error.value.job_uid == IN_A.uid
    newer.let_go()
    newer.beat()
    assert folder.of(IN_B).take() == (PLACE_A, False)
    older.beat()


def test_a_sign_that_comes_while_another_takes_over_takes_nothing_back(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    stale, look = folder.taken(IN_A), Ownership._newest
    newer: list[Ownership] = []

    def slow(owner: Ownership) -> Any:
        seen = look(owner)
        monkeypatch.setattr(Ownership, "_newest", look)
        newer.append(folder.taken(IN_A))
        return seen

    monkeypatch.setattr(Ownership, "_newest", slow)
    stale.beat()
    newer[0].beat()
    with pytest.raises(Replaced):
        stale.beat()


def test_an_owner_whose_folder_was_taken_over_hears_by_whom(folder: Folder) -> None:
    slow, other = folder.taken(IN_A), folder.of(IN_B)
    assert other.take() is not None
    folder.clock.sleep(DEAD_SECONDS)
    assert other.take() is None
    with pytest.raises(Replaced, match=r"job x in namespace b \(node 0 at 10.0.0.7\) has taken over .* for 60 s") as error:
        slow.beat()
    assert error.value.job_uid == IN_B.uid
    assert json.loads(folder.newest.read_text())["jobUid"] == IN_B.uid


def test_a_process_of_this_machine_that_is_gone_is_waited_for_by_nobody(folder: Folder) -> None:
    folder.taken(IN_A)
    process = json.loads(folder.newest.read_text())["process"]
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    for other in (f"0{process}", f"{process.rpartition(' ')[0]}x {ended.pid}", str(ended.pid), f" {ended.pid}", "", "x y z", "a b -1"):
        folder.change(process=other)
        assert folder.of(IN_B).take() is not None, other
    folder.change(process=f"{process.rpartition(' ')[0]} {ended.pid}")
    assert folder.of(IN_B).take() is None


@pytest.mark.parametrize("before", [None, IN_A])
def test_of_jobs_that_start_in_the_same_moment_exactly_one_wins(folder: Folder, before: JobIdentity | None) -> None:
    for _ in range(5):
        if before is not None:
            folder.taken(before).let_go()
        results: list[tuple[str, bool] | None] = []
        together = threading.Barrier(6)

        def start(job: JobIdentity, together: threading.Barrier = together, results: list[tuple[str, bool] | None] = results) -> None:
            owner = folder.of(job)
            together.wait(20)
            results.append(owner.take())

        threads = [threading.Thread(target=start, args=(JobIdentity("x", "n", f"uid-{n}"),)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results.count(None) == 1
        folder.change(ended=True)
        if before is None:
            folder.newest.unlink()


@pytest.mark.parametrize("left", ["", "{", '{"jobUid": 3}', "[[[", "directory", "fifo", "link"])
def test_whatever_stands_there_locks_a_job_out_for_a_minute_at_most(folder: Folder, left: str) -> None:
    (folder.path / "gang").mkdir()
    path = folder.path / "gang/owner.999999999.json"
    if left == "directory":
        path.mkdir()
    elif left == "fifo":
        os.mkfifo(path)
    elif left == "link":
        path.symlink_to("elsewhere")
    else:
        path.write_text(left)
    job = folder.of(IN_B)
    assert job.take() == ("another job", False)
    folder.clock.sleep(DEAD_SECONDS - 1)
    assert job.take() == ("another job", False)
    folder.clock.sleep(1)
    assert job.take() is None
    job.beat()


def test_a_folder_that_was_removed_is_not_made_again_by_a_sign_of_life(folder: Folder) -> None:
    owner = folder.taken(IN_A)
    folder.newest.unlink()
    (folder.path / "gang").rmdir()
    with pytest.raises(FileNotFoundError):
        owner.beat()
    owner.let_go()


def test_a_volume_without_room_leaves_nothing_that_another_waits_for(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            folder.of(IN_A).take()
    assert list((folder.path / "gang").iterdir()) == []
    folder.taken(IN_B)


def test_the_words_for_a_job_say_where_to_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: None) -> None:
    assert place_of(run_of(IN_A, tmp_path)) == PLACE_A
    hosts = replace(run_of(IN_A, tmp_path), host=HostPlace(), addresses=("10.1.0.1", "10.1.0.2"))
    assert place_of(hosts) == "job x on hosts (node 0 at 10.1.0.1)"
    monkeypatch.delenv(POD_IPS)
    assert place_of(run_of(IN_A, tmp_path)).startswith("job x as processes on ")


class Hosted:
    """A coordinator that runs, and its two nodes."""

    def __init__(self, job: JobIdentity, folder: Path) -> None:
        self.lines: list[str] = []
        self.run = run_of(job, folder)
        self.coordinator = Coordinator(self.run, KEY, Output(self.lines.append, tuple, self.lines.append))
        self.hosting = asyncio.ensure_future(self.coordinator.run())
        self.wires = [Wire(), Wire()]

    async def connects(self) -> None:
        await asyncio.sleep(0)
        for node, wire in enumerate(self.wires):
            self.coordinator.connected(node, wire, hello(node))  # type: ignore[arg-type]

    async def runs(self) -> Hosted:
        await self.connects()
        await self.until(lambda: self.coordinator.gang.phase is Phase.ACTIVE)
        for node in (0, 1):
            self.coordinator.heard(node, Started(self.coordinator.gang.attempt))
        await self.until((Path(self.run.run_dir) / "gang/report.json").exists)
        return self

    @property
    def message(self) -> str:
        return summarize(self.coordinator.gang, self.run).message

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(4000):
            if holds():
                return
            await asyncio.sleep(0.005)
        raise AssertionError((self.message, self.lines))

    async def ended(self) -> None:
        self.hosting.cancel()
        await asyncio.wait([self.hosting])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, address: None) -> None:
    monkeypatch.setattr(coordinator, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(coordinator, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(coordinator, "SETTLE_SECONDS", 0.1)


REFUSED = (
    f"the run's folder {{}} is in use by {PLACE_A}. Two jobs can't train in one folder: give this one another name, or a volume of its own"
    " (spec.storage)"
)


async def test_the_second_of_two_jobs_in_one_folder_is_refused_by_name_before_a_rank_starts(tmp_path: Path, quick: None) -> None:
    first = await Hosted(IN_A, tmp_path).runs()
    second = Hosted(IN_B, tmp_path)
    await second.connects()
    await second.until(lambda: second.coordinator.gang.phase is Phase.ENDED)
    report = summarize(second.coordinator.gang, second.run)
    assert (report.state, report.attempt, report.message) == (State.FAILED, 0, REFUSED.format(tmp_path))
    assert report.failure is not None and report.failure.cause is Cause.CONFIGURATION
    await second.until(lambda: second.wires[1].types() == ["Finish"])
    assert second.wires[0].types() == ["Finish"]
    await asyncio.wait_for(second.coordinator.settle(), 20)
    await second.ended()
    assert first.coordinator.gang.phase is Phase.ACTIVE
    assert not (tmp_path / "gang/end.json").exists()
    assert json.loads((tmp_path / "gang/report.json").read_text())["report"]["job"]["uid"] == IN_A.uid
    await first.ended()


async def test_a_job_that_waits_for_a_dead_one_says_so_and_goes_on_from_its_records(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await Hosted(IN_A, tmp_path).runs()
    await first.ended()
    second = Hosted(IN_B, tmp_path)
    await second.connects()
    await second.until(lambda: second.message.startswith(f"waiting for the run's folder {tmp_path}, which {PLACE_A} has: unless that"))
    report = summarize(second.coordinator.gang, second.run)
    assert (report.state, second.wires[0].types()) == (State.WAITING, [])
    assert json.loads((tmp_path / "gang/report.json").read_text())["report"]["job"]["uid"] == IN_A.uid
    monkeypatch.setattr(coordinator, "SETTLE_SECONDS", 1e6)
    await asyncio.wait_for(second.coordinator.settle(), 20)  # a job that is stopped meanwhile ends at once
    records = Records(str(tmp_path))
    records.write_attempts([*records.attempts(), AttemptRecord(2, IN_A.uid, 0, "2026-01-01T00:00:00Z")])
    monkeypatch.setattr("lockstep_gang.coordinator.owner.DEAD_SECONDS", 0.0)
    await second.until(lambda: second.wires[1].types() == ["Start"])
    assert (second.coordinator.gang.attempt, second.message.startswith("waiting")) == (3, False)
    await second.ended()


async def test_a_job_whose_folder_was_taken_over_ends_by_name_and_writes_nothing_more(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await Hosted(IN_A, tmp_path).runs()
    monkeypatch.setattr("lockstep_gang.coordinator.owner.DEAD_SECONDS", 0.0)
    Ownership(run_of(IN_B, tmp_path)).take()
    records = (tmp_path / "gang/attempts.jsonl").read_bytes()
    await first.until(lambda: first.wires[1].types() == ["Start", "Finish"])
    assert summarize(first.coordinator.gang, first.run).state is State.FAILED
    assert f"job x in namespace b (node 0 at 10.0.0.7) has taken over {tmp_path}" in first.message
    await asyncio.wait_for(first.coordinator.settle(), 20)
    await first.ended()
    assert ((tmp_path / "gang/attempts.jsonl").read_bytes(), (tmp_path / "gang/end.json").exists()) == (records, False)


@pytest.mark.parametrize("how", ["its end is told", "it is told to go"])
async def test_the_folder_is_free_at_once_when_a_job_has_ended_or_its_pod_goes(tmp_path: Path, quick: None, how: str) -> None:
    first = await Hosted(IN_A, tmp_path).runs()
    if how == "it is told to go":
        await asyncio.wait_for(first.coordinator.settle(), 20)
    else:
        for rank in (0, 1):
            first.coordinator.heard(rank, Exited(1, RankExit(rank, 0, None, ordered=False)))
        await first.until(lambda: first.wires[1].types() == ["Start", "Finish"])
    second = Ownership(run_of(IN_B, tmp_path))
    for _ in range(400):
        if (other := second.take()) is None:
            break
        await asyncio.sleep(0.005)
    assert other is None
    await first.ended()


@pytest.mark.parametrize("when", ["shows a sign of life", "writes a record"])
async def test_a_coordinator_that_was_replaced_by_its_own_job_ends_without_a_word_about_the_job_when_it(
    when: str, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if when == "writes a record":
        monkeypatch.setattr(coordinator, "BEAT_SECONDS", 1e6)
    first = await Hosted(IN_A, tmp_path).runs()
    assert Ownership(first.run).take() is None
    if when == "writes a record":
        for rank in (0, 1):
            first.coordinator.heard(rank, Exited(1, RankExit(rank, 0, None, ordered=False)))
    with pytest.raises(Replaced):
        await asyncio.wait_for(first.hosting, 20)
    assert summarize(first.coordinator.gang, first.run).state is not State.FAILED
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if "ReportFile.run" in repr(task)]


QUICK = """
import sys
from lockstep_gang.agent import main
from lockstep_gang.coordinator import coordinator
coordinator.BEAT_SECONDS = coordinator.LOOK_SECONDS = 0.1
raise SystemExit(main.main(sys.argv[1:]))
"""
RANK = """
import os, pathlib, time
go = pathlib.Path(os.environ["FOLDER"], "go")
open(f"{os.environ['FOLDER']}/pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
print("here", flush=True)
while not go.exists(): time.sleep(0.02)
"""


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Callable[[JobIdentity, str], Gang]]:
    """Makers of gangs of one run's folder, each with a name of its own."""
    made: list[Any] = []

    def make(job: JobIdentity, name: str, **changes: Any) -> Gang:
        (tmp_path / name).mkdir()
        made.append(gang(tmp_path / name))
        agents: Gang = made[-1].__enter__()
        agents.program = ("-c", QUICK)
        agents.write(RANK, job=job, run_dir=str(tmp_path / "run"), **changes)
        return agents

    yield make
    for each in made:
        each.__exit__(None, None, None)


def test_a_real_gang_is_refused_where_another_runs_and_starts_at_once_after_that_was_killed(
    tmp_path: Path, gangs: Callable[..., Gang]
) -> None:
    first = gangs(IN_A, "first")
    first.start(0, 1)
    first.until("] here", 1)
    second = gangs(IN_B, "second")
    second.start(0, 1)
    assert second.codes() == [1, 1]
    assert "is in use by job x as processes on" in second.log(0) and "is in use by job x as processes on" in second.log(1)
    assert "here" not in second.log(0)
    assert IN_B.uid not in (tmp_path / "run/logs/output/node-0.log").read_text()
    for process in first.processes.values():
        process.kill()
        process.wait()
    third = gangs(IN_B, "third")
    (third.folder / "go").touch()
    third.start(0, 1)
    assert third.codes() == [0, 0]
    assert json.loads((tmp_path / "run/gang/end.json").read_text())["jobUid"] == IN_B.uid


@pytest.mark.parametrize("place", ["pod", "host"])
def test_a_real_node_0_that_was_replaced_kills_its_ranks_and_a_host_s_ends(tmp_path: Path, gangs: Callable[..., Gang], place: str) -> None:
    changes: dict[str, Any] = {"restart": RestartPolicy(1, 0), **({"host": HostPlace()} if place == "host" else {})}
    stale = gangs(IN_A, "stale", nodes=1, **changes)
    stale.start(0)
    stale.until("] here")
    pid = int((stale.folder / "pid-0").read_text())
    newer = gangs(IN_A, "newer", nodes=1, **changes)
    newer.start(0)
    stale.until("this node 0 was replaced, and ends its ranks: job x")
    assert gone(pid, 20)
    if place == "pod":
        assert stale.processes[0].poll() is None
        stale.signal(0, signal.SIGTERM)
    assert stale.processes[0].wait(60) == 1
    newer.until("] here")
    (newer.folder / "go").touch()
    assert newer.codes() == [0]
