"""The door of a launch, spoken to as joiners do: who gets which node, who is sent away, and who comes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.platforms.local.joined.channel import connect
from lockstep.platforms.local.joined.lobby import Lobby
from lockstep.platforms.local.joined.machine import Joining, NodeMachine
from lockstep.platforms.local.joined.token import new_token
from lockstep_gang.contract.channel import Channel
from lockstep_spec.codec import to_json
from unit.platforms.local.joined.test_seats import launched

PORTS = iter(range(16000 + os.getpid() % 10 * 150, 17600, 2))
FIRST = NodeMachine("head", "1.0", "/usr/bin/python3", "/data/head", "127.0.0.1", "lo", ("0",))


def machine(name: str, **changes: Any) -> NodeMachine:
    return replace(FIRST, hostname=name, workspace=f"/data/{name}", **changes)


class Site:
    """A lobby, and joiners."""

    def __init__(self, nodes: int, attempts: int) -> None:
        self.job = replace(launched(gpusPerNode=None, nodes=nodes), nodes=nodes, port=next(PORTS))
        self.token, self.lobby = new_token(), Lobby(self.job, FIRST, attempts)
        self.channels: list[Channel] = []

    async def join(self, who: NodeMachine, node: int | None = None, attempts: int = 0) -> Channel:
        channel = await connect(("127.0.0.1", self.job.port), self.token)
        self.channels.append(channel)
        assert await channel.receive() == {"kind": "welcome", "job": "x"}
        channel.send({"kind": "joining", **to_json(Joining(who, node, attempts))})
        return channel

    async def refused(self, who: NodeMachine, node: int | None = None) -> str:
        message = await (await self.join(who, node)).receive()
        assert message["kind"] == "refused", message
        return str(message["message"])


@asynccontextmanager
async def site(nodes: int, attempts: int = 0) -> AsyncIterator[Site]:
    one = Site(nodes, attempts)
    await one.lobby.open()
    await one.lobby.admit(one.token)
    try:
        async with asyncio.timeout(30):
            yield one
    finally:
        for channel in one.channels:
            channel.abort()
        await one.lobby.end(0, "over", 1.0)
        await asyncio.sleep(0.01)


async def seat_of(channel: Channel) -> dict[str, Any]:
    while (message := await channel.receive())["kind"] != "assigned":
        assert message["kind"] == "waiting", message
    return message


async def test_machines_get_the_numbers_they_ask_for_and_the_others_those_that_are_left() -> None:
    async with site(4) as one:
        channels = [await one.join(machine("a")), await one.join(machine("b"), node=1), await one.join(machine("c"))]
        seats = [await seat_of(channel) for channel in channels]
        assert [seat["node"] for seat in seats] == [2, 1, 3]
        runs = await one.lobby.gather()
        assert [run.run_dir for run in runs] == [f"/data/{name}/workspace/runs/x" for name in ("head", "b", "a", "c")]
        assert [seat["run"]["runDir"] for seat in seats] == [f"/data/{name}/workspace/runs/x" for name in ("a", "b", "c")]


async def test_a_number_that_is_taken_or_is_not_there_is_refused() -> None:
    async with site(3) as one:
        await (await one.join(machine("a"), node=2)).receive()
        assert "node 2 is a (127.0.0.1) already: give each machine a number of its own" in await one.refused(machine("b"), node=2)
        assert "--node is 3, must be 1 to 2: the launch is node 0" in await one.refused(machine("b"), node=3)


async def test_a_machine_that_leaves_before_all_are_there_leaves_its_place() -> None:
    async with site(3) as one:
        first = await one.join(machine("a"))
        assert (await first.receive())["present"] == 2
        first.close()
        await first.wait_closed()
        second = await one.join(machine("b"))
        assert (await second.receive())["present"] == 2, "the one that left is not counted"
        third = await one.join(machine("c"))
        assert [(await seat_of(second))["node"], (await seat_of(third))["node"]] == [1, 2]


async def test_a_machine_that_comes_back_gets_its_node_though_its_old_connection_is_still_open() -> None:
    async with site(3) as one:
        await one.join(machine("a"))
        old = await one.join(machine("b"))
        assert (await seat_of(old))["node"] == 2
        new = await one.join(machine("b"))
        assert (await seat_of(new))["node"] == 2
        with pytest.raises((EOFError, OSError)):
            await old.receive()
        one.lobby.stop(now=False)
        assert await new.receive() == {"kind": "stop", "now": False}


async def test_a_job_that_has_its_machines_takes_no_other_one() -> None:
    async with site(2) as one:
        await seat_of(await one.join(machine("a")))
        reason = await one.refused(machine("late"))
        assert "the job's 2 machines are chosen (head (127.0.0.1), a (127.0.0.1)): stop it with Ctrl-C and launch it again" in reason


async def test_a_machine_that_comes_back_with_fewer_gpus_is_refused_since_the_others_count_on_its_ranks() -> None:
    async with site(2) as one:
        await seat_of(await one.join(machine("a", gpus=("0", "1"))))
        assert "it had 2 GPUs when the job started, and has 1 now" in await one.refused(machine("a"))


async def test_attempts_begin_above_the_highest_of_any_machine() -> None:
    async with site(3) as one:
        await one.join(machine("a"), attempts=4)
        await one.join(machine("b"), attempts=9)
        assert [run.attempts_before for run in await one.lobby.gather()] == [9, 9, 9]


async def test_attempts_begin_above_those_that_the_launch_s_machine_had_as_another_node() -> None:
    async with site(2, attempts=12) as one:
        await one.join(machine("a"), attempts=4)
        assert [run.attempts_before for run in await one.lobby.gather()] == [12, 12]


async def test_a_job_of_one_node_waits_for_nobody() -> None:
    async with site(1) as one:
        assert [run.nodes for run in await one.lobby.gather()] == [1]


async def test_of_65_connections_without_a_proof_the_oldest_is_closed() -> None:
    closed: list[int] = []

    class Stranger:
        def __init__(self, number: int) -> None:
            self.transport = SimpleNamespace(abort=lambda: closed.append(number))

    lobby = Site(2, 0).lobby
    lobby._connection = lambda *_: asyncio.Event().wait()  # type: ignore[method-assign,assignment,return-value]
    for number in range(65):
        assert closed == []
        lobby._accepted(cast(Any, None), cast(Any, Stranger(number)))
    assert closed == [0]
    await lobby.end(0, "over", 0.0)
