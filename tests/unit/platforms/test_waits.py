"""Hosts, pods and commands that never answer, or never end: each wait ends after the time that is promised, and so much is taken at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.api.errors import ConfigError
from lockstep.api.hosts import Host, HostsCluster
from lockstep.plan.hosts.wheels import Offer
from lockstep.platforms.clusters import imagebuild, install, remove
from lockstep.platforms.files import results
from lockstep.platforms.hosts import checkup, environment, volumes, wheelhouse
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.inpod import editor as editor_there
from lockstep.platforms.inpod import forget, netrate, rankload
from lockstep.platforms.jobs import bundle, editor, netrates, runs, terminal, top
from lockstep.platforms.kubernetes import alone as runs_here
from lockstep.platforms.kubernetes import probe
from lockstep.platforms.onhost import brief, condition, exchange, keep, look, marks, station
from lockstep.platforms.onhost import install as install_there
from lockstep.programs import Program, output_of, python_output
from lockstep_gang.agent import host as agent_host
from lockstep_gang.agent.preflight import selftest_program
from lockstep_machine import wire
from lockstep_machine.commands import output
from lockstep_machine.wire import Gone
from support.fake_cluster import FakeCluster
from unit.silent_place import SilentPlace, SilentProgram
from unit.virtual_time import VirtualClock, clock_of, forever

PLACE = SilentPlace()
JOB = {"kind": "TrainingJob", "metadata": {"name": "x", "namespace": "ns", "uid": "u"}}
CLUSTER = FakeCluster().as_cluster
MINUTE, HOUR = 60.0, 3600.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The clock of every module here, too."""
    return clock_of(monkeypatch, probe, runs_here)


@pytest.fixture(autouse=True)
def silent_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "place", lambda fleet, host: SilentPlace(f"host {host}"))


def fleet() -> Fleet:
    return Fleet(HostsCluster(hosts=[Host(name="lab0"), Host(name="lab1")], ports="29400-29449"), "lab", "lab")


async def end_of_an_editor() -> None:
    await editor._end(SilentProgram(PLACE), asyncio.create_task(forever()))


async def node_that_is_watched() -> None:
    async def find() -> Any:
        return {0: SilentPlace()}

    async with top.NodesWatch(find, cast(Any, SimpleNamespace(subject="x", source=b"", request=lambda node: {}))) as watch:
        await watch.ask(1)


