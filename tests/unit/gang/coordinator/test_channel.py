"""Connections between agents and the coordinator over real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep_gang.agent.link import Handlers, Link
from lockstep_gang.agent.ranks.reports import parse_datagram
from lockstep_gang.build import build_id
from lockstep_gang.contract.channel import Channel, accept, connect, listen
from lockstep_gang.contract.lines import ProvingReader, next_line
from lockstep_gang.contract.messages import Hello, Leaving, Ping, Reported, Start, agent_message, message_to_json
from lockstep_gang.contract.run import Run
from lockstep_gang.coordinator.server import Server
from lockstep_spec.codec import ContractError
from lockstep_spec.handshake import Sealer
from unit.gang.cases import KEY, WORKSPACE, Gang, gang, make_run
from unit.gang.served import PATIENCE_SECONDS, listening

PROOF_BYTES_MAX = 8 * 1024


async def closed(channel: Channel) -> bool:
    with pytest.raises((EOFError, ConnectionError)):
        while True:
            await channel.receive()
    return True


def hello(node: int, instance: str = "a") -> dict[str, object]:
    return message_to_json(Hello(node, instance, 0, 0))


async def test_all_agents_that_prove_the_key_get_their_order_to_start(tmp_path: Path) -> None:
    async with listening(tmp_path) as scene:
        channels = [await scene.connect(node) for node in (0, 1)]
        for node, channel in enumerate(channels):
            channel.send(hello(node))
        assert [(await channel.receive())["attempt"] for channel in channels] == [1, 1]
        assert json.loads((tmp_path / "gang" / "attempts.jsonl").read_text())["attempt"] == 1


@pytest.mark.parametrize(("key", "uid", "node"), [(b"1" * 32, "uid-1", 1), (KEY, "another job", 1), (KEY, "uid-1", 2)])
async def test_nobody_else_is_heard(tmp_path: Path, key: bytes, uid: str, node: int) -> None:
    async with listening(tmp_path) as scene:
        with pytest.raises((EOFError, ConnectionError)):
            await scene.connect(node, key, uid)
        assert not any(n.connected for n in scene.coordinator.gang.nodes)
    assert any(line.startswith("refused a connection from 127.0.0.1: ") for line in scene.lines)


async def test_a_coordinator_without_the_key_is_not_obeyed(tmp_path: Path) -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"format": "lockstep-gang/1", "nonce": "00"}\n')
        await reader.readline()
        writer.write(b'{"proof": "0000"}\n')
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    with pytest.raises(ContractError, match="does not fit this job's key"):
        await connect(server.sockets[0].getsockname()[:2], KEY, "uid-1", 1)
    server.close()


@pytest.mark.parametrize(
    "line", [b"nonsense\n", b"[]\n", b'{"node": true, "nonce": "a", "proof": "b"}\n', b"[" * 100_000 + b"\n", b"x" * 5_000_000]
)
async def test_hostile_bytes_close_only_their_own_connection(tmp_path: Path, line: bytes) -> None:
    async with listening(tmp_path) as scene:
        reader, writer = await asyncio.open_connection(*scene.address)
        await reader.readline()
        writer.write(line)
        with pytest.raises((ConnectionError, EOFError)):
            await writer.drain()
            await reader.readexactly(1)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        channel = await scene.connect(0)
        channel.send(hello(0))
        await scene.hears(0)


async def test_before_the_proof_a_stranger_gets_no_room_and_fills_no_log(tmp_path: Path) -> None:
    async with listening(tmp_path) as scene:
        for _ in range(5):
            reader, writer = await asyncio.open_connection(*scene.address)
            await reader.readline()
            writer.write(b'{"node": "' + b"x" * 2 * PROOF_BYTES_MAX + b'"}')  # no end of its line, and nothing after it
            assert await reader.read() == b""
            writer.close()
            reader, writer = await asyncio.open_connection(*scene.address)
            await reader.readline()
            writer.write(b'{"node": "' + b"x" * 1000 + b'"}\n')
            assert await reader.read() == b""
            writer.close()
        channel = await scene.connect(0)
        channel.send(hello(0, "a" * 4 * PROOF_BYTES_MAX))
        await scene.hears(0, "a" * 4 * PROOF_BYTES_MAX)
    refused = [line for line in scene.lines if line.startswith("refused a connection from 127.0.0.1: ")]
    assert 1 <= len(refused) < 10 and max(map(len, refused)) < 300


async def test_strangers_that_only_connect_make_room_for_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep_gang.coordinator.server.STRANGERS_MAX", 3)

    async with listening(tmp_path) as scene:
        strangers = [await asyncio.open_connection(*scene.address) for _ in range(8)]
        for reader, _ in strangers[:3]:
            await reader.readline()
            with suppress(ConnectionError):
                assert await reader.read() == b""  # the oldest are closed long before their time is over
        channel = await scene.connect(0)
        channel.send(hello(0))
        await scene.hears(0)
        for _, writer in strangers:
            writer.close()


@pytest.mark.parametrize("value", [{"type": []}, {"type": {}}, {"type": None}, {"type": 1}, [], None])
def test_a_message_without_a_known_type_is_refused_in_words(value: object) -> None:
    with pytest.raises(ContractError, match="whose type is one of"):
        agent_message(value)
    assert isinstance(parse_datagram(json.dumps({"event": value}).encode()), ContractError)


async def test_messages_of_unknown_kinds_are_passed_over_and_another_build_is_named_once(tmp_path: Path) -> None:
    async with listening(tmp_path) as scene:
        channels = [await scene.connect(node) for node in (0, 1)]
        for node, channel in enumerate(channels):
            channel.send(hello(node) | {"build": ("", "0ther")[node], "future": 1})
        for node, channel in enumerate(channels):
            await channel.receive()
            for _ in range(2):
                channel.send({"type": "Fused", "node": node})
                channel.send(message_to_json(Reported(1, {"event": "fuse", "rank": node})))
        channels[1].send(message_to_json(Leaving()))
        while not scene.coordinator.gang.nodes[1].leaving:  # noqa: ASYNC110 (no event of it)
            await asyncio.sleep(0)
        assert all(node.connected for node in scene.coordinator.gang.nodes)
        scene.coordinator.connected(1, channels[1], Hello(1, "a", 0, 0, build="0ther"))
    passed_over = [line.split(": ")[1].split(",")[0] for line in scene.lines if line.startswith("passed over")]
    assert sorted(passed_over) == ["message of an agent Fused", "rank report fuse"]
    warnings = [line for line in scene.lines if "0ther" in line]
    assert warnings == [f"warning, the agent of node 1 is of build 0ther of Lockstep, and node 0's agent of {build_id()}; the job goes on"]


def test_orders_of_an_unknown_kind_are_passed_over() -> None:
    taken, lines, received = list[object](), list[str](), [{"type": "Fuse"}, {"type": "Fuse"}, message_to_json(Start(1, 0, "a", 1))]

    async def receive() -> object:
        if not received:
            raise EOFError
        return received.pop(0)

    made = Link(make_run(), KEY, 1, Handlers(lambda: Hello(1, "a", 0, 0), lambda: None, taken.append, lines.append))
    channel = cast(Channel, SimpleNamespace(receive=receive, last_heard=0.0, abort=lambda: None))
    with pytest.raises(EOFError):
        asyncio.run(made._listen(channel))
    assert taken == [Start(1, 0, "a", 1)]
    assert lines == ["passed over, and will pass over more like it: order Fuse, which only another version of Lockstep knows"]


class Replaying(Sealer):
    """Sends its first line again and again."""

    first = b""

    def seal(self, message: dict[str, object]) -> bytes:
        self.first = self.first or super().seal(message)
        return self.first


async def test_a_replayed_message_closes_the_connection(tmp_path: Path) -> None:
    async with listening(tmp_path) as scene:
        channel = await scene.connect(0)
        channel._sealer = Replaying(channel._sealer._key)
        channel.send(hello(0))
        channel.send(hello(0))
        assert await closed(channel)
    assert any("repeated, lost or out of order" in line for line in scene.lines)


async def test_a_node_speaks_only_for_itself(tmp_path: Path) -> None:
    async with listening(tmp_path) as scene:
        channel = await scene.connect(0)
        channel.send(hello(1))
        assert await closed(channel)
        assert not any(n.connected for n in scene.coordinator.gang.nodes)


async def test_the_newer_connection_of_a_node_takes_the_place_of_the_older(tmp_path: Path) -> None:
    async with listening(tmp_path) as scene:
        older, newer = [await scene.connect(0) for _ in range(2)]
        older.send(hello(0))
        await scene.hears(0)
        newer.send(hello(0))
        assert await closed(older)
        assert scene.coordinator.gang.nodes[0].connected


async def test_an_agent_that_was_replaced_does_not_take_its_place_back(tmp_path: Path) -> None:
    """Its pod was taken for lost and replaced; then its machine is back."""

    async with listening(tmp_path) as scene:
        lost, replacement, returned, other = [await scene.connect(node) for node in (1, 1, 1, 0)]
        for channel, instance in ((lost, "old"), (replacement, "new")):
            channel.send(hello(1, instance))
            await scene.hears(1, instance)
        assert await closed(lost)
        returned.send(hello(1, "old"))
        await scene.says("its old agent is back")
        other.send(hello(0))
        await scene.hears(0)
        assert (await replacement.receive())["type"] == "Start"


SHORT_SILENCE = """
import asyncio, sys
from pathlib import Path
from lockstep_gang.agent.agent import Agent
from lockstep_gang.agent.ranks.reports import make_folder
from lockstep_gang.agent.log import Console
from lockstep_gang.agent.ranks.ranks import LocalNode
from lockstep_gang.contract.run import parse_run
run = parse_run(Path(sys.argv[1]).read_text())
folder = make_folder(Path(sys.argv[2]))
async def main():
    await Agent(run, bytes.fromhex("5a" * 32), LocalNode(run, 1, sys.argv[1], folder / "report.sock", folder), Console(1),
                silence_seconds=0.5).run()
