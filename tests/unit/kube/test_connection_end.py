"""A session with the API server leaves no socket open, whatever the server does at its end."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.kube.connection import ApiConnection, mend_abort, session_to
from lockstep.kube.kubeconfig import Server
from lockstep.platforms.operator.certificate import make_certificates

ACCEPT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[str]:
    """A server that opens one websocket, answers its closing frame, and then reads no more: TLS's own closing is never answered."""
    made = make_certificates(("localhost",), datetime.now(UTC))
    (tmp_path / "pem").write_text(made.tls_key + made.tls_cert)
    (tmp_path / "ca").write_text(made.ca_cert)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "pem")
    ended = threading.Event()

    def serve() -> None:
        plain, _ = listening.accept()
        with tls.wrap_socket(plain, server_side=True) as connection:
            request = b""
            while b"\r\n\r\n" not in request:
                request += connection.recv(4096)
            headers = dict(line.partition(b": ")[::2] for line in request.split(b"\r\n"))
            proof = base64.b64encode(hashlib.sha1(headers[b"Sec-WebSocket-Key"] + ACCEPT).digest())  # noqa: S324 (the protocol's)
            upgraded = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
            connection.sendall(upgraded + proof + b"\r\n\r\n")
            connection.recv(4096)
            connection.sendall(b"\x88\x02\x03\xe8")
            ended.wait(60)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"https://127.0.0.1:{listening.getsockname()[1]}"
        ended.set()
        thread.join()


def test_a_websocket_whose_server_has_another_name_and_never_ends_tls_is_closed_with_the_session(silent: str, tmp_path: Path) -> None:
    server = Server(silent, tls=ssl.create_default_context(cafile=tmp_path / "ca"), tls_name="localhost")

    async def used() -> None:
        connection = ApiConnection(server)
        try:
            opened = await connection.websocket("/exec", (), None)
            await opened.close()
        finally:
            await connection.close()

    asyncio.run(asyncio.wait_for(used(), 30))
    gc.collect()  # an open socket would be told of here, which is an error


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of TLS connections, as Python 3.11.2 has it; one that was closed twice has no protocol any more."""

    class Transport:
        _ssl_protocol: Any = None

        def abort(self) -> None:
            self._ssl_protocol._abort()

    monkeypatch.setattr("asyncio.sslproto._SSLProtocolTransport", Transport)
    return Transport


@pytest.mark.parametrize(("python", "raises"), [((3, 11, 0), True), ((3, 11, 1), False), ((3, 11, 3), False), ((3, 11, 4), True)])
def test_a_closed_connection_may_be_aborted_also_where_python_forbids_it(python: tuple[int, ...], raises: bool, transport: Any) -> None:
    mend_abort(python)
    with pytest.raises(AttributeError) if raises else nullcontext():
        transport().abort()


async def test_a_session_mends_the_python_that_it_runs_in(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.kube.connection.sys", SimpleNamespace(version_info=(3, 11, 2, "final", 0)))

    async def unasked() -> str | None:
        return None

    await session_to(Server("https://127.0.0.1:1", None, None, unasked)).close()
    transport().abort()


def test_a_mended_connection_that_is_open_is_aborted(transport: Any) -> None:
    aborted: list[str] = []
    transport._ssl_protocol = SimpleNamespace(_abort=lambda: aborted.append("x"))
    mend_abort((3, 11, 2))
    transport().abort()
    assert aborted == ["x"]


async def test_a_stream_s_message_and_what_is_not_read_yet_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, int] = {}

    class Session:
        def __init__(self, read_bufsize: int, **_: Any) -> None:
            limits["waiting"] = read_bufsize

        async def ws_connect(self, url: str, max_msg_size: int, **_: Any) -> None:
            limits["message"] = max_msg_size

    monkeypatch.setattr("aiohttp.ClientSession", Session)
    await ApiConnection(Server("https://cluster")).websocket("/x", (), None)
    assert limits == {"waiting": 2 << 20, "message": 16 << 20}
