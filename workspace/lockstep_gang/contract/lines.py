"""Lines over a connection, and how little of them anybody may send before a proof."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from lockstep_spec.codec import ContractError

LINE_BYTES_MAX = 4 * 1024 * 1024
"""Length of a message: a Hello with many ranks and their last lines fits; nothing else comes near."""
PROOF_BYTES_MAX = 8 * 1024
"""Length of a line before the proof: anybody who reaches the port can send one."""
PROOF_SECONDS = 10.0
KINDS_MAX = 32
REFUSED_SECONDS = 1.0
"""Time between two lines about refused connections: strangers must not fill a log."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ProvingReader(asyncio.StreamReader):
    """Reader that gives nobody much room before `proved`: neither for a line nor for what waits to be read."""

    def __init__(self, limit: int = PROOF_BYTES_MAX) -> None:
        super().__init__(limit=limit)

    def proved(self) -> None:
        self._limit = LINE_BYTES_MAX


async def next_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, with its end. Raises EOFError when the other side closed, ContractError for a line that is too long,
    OSError.
    """
    try:
        line = await reader.readline()
    except ValueError:
        raise ContractError("a line longer than any message was received") from None
    if not line.endswith(b"\n"):
        raise EOFError("the other side closed the connection")
    return line


def send_plain(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    """Send a line that nobody signs: what a proof is made of."""
    writer.write(json.dumps(value).encode() + b"\n")


def send_at_once(writer: asyncio.StreamWriter) -> None:
    """Let small messages go without waiting for more."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Refusals:
    """Tells of refused connections, not of each where many come."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._untold, self._told_at = say, 0, float("-inf")

    def add(self, text: str) -> None:
        self._untold += 1
        now = time.monotonic()
        if now - self._told_at >= REFUSED_SECONDS:
            others = f" (and {self._untold - 1} others since the last such line)" if self._untold > 1 else ""
            self._say(f"{text}{others}")
            self._untold, self._told_at = 0, now


class PassedOver:
    """Says of each kind of message that only another version knows, once, that it is passed over."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._kinds: set[str] = set()

    def add(self, kind: object) -> None:
        if str(kind) not in self._kinds and len(self._kinds) < KINDS_MAX:
            self._kinds.add(str(kind))
            self._say(f"passed over, and will pass over more like it: {kind}, which only another version of Lockstep knows")
