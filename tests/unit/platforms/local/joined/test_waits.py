"""A joiner that waits: for a launch, and for an earlier join of its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.api.errors import ConfigError
from lockstep.platforms.local.joined import join
from lockstep.platforms.local.joined.join import JoinRequest
from lockstep.platforms.local.joined.token import new_token
from lockstep.platforms.places.orders import Door
from unit.virtual_time import VirtualClock, clock_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return clock_of(monkeypatch, join, now=0.0)


@pytest.fixture
def told(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When something was said."""
    told: list[float] = []
    monkeypatch.setattr(join, "tell", lambda *_: told.append(clock.now))
    return told


def test_a_launch_is_looked_for_every_second_and_each_half_minute_that_is_said(
    clock: VirtualClock, told: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks: list[float] = []

    async def connect(*_: object) -> None:
        looks.append(clock.now)
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr(join, "connect", connect)
    request = JoinRequest(Door(("head", 29400), "1.0"), tmp_path, patience_seconds=100.0)
    with pytest.raises(ConfigError, match="no launch came to head:29400 in 100 s"):
        clock.run(join._Join(request, new_token(), tmp_path, 0)._connected())
    assert (looks, told) == ([float(second) for second in range(101)], [0, 30, 60, 90])


def test_an_agent_that_still_saves_is_waited_for_three_minutes(
    clock: VirtualClock, told: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Taken:
        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> Taken:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def bind(self, address: str) -> None:
            raise OSError

    monkeypatch.setattr(join.socket, "socket", Taken)
    request = JoinRequest(Door(("head", 29400), "1.0"), tmp_path)
    with pytest.raises(ConfigError, match="another lockstep join in "), join._held(request):
        pass
    assert clock.now == 180 and told == [0]