asyncio.run(main())
"""


@asynccontextmanager
async def coordinator_of(run: Run) -> AsyncIterator[asyncio.Queue[tuple[Channel, dict[str, object]]]]:
    """It says nothing by itself. Each agent that comes, with the first that it said."""
    arrived: asyncio.Queue[tuple[Channel, dict[str, object]]] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, channel = await accept((reader, writer), KEY, run.job.uid, 2)
        await arrived.put((channel, await channel.receive()))

    async with await asyncio.start_server(serve, "127.0.0.1", run.coordinator_port):
        yield arrived


@contextmanager
def agent_1(code: str, agents: Gang) -> Iterator[subprocess.Popen[bytes]]:
    """Node 1's agent, by a program of the test's own."""
    environment = {**os.environ, "PYTHONPATH": str(WORKSPACE)}
    command = [sys.executable, "-S", "-c", code, str(agents.run_path), agents.private.name]
    agent = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield agent
    finally:
        agent.kill()
        agent.wait()


def test_an_agent_that_hears_nothing_stops_its_ranks_and_tells_so_when_the_coordinator_is_back(tmp_path: Path) -> None:
    async def scene(run: Run) -> tuple[dict[str, object], dict[str, object]]:
        async with coordinator_of(run) as arrived:
            channel, _ = await arrived.get()
            channel.send(message_to_json(Start(1, 0, "127.0.0.1", 29500)))
            while (said := await channel.receive())["type"] != "Exited":  # nobody pings
                pass
            channel.close()
            await channel.wait_closed()
            channel, again = await arrived.get()
            channel.close()
            await channel.wait_closed()
            return said, again

    with gang(tmp_path) as agents:
        run = agents.write("import signal\nsignal.pause()")
        with agent_1(SHORT_SILENCE, agents):
            said, again = asyncio.run(asyncio.wait_for(scene(run), PATIENCE_SECONDS))
    assert said["exit"] == {
        "rank": 1,
        "exitCode": None,
        "signal": "SIGKILL",
        "ordered": True,
        "error": None,
        "lastLines": [],
        "freshFrom": 0,
        "outOfMemory": None,
        "left": [],
        "processLimit": "",
        "noRoom": "",
        "elsewhere": "",
    }
    assert (again["attempt"], again["knownAttempt"]) == (0, 1)


FROZEN = SHORT_SILENCE.replace("silence_seconds=0.5", "silence_seconds=1").replace(
    "folder = ", "from lockstep_gang.agent import link\nlink.LOOK_SECONDS, link.PAUSED_SECONDS = 0.1, 0.5\nfolder = "
)


def test_an_agent_that_was_frozen_waits_for_the_coordinator_anew_before_it_stops_its_healthy_ranks(tmp_path: Path) -> None:
    async def scene(run: Run, agent: subprocess.Popen[bytes]) -> list[object]:
        async with coordinator_of(run) as arrived:
            channel, _ = await arrived.get()
            channel.send(message_to_json(Start(1, 0, "127.0.0.1", 29500)))
            said: list[object] = [(await channel.receive())["type"]]
            agent.send_signal(signal.SIGSTOP)
            await asyncio.sleep(2)
            agent.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.2)
            channel.send(message_to_json(Ping()))
            while len(said) < 3:
                said.append((await channel.receive())["type"])
            channel.close()
            await channel.wait_closed()
            return said

    with gang(tmp_path) as agents:
        run = agents.write("import signal\nsignal.pause()")
        with agent_1(FROZEN, agents) as agent:
            said = asyncio.run(asyncio.wait_for(scene(run, agent), PATIENCE_SECONDS))
    assert said == ["Started", "Pong", "Exited"]


async def test_of_connections_without_a_proof_the_oldest_is_closed_once_there_are_128_beside_one_of_each_node() -> None:
    async def connection(*_: object) -> None:
        await asyncio.Event().wait()

    aborted: list[int] = []
    made = Server.__new__(Server)
    made._run, made._connections, made._unproved = make_run(nodes=2), set(), {}
    made._connection = connection  # type: ignore[method-assign]
    for number in range(135):
        transport = SimpleNamespace(abort=partial(aborted.append, number))
        made._accepted(cast(Any, None), cast(Any, Writer(transport)))
    for task in made._connections:
        task.cancel()
    assert aborted == [0, 1, 2, 3, 4]


class Writer:
    """An end of a connection."""

    def __init__(self, transport: object) -> None:
        self.transport = transport


@pytest.mark.parametrize(("is_proved", "most"), [(False, 8 << 10), (True, 4 << 20)])
def test_a_line_has_eight_kibibytes_before_the_proof_and_four_mebibytes_after_it(is_proved: bool, most: int) -> None:
    async def read(size: int) -> int:
        reader = ProvingReader()
        if is_proved:
            reader.proved()
        reader.feed_data(b"x" * size + b"\n")
        return len(await next_line(reader))

    assert asyncio.run(read(most)) == most + 1
    with pytest.raises(ContractError, match="longer than any message"):
        asyncio.run(read(most + 1))


def test_a_thousand_agents_may_come_in_the_second_in_which_none_is_taken() -> None:
    async def waiting_at_most() -> int:
        async with await listen(lambda *_: None, "127.0.0.1", 0) as serving:
            info = serving.sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        return int.from_bytes(info[28:], sys.byteorder)  # tcpi_sacked, of a socket that listens its backlog

    assert asyncio.run(waiting_at_most()) == min(1024, int(Path("/proc/sys/net/core/somaxconn").read_text()))


@pytest.mark.parametrize("unacknowledged", [0, 3])
def test_what_the_other_side_s_machine_has_acknowledged_has_arrived(unacknowledged: int) -> None:
    info = bytes(24) + unacknowledged.to_bytes(4, sys.byteorder) + bytes(76)
    kernel = SimpleNamespace(getsockopt=lambda level, option, size: info[:size])
    transport = SimpleNamespace(get_write_buffer_size=lambda: 0)
    writer = cast(Any, SimpleNamespace(get_extra_info=lambda name: kernel, transport=transport))
    assert Channel((cast(Any, None), writer), Sealer(KEY), cast(Any, None)).arrives is (unacknowledged == 0)
