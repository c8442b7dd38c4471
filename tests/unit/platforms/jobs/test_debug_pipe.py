"""The way of a debugger's editor on this machine to the socket at which a script waits: one connection, of this user."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from lockstep.kube.forward import is_own
from lockstep.platforms.jobs.editor import piped
from support.process_place import ProcessPlace

CONNECT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket() as connection:
    connection.connect(("127.0.0.1", int(sys.argv[1])))
    connection.sendall(sys.argv[3].encode())
    print(connection.makefile().read())
"""


HERE = ProcessPlace(python=(sys.executable,))
HI = 'Content-Length: 4\r\n\r\n"hi"'


def frame(**message: object) -> bytes:
    body = json.dumps(message).encode()
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


async def said_by(port: int, user: int, words: str = HI) -> str:
    """What a program of this user hears that says something to the port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONNECT, str(port), str(user), words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    return (await process.communicate())[0].decode().strip()


async def test_one_editor_of_this_user_reaches_the_script_and_others_are_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(type="response", hears=(await reader.read(99)).decode()))
        writer.close()

    async with await asyncio.start_unix_server(script, tmp_path / "s"), piped(HERE, str(tmp_path / "s"), 0, refused.append) as port:
        strangers = [65534] if os.getuid() == 0 else []
        for user in strangers:
            assert await said_by(port, user) == ""
        assert '\\"hi\\"' in await said_by(port, os.getuid())
        assert len(refused) == len(strangers)
        _, first = await asyncio.open_connection("127.0.0.1", port)
        assert await said_by(port, os.getuid()) == ""
        assert len(refused) == len(strangers) + 1
        first.close()
    assert refused[-1] == "a second connection was refused: the debugger has one editor"


@pytest.mark.parametrize(
    "words", ["POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + HI, "Content-Length: 4\r\nHost: a\r\n\r\nevil", "x" * 100_000, "\r\n\r\n"]
)
async def test_what_a_web_page_can_send_reaches_no_script(tmp_path: Path, words: str) -> None:
    heard: list[bytes] = []
    told: list[str] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())
        writer.close()

    async with await asyncio.start_unix_server(script, tmp_path / "s"), piped(HERE, str(tmp_path / "s"), 0, told.append) as port:
        assert await said_by(port, os.getuid(), words) == ""
    assert heard in ([], [b""]) and "does not speak the Debug Adapter Protocol" in told[0]


async def test_a_pod_asks_nothing_of_the_editor(tmp_path: Path) -> None:
    events = [frame(type="event", event=name) for name in ("debugpyAttach", "stopped")]
    asks = [frame(type="request", command=name, arguments={"args": ["touch", "/x"]}) for name in ("runInTerminal", "startDebugging")]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        others = b"Content-Length: 3\r\n\r\n[1]" + b"Content-Length: 1\r\n\r\n{"
        writer.write(asks[0] + events[0] + others + events[1] + asks[1] + frame(type="response", command="attach"))
        writer.close()

    async with await asyncio.start_unix_server(script, tmp_path / "s"), piped(HERE, str(tmp_path / "s"), 0, print) as port:
        heard = await said_by(port, os.getuid())
    assert [json.loads(line[: line.rindex("}") + 1]) for line in heard.splitlines() if line.startswith("{")] == [
        {"type": "event", "event": "stopped"},
        {"type": "response", "command": "attach"},
    ]


async def test_a_connection_of_which_the_kernel_knows_nothing_is_nobody_s() -> None:
    assert not is_own(("127.0.0.1", 1), ("127.0.0.1", 2))


async def test_a_script_s_own_port_is_reached_again_and_again_and_one_where_nothing_waits_is_told() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(type="response", hears=(await reader.read(99)).decode()))
        writer.close()

    told: list[str] = []
    async with await asyncio.start_server(script, "127.0.0.1", 0) as server:
        at = server.sockets[0].getsockname()[1]
        async with piped(HERE, str(at), 0, told.append) as port:
            for _ in range(2):
                assert "hears" in await said_by(port, os.getuid())
            server.close()
            assert await said_by(port, os.getuid()) == ""
    assert told == [f"the debugger's connection ended: here: no script waits for a debugger at {at}: Connection refused"]
