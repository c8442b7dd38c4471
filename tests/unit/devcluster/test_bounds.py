"""The embedded cluster and the bed of hosts: each wait ends after the time that is promised, and what is kept is kept no longer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.devcluster import cluster, provisioner, python_volume, rails, server
from lockstep.devcluster.host import machine, processes
from lockstep.devcluster.host.layout import Layout
from lockstep.devcluster.hosts import bed
from lockstep.devcluster.hosts.layout import BedLayout
from lockstep.kube.cluster import ApiError
from unit.virtual_time import VirtualClock, clock_of, forever


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return clock_of(monkeypatch, bed, cluster, processes, server, now=0.0)


def test_what_does_not_come_about_is_looked_at_ten_times_a_second_for_a_minute_and_a_half(clock: VirtualClock, tmp_path: Path) -> None:
    looks: list[float] = []
    with pytest.raises(cluster.ClusterError, match="the API did not happen in 90 s"):
        cluster._wait(Layout("x", 0, tmp_path), "the API", lambda: looks.append(clock.now) is not None)
    assert looks[:4] == pytest.approx([0, 0.1, 0.2, 0.3]) and looks[-1] == pytest.approx(90, abs=0.2)


def test_a_host_has_a_minute_and_a_half_to_boot(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(bed.socket, "create_connection", refuse)
    monkeypatch.setattr(processes, "running", lambda *_: "it")
    with pytest.raises(bed.BedError, match="doesn't answer"):
        bed.await_sshd(BedLayout(0, tmp_path).host(0))
    assert clock.now == pytest.approx(90, abs=0.1)


def test_a_daemon_that_does_not_end_is_killed_after_ten_seconds(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, int]] = []
    monkeypatch.setattr(processes, "start_ticks", lambda pid: 7)
    monkeypatch.setattr(os, "kill", lambda pid, number: told.append((clock.now, number)))
    processes.stop(processes.Daemon("etcd", 1, 7))
    assert told == [(0, signal.SIGTERM), (pytest.approx(10, abs=0.1), signal.SIGKILL)]
    assert clock.now == pytest.approx(20, abs=0.2)


@pytest.mark.parametrize(("after", "is_seen"), [(60_000, True), (1 << 16, False)])
def test_in_the_last_64_kibibytes_of_a_log_it_is_looked_for_why_a_daemon_ended(tmp_path: Path, after: int, is_seen: bool) -> None:
    (log := tmp_path / "log").write_bytes(b"too many open files\n" + b"x" * after)
    assert bool(machine.too_few_instances(log)) == is_seen


class Played:
    """An API server whose watches answer with events or failures, one after the other, and then no more."""

    def __init__(self, *answers: object) -> None:
        self.answers = iter(answers)

    async def __aenter__(self) -> Played:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def watch(self, *_: object) -> AsyncIterator[bytes]:
        answer = next(self.answers, None)
        if answer is None:
            await forever()
        if isinstance(answer, type):
            raise answer
        for event in cast(list[bytes], answer):
            yield event


def provision(monkeypatch: pytest.MonkeyPatch, clock: VirtualClock, api: Played, ends: Sequence[type[BaseException] | None]) -> list[float]:
    """Run the daemon until a round of work ends it, and return when rounds began. `ends`: how they end."""
    rounds: list[float] = []

    async def work(*_: object) -> None:
        rounds.append(clock.now)
        if (end := ends[len(rounds) - 1]) is not None:
            raise end

    monkeypatch.setattr(provisioner, "work_once", work)
    monkeypatch.setattr(provisioner, "administrator", lambda layout: SimpleNamespace(connected=lambda: api))
    with pytest.raises(SystemExit):
        clock.run(provisioner.serve(Layout("x", 0, Path("/x"))))
    return rounds


def test_claims_are_looked_at_every_ten_seconds_without_news_and_after_an_error_once(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provision(monkeypatch, clock, Played(), [None, None, ValueError, SystemExit]) == [0, 10, 20, 21]


def test_claims_are_looked_at_at_once_when_a_claim_or_a_volume_changes(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert provision(monkeypatch, clock, Played([b"changed"]), [None, None, SystemExit]) == [0, 0, 10]


def test_a_watch_that_ends_or_fails_is_news_and_begins_again_a_second_later(
    clock: VirtualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    news: list[float] = []
    played = cast(Any, Played([b"one", b"two"], OSError, OSError, [b"three"], OSError, SystemExit))
    with pytest.raises(SystemExit):
        clock.run(provisioner._follow(played, "Pod", cast(Any, SimpleNamespace(set=lambda: news.append(clock.now)))))
    assert news == [0, 0, 0, 1, 2, 3, 3, 4]
    assert capsys.readouterr().err == "provisioner: OSError: ; trying again\n" * 2


def test_three_copies_of_the_code_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (source := tmp_path / "lockstep").mkdir()
    monkeypatch.setattr(python_volume, "source_folders", lambda: [source])
    for number in range(5):
        (volume := tmp_path / "volume").mkdir(exist_ok=True)
        (source / "code.py").write_text(f"{number = }")
        os.utime(copy := python_volume.publish_code(volume), (number, number))
    assert sorted(path.stat().st_mtime for path in volume.glob("code-*")) == [2, 3, 4] and (volume / "code").resolve() == copy


def test_a_new_kind_has_twenty_seconds_to_be_served(clock: VirtualClock, tmp_path: Path) -> None:
    async def refuse(item: object) -> None:
        if item != rails.definition():
            raise ApiError(404, "NotFound", "")

    client: Any = SimpleNamespace(run=lambda work: asyncio.run(work(SimpleNamespace(apply=refuse))))
    server.create_attachments(client, Layout("x", 0, tmp_path), 1)
    assert clock.now == pytest.approx(20, abs=0.2)


def test_all_rails_that_were_laid_are_taken_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(rails.network, "run", lambda *command: commands.append(command))
    monkeypatch.setattr(rails.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(rails, "_is_link", lambda namespace, name: True)
    layout = Layout("x", 0, tmp_path)
    layout.state.mkdir(parents=True)
    rails.record(layout, 3)
    rails.take_up(layout, [cast(Any, SimpleNamespace(namespace="node-1"))])
    assert [command[-1] for command in commands] == ["rail1", "rail2", "rail3"]
