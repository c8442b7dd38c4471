"""The part of the Debug Adapter Protocol that VS Code needs to stop a script at a line and look at its variables."""

from __future__ import annotations

import json
import socket
from typing import Any


class Debugger:
    """A client of the debug adapter that listens at `port` of this machine."""

    def __init__(self, port: int, timeout_seconds: float = 60.0) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port), timeout_seconds)
        self._incoming = self._connection.makefile("rb")
        self._asked = 0
        self._unread: list[dict[str, Any]] = []

    def ask(self, command: str, **arguments: Any) -> int:
        """Send a request without waiting; its number."""
        self._asked += 1
        body = json.dumps({"seq": self._asked, "type": "request", "command": command, "arguments": arguments}).encode()
        self._connection.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return self._asked

    def result(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Answer to a request. Raises AssertionError if it failed."""
        return self.result_of(self.ask(command, **arguments))

    def result_of(self, number: int) -> dict[str, Any]:
        answer = self._next(type="response", request_seq=number)
        assert answer["success"], answer
        return dict(answer.get("body") or {})

    def event(self, name: str) -> dict[str, Any]:
        """The next event of this name."""
        return dict(self._next(type="event", event=name).get("body") or {})

    def close(self) -> None:
        self._incoming.close()
        self._connection.close()

    def _next(self, **wanted: Any) -> dict[str, Any]:
        while True:
            for message in self._unread:
                if wanted.items() <= message.items():
                    self._unread.remove(message)
                    return message
            length = int(self._incoming.readline().partition(b":")[2])
            assert self._incoming.readline() == b"\r\n"
            self._unread.append(json.loads(self._incoming.read(length)))
