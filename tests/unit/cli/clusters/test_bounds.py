"""Verbs about clusters wait, ask and show no more than they promise."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.cli.clusters import demo, difference
from lockstep.kube.aim import Connections
from lockstep.kube.cluster import Cluster
from lockstep.plan.ahead.live import Comparison
from lockstep.plan.diff import Change
from lockstep.platforms.clusters import imagebuild, install, waits
from lockstep.platforms.places.values import Volume
from support.fake_cluster import FakeCluster
from unit.kube.test_bounds import Recording
from unit.silent_place import SilentPlace
from unit.virtual_time import VirtualClock, clock_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return clock_of(monkeypatch, demo)


def test_ten_minutes_are_left_to_answer(clock: VirtualClock) -> None:
    volume = Volume(cast(Any, SilentPlace()), "/w", "/d")
    job = SimpleNamespace(status={"result": {"adapter": "/a"}}, volume=lambda *_: nullcontext(volume))
    assert clock.seconds_of(demo.answers(cast(Any, job))) == 600


def test_eight_objects_at_once_are_compared(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    place = SilentPlace()

    async def connect(context: object) -> object:
        return nullcontext(FakeCluster())

    async def would_change(*_: object) -> list[Change]:
        async with place.program([]):
            await asyncio.sleep(1)
        return []

    monkeypatch.setattr(Cluster, "connect", connect)
    monkeypatch.setattr("lockstep.cli.clusters.difference.would_change", would_change)
    objects = [{"kind": "Service", "metadata": {"name": f"s{number}"}} for number in range(20)]
    assert clock.run(difference._diff_deployment(objects, Connections())) == (False, 0)
    assert place.most == 8


def test_of_a_long_value_120_characters_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    difference.print_comparison(Comparison("Service/x", changes=(Change("spec.a", "b" * 500, "c" * 118),)))
    assert capsys.readouterr().out.splitlines()[1] == '    spec.a: "' + "c" * 118 + '" → "' + "b" * 119 + "…"


def test_an_operator_that_is_stuck_for_eight_seconds_is_given_up(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async def operator_wait(*_: object) -> waits.Wait:
        return waits.Wait("no room", "Full")

    monkeypatch.setattr(install, "operator_wait", operator_wait)
    with pytest.raises(install.InstallError, match="the operator can't start: no room"):
        clock.run(install.until_ready(FakeCluster().as_cluster, "ns", "x"))
    assert clock.now - 1000.0 == pytest.approx(8, abs=1.0)


def test_a_build_has_a_quarter_of_an_hour_to_take_the_files() -> None:
    connection: Any = Recording()
    with suppress(KeyError):  # (it answers with no build)
        config = {"kind": "BuildConfig", "metadata": {"name": "b"}}
        asyncio.run(imagebuild.build(Cluster(connection), [config], "ns", b"files", lambda line: None))
    assert connection.urls[-1].endswith("/b/instantiatebinary") and connection.limits[-1] == 900.0