class Terminating(FakeCluster):
    """A namespace whose pods never go."""

    async def list(self, kind: str, namespace: str | None = None, query: Any = None) -> Any:
        return {"items": [{"kind": "Pod", "metadata": {"name": "x-0", "namespace": "ns", "deletionTimestamp": "t"}, "status": {}}]}


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (lambda: output_of(PLACE, ["python3"]), MINUTE),
        (lambda: python_output(PLACE, b""), MINUTE),
        (lambda: checkup._condition(fleet(), Host(name="lab0")), MINUTE),
        (lambda: fleet().look(["lab0"]), 30.0),
        (lambda: volumes.sharing(fleet(), {"lab0": "~/ws", "lab1": "~/ws"}), MINUTE),
        (lambda: environment.look(fleet(), ["lab0"]), 30.0),
        (lambda: runs._ask_node(PLACE, None), 15.0),
        (lambda: terminal.differs_there(PLACE, "", "/x"), 10.0),
        (lambda: netrates.NodeProgram("pod x-0", SilentProgram(PLACE)).ask("facts"), MINUTE),
        (lambda: bundle._add_from(PLACE, "/x", "run", cast(Any, None), [], []), 5 * MINUTE),
        (lambda: results._exported(PLACE, "x", "/c", ""), 30 * MINUTE),
        (end_of_an_editor, 15.0),
        (lambda: runs_here._left(forever, lambda _: None), MINUTE),
    ],
)  # fmt: skip
def test_what_never_answers_is_waited_for_so_long(
    clock: VirtualClock, work: Callable[[], Coroutine[Any, Any, Any]], seconds: float
) -> None:
    assert clock.seconds_of(work()) == pytest.approx(seconds, abs=1.0)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (lambda: install.until_established(CLUSTER, "x"), 2 * MINUTE),
        (lambda: install.until_ready(CLUSTER, "ns", "x"), 2 * MINUTE),
        (lambda: remove._remove_jobs(Terminating(JOB).as_cluster, [JOB], lambda _: None), 2 * MINUTE),
        (lambda: runs_here._make_room(Terminating().as_cluster, cast(Any, SimpleNamespace(name="x", namespace="ns")), lambda _: None),
            4 * MINUTE),
        (node_that_is_watched, 11.0),
        (lambda: probe._ended(CLUSTER, "ns", "t", 1), 2 * MINUTE),
    ],
)  # fmt: skip
def test_what_never_comes_about_is_waited_for_so_long(
    clock: VirtualClock, work: Callable[[], Coroutine[Any, Any, Any]], seconds: float
) -> None:
    assert clock.seconds_of(work()) == pytest.approx(seconds, abs=1.0)


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        (lambda: look.gpus(0), 10.0),
        (lambda: look.version_of("python3"), 15.0),
        (lambda: output("systemctl"), 5.0),
        (install_there.may_linger, 10.0),
        (install_there.pythons, 10.0),
        (rankload.gpus, 5.0),
        (lambda: keep.failure("systemctl"), 60.0),
        (selftest_program.ecc_errors, 10.0),
        (lambda: agent_host._disable("x.service"), 10.0),
    ],
    ids=["gpus", "version", "units", "linger", "pythons", "rank loads", "keep", "self-test", "unit"],
)  # fmt: skip
def test_a_command_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], seconds: float) -> None:
    limits: list[float] = []

    def hang(command: object, timeout: float, **_: object) -> None:
        limits.append(timeout)
        raise subprocess.TimeoutExpired("x", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    monkeypatch.setattr(shutil, "which", lambda name, **_: f"/bin/{name}")
    with contextlib.suppress(subprocess.TimeoutExpired):  # (not every caller answers for it itself)
        call()
    assert limits[0] == seconds


def test_a_folder_that_always_comes_back_is_removed_for_twenty_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, removed = VirtualClock(), list[object]()
    monkeypatch.setattr(forget, "time", clock)
    monkeypatch.setattr(forget, "rank_processes", lambda: [])
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: removed.append(path))
    (tmp_path / "gang").mkdir()
    begun = clock.now
    forget.forget(tmp_path)
    assert len(removed) > 100 and clock.now - begun == pytest.approx(5 + 20, abs=0.2)  # it waits for the ranks' end first
    clock.now = begun
    forget.forget(tmp_path / "none")
    assert clock.now - begun == pytest.approx(2, abs=0.2)


def test_a_program_that_is_asked_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def nothing_comes(reads: object, writes: object, errors: object, timeout: float) -> tuple[list[object], list[object], list[object]]:
        limits.append(timeout)
        return [], [], []

    monkeypatch.setattr("select.select", nothing_comes)
    netrate.main()
    assert limits == [5 * MINUTE]


