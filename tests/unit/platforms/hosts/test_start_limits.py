"""Hosts that never answer: each wait ends with a sentence of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.hosts import Host, HostsCluster
from lockstep.api.objects import Typed
from lockstep.plan.hosts.facts import Folder, HostFacts
from lockstep.plan.hosts.record import Coordinator
from lockstep.plan.hosts.volumes import Sharing
from lockstep.platforms.hosts import fleet as fleets
from lockstep.platforms.hosts import shortruns, start
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.hosts.shortruns import Brief
from lockstep.platforms.jobs.shortresults import Short
from lockstep.platforms.places.orders import Order
from lockstep.programs import STDOUT, Place, Program
from support.hosts_told import CLUSTER, JOB, facts
from unit.silent_place import SilentProgram
from unit.virtual_time import VirtualClock

NAMES = ["lab0", "lab1"]


class Fallen(SilentProgram):
    """A program that takes all, and falls silent after so many answers."""

    def __init__(self, fleet: Fleet, name: str, *answers: bytes) -> None:
        super().__init__(fleet.place(name))
        self._answers = iter(answers)
        self.written = b""

    async def write(self, data: bytes | memoryview) -> None:
        self.written += bytes(data)

    async def _received(self) -> AsyncIterator[tuple[int, bytes]]:
        for answer in self._answers:
            yield STDOUT, answer + b"\n"
        await asyncio.Event().wait()


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(HostsCluster(hosts=[Host(name=name) for name in NAMES], ports="29400-29449"), "lab", "lab")


def test_a_file_that_a_host_lacks_is_named_as_it_lies_here(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CLUSTER.hosts is not None
    job, host = parse_job_file(JOB, "job.yaml"), CLUSTER.hosts.host("lab0")
    folder, lacks = (
        Folder("/home/lab0/lockstep/workspace", 1 << 40),
        ("spec.script.path", "/home/lab0/lockstep/workspace/my train.py", "file"),
    )
    answers = {"lab0": facts("lab0", "10.0.0.1", workspace=folder, missing=(lacks,))}
    for path, word in ((tmp_path / "other", "PATH"), (tmp_path / "my train.py", "'my train.py'")):
        path.touch()
        with pytest.raises(ConfigError, match=rf"lockstep cp {word} 'x:/workspace/my train\.py' --cluster lab$"):
            start.refuse_unfit(fleet, job, [host], answers)


def fall(monkeypatch: pytest.MonkeyPatch, **answers: tuple[bytes, ...]) -> list[Fallen]:
    """Let hosts give these answers and no more, and return the programs that keep jobs there, once they are begun."""
    keepers: list[Fallen] = []

    @asynccontextmanager
    async def keeper(fleet: Fleet, name: str) -> AsyncIterator[Program]:
        keepers.append(Fallen(fleet, name, *answers[name]))
        yield keepers[-1]

    monkeypatch.setattr(start, "_keeper", keeper)
    return keepers


PLACED, STARTED = b'{"placed": true}', b'{"started": true}'


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((PLACED,), (), "nothing was started: host lab1 has not taken the job's files for 120 s"),
        ((PLACED,), (PLACED,), "host lab0 has not said that its agent runs for 120 s"),
        ((PLACED, STARTED), (PLACED,), "started only in part: host lab1 has not said that its agent runs for 120 s: lockstep delete x"
                                       " --cluster lab removes it"),
    ],
)  # fmt: skip
def test_a_start_that_takes_too_long_says_where(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, first: tuple[bytes, ...], second: tuple[bytes, ...], words: str
) -> None:
    fall(monkeypatch, lab0=first, lab1=second)
    request = {"do": "start", "job": "x", "fresh": True}
    with pytest.raises(Failed, match=words):
        VirtualClock().run(start._place_and_go(fleet, request, {name: {"key": b"k"} for name in NAMES}, Coordinator("10.0.0.1", 29400)))


def test_what_a_check_refuses_beside_the_files_way_begins_on_no_host(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    keepers = fall(monkeypatch, lab0=(PLACED, STARTED), lab1=(PLACED, STARTED))

    async def refuse() -> None:
        assert all(b'"files": {"key": "c2VjcmV0"}' in keeper.written for keeper in keepers), "all hosts have the files"
        raise ConfigError("lab1 does not see what lab0 writes")

    files = {name: {"key": b"secret"} for name in NAMES}
    with pytest.raises(ConfigError, match="does not see"):
        asyncio.run(start._place_and_go(fleet, {"do": "start", "job": "x"}, files, Coordinator("10.0.0.1", 29400), refuse))
    assert not any(b"go\n" in keeper.written for keeper in keepers)


def test_a_job_whose_hosts_fall_silent_once_it_is_started_is_a_started_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CLUSTER.hosts is not None
    folder = Folder("/home/ada/lockstep/workspace", 1 << 40)
    told = {name: facts(name, address, workspace=folder) for name, address in (("lab0", "10.0.0.1"), ("lab1", "10.0.0.2"))}
    gone = {name: f"host {name} can't be reached" for name in told}

    class Silent(Fleet):
        async def look(self, *_: object, **__: object) -> tuple[dict[str, HostFacts], dict[str, str]]:
            return told, {}

        async def look_for(self, *_: object) -> tuple[dict[str, HostFacts], dict[str, str]]:
            return {}, gone

    @asynccontextmanager
    async def apart(*_: object, **__: object) -> AsyncIterator[Awaitable[Sharing]]:
        yield asyncio.sleep(0, Sharing([[name] for name in told]))

    async def placed(*arguments: Any) -> None:
        await arguments[-1]()

    monkeypatch.setattr(start, "looking_for_marks", apart)
    monkeypatch.setattr(start, "_place_and_go", placed)
    job = parse_job_file(JOB, "job.yaml")
    seen = asyncio.run(start.start(Silent(CLUSTER.hosts, "lab", "lab"), Order(job, CLUSTER, Typed("job.yaml"))))
    assert (seen.hosts, seen.problems) == (("lab0", "lab1"), gone)


def test_a_stop_that_takes_too_long_says_where_and_what_ends_it(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fall(monkeypatch, lab0=(b'{"stopped": true}',), lab1=())
    request = {"do": "stop", "job": "x", "wait": True, "now": False}
    with pytest.raises(Failed) as raised:
        VirtualClock().run(start._told(fleet, dict.fromkeys(NAMES), request, {}))
    assert (
        str(raised.value)
        == "host lab1: job x was told to stop, and has not saved and ended for 600 s: lockstep stop x --cluster lab --now ends it without a"
        " save"
    )


async def short_run(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, **answers: tuple[bytes, ...]) -> None:
    """Run something short on hosts that give these answers, until a line says `done`."""
    fall(monkeypatch, **answers)
    monkeypatch.setattr(shortruns, "build_agent", lambda **_: b"")
    monkeypatch.setattr(shortruns, "run_text", lambda _: "")
    briefs = [Brief(name, cast(Any, None), {}) for name in NAMES]
    await shortruns._run(fleet, briefs, lambda line: line == "done", 100.0)


def test_a_short_run_whose_files_a_host_never_takes_says_which(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failed, match=r"^nothing was started: host lab1 has not taken the job's files for 120 s$"):
        VirtualClock().run(short_run(fleet, monkeypatch, lab0=(PLACED,), lab1=()))


def test_for_the_ranks_of_a_job_the_host_of_node_0_alone_waits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, float] = {}

    async def answer(place: Place, _: bytes, request: str, **__: object) -> bytes:
        asked[place.name] = json.loads(request)["patience"]
        raise Failed("no answer")

    monkeypatch.setattr(fleets, "python_output", answer)
    answers, problems = asyncio.run(fleet.look_for("x", NAMES, 1.0))
    assert (asked, answers, list(problems)) == ({"host lab0": 1.0, "host lab1": 0.0}, {}, NAMES)


def test_at_most_32_hosts_are_asked_at_once_and_all_are_asked() -> None:
    names = [f"lab{number}" for number in range(80)]
    fleet = Fleet(HostsCluster(hosts=[Host(name=name) for name in names], ports="29400-29449"), "lab", "lab")
    now: list[str] = []
    most = 0

    async def work(name: str) -> str:
        nonlocal most
        now.append(name)
        most = max(most, len(now))
        await asyncio.sleep(0)
        now.remove(name)
        return name

    results, problems = asyncio.run(fleet.all(names, work))
    assert (list(results), problems, most) == (names, {}, 32)


def test_of_an_agent_that_fails_the_last_six_lines_are_told(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"line": f"line {number}"}).encode() for number in range(20)]
    with pytest.raises(Failed, match=r"host lab0 ended with 99: line 14 \| line 15 \| line 16 \| line 17 \| line 18 \| line 19$"):
        VirtualClock().run(short_run(fleet, monkeypatch, lab0=(PLACED, *lines, b'{"ended": 99}'), lab1=(PLACED,)))


def test_hosts_have_half_a_minute_to_remove_what_a_short_run_had(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    assert VirtualClock().seconds_of(short_run(fleet, monkeypatch, lab0=(PLACED, b'{"line": "done"}'), lab1=(PLACED,))) == 30.0


def test_a_short_run_that_states_no_limit_has_a_quarter_of_an_hour(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    async def run(fleet: Fleet, briefs: object, hear: object, seconds: float, *_: object) -> str:
        limits.append(seconds)
        return ""

    async def seats(*_: object, **__: object) -> list[Any]:
        return [SimpleNamespace(host=SimpleNamespace(name="lab0"), resolved=SimpleNamespace(transport=SimpleNamespace(value="TCP")))]

    for name, stub in (("_run", run), ("_seats", seats), ("_brief", lambda *_, **__: None)):
        monkeypatch.setattr(shortruns, name, stub)
    runs = shortruns.HostRuns(fleet, cast(Any, None), print)
    assert asyncio.run(runs.run(Short.PREFLIGHT, cast(Any, None), lambda line: True)) == ("", "TCP", 1)
    assert limits == [900.0]
