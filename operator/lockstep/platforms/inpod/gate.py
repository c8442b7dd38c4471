"""Guard in front of a program that shows itself to a browser and has no authentication of its own: every request is checked.

Sent as text into whatever image the job has, so: the standard library of Python 3.10.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from email.message import Message
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode

from lockstep_spec.handshake import Strangers

HEAD_SECONDS = 30.0
SLASHES = "/\\"
"""Characters that a browser takes for the beginning of another server's name, where an address begins with two."""
OF_CONNECTION = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-connection"})
"""Headers that hold for one connection alone."""


Refusal = tuple[str, list[tuple[str, str]], bytes]
"""Status, headers and body of an answer."""


class Gate:
    """Checks every request. The first one needs ?token=…; after that, a cookie of this server alone replaces the token.

    Cookies know no ports, so each server has a host name of its own, which leads to this machine (RFC 6761), and asks for no other.
    """

    def __init__(self, token: str, verb: str, name: str) -> None:
        self._token, self._name = token, name
        self._cookie, self._value = name.partition(".")[0], secrets.token_urlsafe(24)
        self._refusal = f"open the address that `lockstep {verb}` has printed: it holds the token\n"
        self._misdirected = (
            f"open the address that `lockstep {verb}` has printed, by its name {name}: other names are refused, since their cookies are"
            f" other servers', too. If your browser doesn't find it, take Firefox or Chrome, or add `127.0.0.1 {name}` to your hosts file\n"
        )

    def refused(self, target: str, headers: Message) -> Refusal | None:
        """Return the answer to a request that is not let in, or lets the browser in; None: the program behind the gate answers it."""
        path, _, query = target.partition("?")
        hosts, origins = headers.get_all("Host", []), headers.get_all("Origin", [])
        if len(hosts) != 1 or hosts[0].rpartition(":")[0] != self._name or not target.startswith("/"):
            return "421 Misdirected Request", [], self._misdirected.encode()
        is_asked_by_page = headers.get("Sec-Fetch-Mode", "navigate") != "navigate"
        if any(origin != f"http://{hosts[0]}" for origin in origins) or (
            is_asked_by_page and headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none")
        ):
            return "403 Forbidden", [], b"a page of another server asks\n"
        if _is(self._token, parse_qs(query).get("token", [""])[0]):
            return "302 Found", self._redirect(path, query), b""
        pairs = (pair.partition("=") for cookies in headers.get_all("Cookie", []) for pair in cookies.split(";"))
        if any(name.strip() == self._cookie and _is(self._value, value.strip()) for name, _, value in pairs):
            return None
        return "401 Unauthorized", [], self._refusal.encode()

    def _redirect(self, path: str, query: str) -> list[tuple[str, str]]:
        """Headers that lead to the same page without the token, and leave the cookie."""
        rest = urlencode([(key, value) for key, value in parse_qsl(query, keep_blank_values=True) if key != "token"])
        location = f"/{path.strip(SLASHES)}" + (f"?{rest}" if rest else "")
        cookie = f"{self._cookie}={self._value}; Path=/; HttpOnly; SameSite=Strict"
        return [("Location", location), ("Set-Cookie", cookie), ("Referrer-Policy", "no-referrer")]


def _is(expected: str, offered: str) -> bool:
    return hmac.compare_digest(offered.encode("utf-8", "replace"), expected.encode())


class Guard(BaseHTTPRequestHandler):
    """One connection of a browser: each of its requests is checked, then answered by the program behind the gate."""

    protocol_version, timeout, error_message_format = "HTTP/1.1", HEAD_SECONDS, ""
    server: GuardServer

    def answer(self) -> None:
        length, *more = self.headers.get_all("Content-Length", ["0"])
        refusal = self.server.gate.refused(self.path, self.headers)
        if refusal is None and ("Transfer-Encoding" in self.headers or more or not length.isdecimal()):
            refusal = "411 Length Required", [], b""
        if refusal is not None:
            return self._refuse(*refusal)
        self.server.strangers.discard(self.connection)
        self.close_connection = True  # unless the answer comes to its end
        with contextlib.suppress(OSError, HTTPException), socket.socket(socket.AF_UNIX) as program:
            program.connect(self.server.program)
            self._ask(program, int(length))
            self._pass_on(program)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer

    def _refuse(self, status: str, headers: list[tuple[str, str]], body: bytes) -> None:
        code, _, reason = status.partition(" ")
        self.send_response_only(int(code), reason)
        for name, value in (*headers, ("Content-Type", "text/plain"), ("Content-Length", str(len(body))), ("Connection", "close")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _ask(self, program: socket.socket, length: int) -> None:
        """Send the request on, as the only one of its connection."""
        upgrades = "upgrade" in self.headers.get("Connection", "").lower()
        kept = [f"{name}: {value}" for name, value in self.headers.items() if upgrades or name.lower() not in OF_CONNECTION]
        lines = [f"{self.command} {self.path} HTTP/1.1", *kept, *([] if upgrades else ["Connection: close"]), "", ""]
        program.sendall("\r\n".join(lines).encode("latin-1"))
        while length and (data := self.rfile.read1(min(length, 1 << 16))):
            program.sendall(data)
            length -= len(data)

    def _pass_on(self, program: socket.socket) -> None:
        answer = HTTPResponse(program, method=self.command)
        answer.begin()
        switched, endless = answer.status == HTTPStatus.SWITCHING_PROTOCOLS, answer.length is None
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.headers.items():
            if switched or name.lower() not in OF_CONNECTION:
                self.send_header(name, value)
        self.send_header("Referrer-Policy", "same-origin")  # who knows this server's name can get its cookie, by another port of it
        if endless:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if switched:
            self.connection.settimeout(None)
            back = threading.Thread(target=relay, args=(answer.fp.read1, self.connection), daemon=True)
            back.start()
            relay(self.rfile.read1, program)
            return back.join()
        while data := answer.read1(1 << 16):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if endless else data)
        if endless:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = bool(answer.length) or self.headers.get("Connection", "").lower() == "close"

    def log_message(self, *_: object) -> None: ...


class GuardServer(socketserver.ThreadingTCPServer):
    """Port of the guard. `server_activate` lets browsers in."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, port: int, gate: Gate, program: str) -> None:
        """Take the port, so that no other process listens there while the program starts."""
        super().__init__(("127.0.0.1", port), Guard, bind_and_activate=False)
        self.gate, self.program = gate, program
        self.strangers = Strangers()
        self.server_bind()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:  # too many files for now
            print(f"a connection was refused: {error}", file=sys.stderr, flush=True)
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        self.strangers.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.strangers.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # (who hangs up has no place among the program's last words)
            super().handle_error(request, client_address)


def relay(read: Callable[[int], bytes], target: socket.socket) -> None:
    """Pass bytes on until the source ends, then end the target's input."""
    with contextlib.suppress(OSError, ValueError):
        while data := read(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