async def ask_ranks_of(place: SilentPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    async def running(*_: object) -> dict[int, SilentPlace]:
        return dict.fromkeys(range(100), place)

    monkeypatch.setattr(runs, "running_pods", running)
    await runs.ask_ranks(CLUSTER, JOB, None)


async def watch_nodes_of(place: SilentPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    async def find() -> Any:
        return dict.fromkeys(range(60), place)

    async def start(cls: object, place: SilentPlace, *_: object) -> Any:
        async with place.program([]):
            await asyncio.sleep(1)
        raise OSError

    monkeypatch.setattr(top._NodeProgram, "start", classmethod(start))
    async with top.NodesWatch(find, cast(Any, SimpleNamespace(subject="x"))) as watch:
        await watch.ask(1)


async def work_for(place: SilentPlace, all_of: Callable[[Callable[[object], Any]], Any]) -> None:
    async def work(_: object) -> None:
        async with place.program([]):
            await asyncio.sleep(1)

    await all_of(work)


async def download_all(patch: pytest.MonkeyPatch, work: Callable[[object], Any]) -> None:
    patch.setattr(wheelhouse, "download", lambda session, *_: work(session))
    await wheelhouse._download([Offer(f"{number}", "", "", 0) for number in range(100)], Path("/x"))


@pytest.mark.parametrize(
    ("work", "most"),
    [
        (ask_ranks_of, 32),
        (watch_nodes_of, 32),
        (lambda place, _: work_for(place, lambda work: fleet().all(map(str, range(100)), work)), 32),
        (lambda place, patch: work_for(place, lambda work: download_all(patch, work)), 6),
    ],
    ids=["ranks", "nodes", "hosts", "downloads"],
)  # fmt: skip
def test_so_many_are_asked_at_once(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, work: Callable[[SilentPlace, pytest.MonkeyPatch], Any], most: int
) -> None:
    place = SilentPlace()
    clock.seconds_of(work(place, monkeypatch))
    assert place.most == most


def test_the_last_words_of_a_library_that_fails_are_one_short_line() -> None:
    process = SimpleNamespace(communicate=lambda timeout: ("", "first\n" + "x" * 5000), returncode=1)
    assert condition.answer_from(process, 1.0) == {"problem": "x" * 300}


def test_a_connection_has_ten_seconds_for_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(wire, "_ready", lambda descriptor, event, seconds: limits.append(seconds))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours, pytest.raises(Gone):
        station.proved_wire(ours, bytes(32), gives=True)
    assert limits == [pytest.approx(10.0, abs=0.5)]


@pytest.mark.parametrize(("comes_back", "seconds"), [(False, 1.0), (True, 10.0)])
def test_what_a_rank_brings_back_is_removed_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, comes_back: bool, seconds: float
) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(brief, "time", clock)
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    begun = clock.now
    brief.clear_away(None, None, [tmp_path if comes_back else tmp_path / "none"], None)
    assert clock.now - begun == pytest.approx(seconds, abs=0.1)


@pytest.mark.parametrize(
    ("is_heard", "seconds", "said"), [(True, 120.0, [{"failed": "it doesn't listen after 120 s", "said": []}]), (False, 60.0, [])]
)
def test_a_server_that_never_listens_and_a_laptop_that_is_gone_are_given_up(
    monkeypatch: pytest.MonkeyPatch, is_heard: bool, seconds: float, said: list[object]
) -> None:
    clock, told = VirtualClock(), list[object]()
    output, orders = SimpleNamespace(fileno=lambda: 3), SimpleNamespace(fileno=lambda: 4)

    def select(reads: object, writes: object, errors: object, timeout: float) -> tuple[list[int], list[int], list[int]]:
        clock.sleep(timeout)
        return [4] if is_heard else [], [], []

    monkeypatch.setattr(editor_there, "time", clock)
    monkeypatch.setattr(editor_there, "announce", lambda **words: told.append(words))
    monkeypatch.setattr("sys.stdin", orders)
    monkeypatch.setattr("select.select", select)
    monkeypatch.setattr("os.read", lambda source, size: b"still here\n")
    begun = clock.now
    editor_there.attend(cast(Any, SimpleNamespace(stdout=output)), editor_there.Tail("t"), Path("none"), dict, echo=False)
    assert clock.now - begun == pytest.approx(seconds, abs=0.5) and told == said


def test_a_bundle_of_more_than_512_mebibytes_is_full() -> None:
    sizes = [cast(Any, SimpleNamespace(data=range(256 << 20)))] * 2
    assert not bundle._is_full(sizes)
    assert bundle._is_full([*sizes, cast(Any, SimpleNamespace(data=b"x"))]) and "512 MiB" in bundle.FULL


def test_a_knock_at_another_host_has_three_seconds() -> None:
    asked: list[Any] = []

    async def ask(what: str, **request: Any) -> dict[str, Any]:
        asked.append(request["seconds"])
        return {"reasons": [""] * len(request["targets"])}

    programs = cast(Any, {0: SimpleNamespace(ask=ask), 1: SimpleNamespace(ask=ask)})
    asyncio.run(checkup._knock(programs, "t", {0: "a", 1: "b"}, {0: ["1"] * len(checkup.PURPOSES), 1: ["1"] * len(checkup.PURPOSES)}, {}))
    assert asked == [3.0, 3.0]


def test_a_build_is_looked_at_every_two_seconds(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    class Building(FakeCluster):
        async def log_of(self, path: str, query: object) -> AsyncIterator[str]:
            for line in ():
                yield line

        async def request(self, method: str, path: str) -> Any:
            looks.append(clock.now)
            return {"status": {"phase": "Running" if len(looks) < 4 else "Complete"}}

    clock.seconds_of(imagebuild._followed(Building().as_cluster, "ns", "b", lambda _: None))
    assert [later - first for first, later in pairwise(looks)] == pytest.approx([2.0] * 3)


def test_libraries_have_ten_seconds_to_say_their_versions_and_torch_forty(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(condition, "started", lambda *_: "a process")
    monkeypatch.setattr(condition, "answer_from", lambda process, seconds: limits.append(seconds))
    monkeypatch.setattr(condition, "nvidia_cards", lambda: {"0000:01:00.0": "nvidia"})
    monkeypatch.setattr(condition, "output", lambda *_: "")
    condition.condition({"python": "python3", "config": ""})
    assert limits == [10.0, 40.0]


def test_another_node_has_five_seconds_to_take_a_connection_and_ten_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    class Socket:
        def __init__(self, *_: object) -> None:
            self.is_slow = not limits

        def settimeout(self, seconds: float) -> None:
            limits.append(seconds)

        def connect(self, address: object) -> None:
            if self.is_slow:
                raise TimeoutError

        def setsockopt(self, *_: object) -> None:
            pass

        bind = close = setsockopt

    monkeypatch.setattr(netrate.socket, "socket", Socket)
    with pytest.raises(OSError, match=r"no answer in 5 s from 10\.0\.0\.2"):
        netrate._connected("10.0.0.1", "eth0", "10.0.0.2", 1)
    netrate._connected("10.0.0.1", "eth0", "10.0.0.2", 1)
    assert limits == [5.0, 5.0, 10.0]


async def look_at_a_host() -> None:
    _, problems = await fleet().look(["lab0"])
    raise ConfigError(problems["lab0"])


@pytest.mark.parametrize(
    "ask", [lambda place: results.inspected(place, "commits", "/x", []), lambda _: look_at_a_host()], ids=["folder", "host"]
)
def test_what_a_trainer_prints_of_a_folder_and_a_host_of_itself_is_read_no_further_than_64_mebibytes(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[SilentPlace], Coroutine[Any, Any, Any]]
) -> None:
    reads: list[int] = []

    class Talking(SilentProgram):
        async def read(self) -> bytes:
            reads.append(1)
            return bytes(1 << 20) if len(reads) < 100 else b""

    class TalkingPlace(SilentPlace):
        @contextlib.asynccontextmanager
        async def program(self, *_: object, **__: object) -> AsyncIterator[Program]:
            yield Talking(self)

    monkeypatch.setattr(Fleet, "place", lambda *_: TalkingPlace())
    with pytest.raises(ConfigError, match="prints more than 67108864 bytes"):
        asyncio.run(ask(TalkingPlace()))
    assert len(reads) == 65


def test_marks_of_other_hosts_are_looked_for_ten_times_a_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock, looks = VirtualClock(), list[float]()
    monkeypatch.setattr(marks, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=lambda nap: looks.append(nap) or clock.sleep(nap)))
    assert marks.present(tmp_path, ["theirs"], 1.0) == []
    assert 10 <= len(looks) <= 11


def test_a_command_that_says_nothing_for_a_minute_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(wire, "time", clock)
    asker = wire.Asker.__new__(wire.Asker)
    asker._heard, asker._gone = clock.now, False
    clock.sleep(59)
    before = asker.is_gone
    clock.sleep(2)
    assert (before, asker.is_gone) == (False, True)


def test_of_a_server_that_ended_the_last_twenty_lines_are_told() -> None:
    tail = editor_there.Tail("secret")
    tail.add("\n".join(f"line {number}" for number in range(100)).encode())
    assert tail.lines() == [f"line {number}" for number in range(80, 100)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"do": "start", "files": {"key": "YWJj"}}', "ended before all files were here, or they have more than 96 MiB"),
        (b'{"do": "start", "files": {"../key": "YWJj"}}\n', "'../key' is no file of a job"),
    ],
    ids=["cut off", "another name"],
)
def test_a_request_that_is_cut_off_or_has_other_files_than_a_job_s_is_declined(line: bytes, words: str) -> None:
    with pytest.raises(exchange.Declined, match=words):
        exchange.read_request(io.BytesIO(line))


def test_a_request_for_a_host_has_at_most_96_mebibytes() -> None:
    asked: list[int] = []
    stream = SimpleNamespace(readline=lambda size: (asked.append(size), b"{}\n")[1])
    assert exchange.read_request(cast(Any, stream)) == {"files": {}} and asked == [96 << 20]
