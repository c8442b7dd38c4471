"""One TCP connection between two ranks of a run: signed frames, whole files, and one deadline for everything."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from lockstep_train.base.durable import sync_directory

CHUNK_BYTES = 1 << 20
CHALLENGE_BYTES = 32
SIGNATURE_BYTES = 32
FRAME_BYTES_MAX = 1 << 16


class TransferError(OSError):
    """The other side refused, went away, or sent something else than it promised."""


class Line:
    """One connection with a deadline for everything on it."""

    def __init__(self, connection: socket.socket, token: bytes, deadline_seconds: float) -> None:
        self._connection = connection
        self._token = token
        self.challenge = b""
        self.allow(deadline_seconds)

    def allow(self, seconds: float) -> None:
        """From now on everything must be over in so many seconds."""
        self._end = time.monotonic() + seconds

    def _wait(self) -> socket.socket:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TransferError("the deadline has passed")
        self._connection.settimeout(left)
        return self._connection

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._wait().recv(min(size, CHUNK_BYTES))
            if not part:
                raise TransferError("the other side closed the connection")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def write(self, content: bytes) -> None:
        self._wait().sendall(content)

    def drain(self) -> None:
        """Read what the other side still sends, until it closes. A connection closed before that is reset, and what was said last is lost."""
        while self._wait().recv(CHUNK_BYTES):
            pass

    def send(self, role: str, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.write(len(body).to_bytes(4, "big") + body + self._signature(role, body))

    def receive(self, role: str) -> dict[str, Any]:
        """Raises TransferError unless it was signed for this connection by the other `role`."""
        size = int.from_bytes(self.read(4), "big")
        if size > FRAME_BYTES_MAX:
            raise TransferError("the frame is too long")
        body = self.read(size)
        if not hmac.compare_digest(self.read(SIGNATURE_BYTES), self._signature(role, body)):
            raise TransferError("the signature is wrong: the other side is not of this run")
        value = json.loads(body)
        if not isinstance(value, dict):
            raise TransferError("the frame holds no object")
        return value

    def _signature(self, role: str, body: bytes) -> bytes:
        return hmac.digest(self._token, role.encode() + self.challenge + body, "sha256")

    def send_file(self, path: Path, size: int) -> None:
        with path.open("rb") as file:
            left = size
            while left:
                chunk = file.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise TransferError(f"{path} is shorter than it should be")
                self.write(chunk)
                left -= len(chunk)

    def receive_file(self, path: Path, size: int, sha256: str) -> None:
        """Durable under its name, or not there."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        digest = hashlib.sha256()
        try:
            with temporary.open("wb") as file:
                left = size
                while left:
                    chunk = self.read(min(left, CHUNK_BYTES))
                    digest.update(chunk)
                    file.write(chunk)
                    left -= len(chunk)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != sha256:
                raise TransferError(f"{path.name} arrived with another checksum")
            temporary.replace(path)
            sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
