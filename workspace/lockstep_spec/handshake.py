"""Proof of one key by both ends of a connection, which then sign every message with a counter.

The end that listens sends a challenge; the other answers with its own nonce and a proof over both; the first answers with its proof.
Neither proof says anything about the key, and each end's is of no use to the other or in another connection. From both nonces comes
one key a direction. A message that is altered, repeated, left out or out of order is refused. Of a gang, the coordinator listens.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep_spec.codec import ContractError

Proved = TypeVar("Proved")
FORMAT = "lockstep-gang/1"
STRANGERS_MAX = 64
BOTH_WAYS = 2
"""socket.SHUT_RDWR."""


class ProofError(ContractError):
    """The other side doesn't hold the key, or a message is not the next one it sent."""


def new_nonce() -> str:
    return os.urandom(16).hex()


def mac(key: bytes, data: bytes) -> str:
    """HMAC-SHA256, in hex."""
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class Handshake:
    """The values both ends compute from the key, the job and the nonces of one connection."""

    def __init__(self, key: bytes, job_uid: str, node: int, coordinator_nonce: str, agent_nonce: str) -> None:
        self._key = key
        self._about = [FORMAT, job_uid, node, coordinator_nonce, agent_nonce]

    def agent_proof(self) -> str:
        return self._derive("agent's proof")

    def coordinator_proof(self) -> str:
        return self._derive("coordinator's proof")

    def to_coordinator(self) -> bytes:
        return bytes.fromhex(self._derive("agent to coordinator"))

    def to_agent(self) -> bytes:
        return bytes.fromhex(self._derive("coordinator to agent"))

    def _derive(self, purpose: str) -> str:
        return mac(self._key, _canonical([purpose, *self._about]))


def require_proof(expected: str, given: object) -> None:
    """Raises ProofError."""
    if not isinstance(given, str) or not hmac.compare_digest(expected.encode(), given.encode("utf-8", "replace")):
        raise ProofError("the other side's proof does not fit this job's key: both must read the same key and be of the same job")


class Sealer:
    """Signs the messages of one direction of one connection, in order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._counter = 0

    def seal(self, message: dict[str, Any]) -> bytes:
        """One line, newline included."""
        self._counter += 1
        signature = mac(self._key, _canonical([self._counter, message]))
        return json.dumps({"counter": self._counter, "message": message, "signature": signature}).encode() + b"\n"


class Opener:
    """Checks what a Sealer with the same key signed."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._counter = 0

    def open(self, line: bytes) -> dict[str, Any]:
        """The message. Raises ProofError when it is not exactly the next one of the other side."""
        value = read_object(line)
        message = value.get("message")
        expected = self._counter + 1
        if type(value.get("counter")) is not int or value["counter"] != expected or not isinstance(message, dict):
            raise ProofError(f"message {repr(value.get('counter'))[:60]} came where {expected} was due: repeated, lost or out of order")
        require_proof(mac(self._key, _canonical([expected, message])), value.get("signature"))
        self._counter = expected
        return message


Line = dict[str, Any]


def prove(say: Callable[[Line], None], hear: Callable[[], Line], key: bytes, about: str, *, listened: bool) -> tuple[Sealer, Opener]:
    """Prove the key to the other end, and have it proved, by plain lines that `say` sends and `hear` receives. Return what signs and what
    checks all further ones. `about`: what the connection is for, so that a proof opens no other port. Raises ProofError.
    """
    nonce = new_nonce()
    if listened:
        say({"nonce": nonce})
        answer = hear()
        shake = Handshake(key, about, 0, nonce, str(answer.get("nonce")))
        require_proof(shake.agent_proof(), answer.get("proof"))
        say({"proof": shake.coordinator_proof()})
        return Sealer(shake.to_agent()), Opener(shake.to_coordinator())
    shake = Handshake(key, about, 0, str(hear().get("nonce")), nonce)
    say({"nonce": nonce, "proof": shake.agent_proof()})
    require_proof(shake.coordinator_proof(), hear().get("proof"))
    return Sealer(shake.to_coordinator()), Opener(shake.to_agent())


class Strangers:
    """Sockets whose other end has proven nothing: beyond STRANGERS_MAX of them, the one that is there longest is hung up on. Otherwise
    whoever says nothing could keep others out.
    """

    def __init__(self) -> None:
        self._there: dict[Any, None] = {}

    def add(self, connection: Any) -> None:
        self._there[connection] = None
        for oldest in list(self._there)[:-STRANGERS_MAX]:
            self.discard(oldest)
            with contextlib.suppress(OSError):  # its thread sees the end, and closes it
                oldest.shutdown(BOTH_WAYS)

    def discard(self, connection: Any) -> None:
        """Leave out one that has proven itself, or is closed."""
        self._there.pop(connection, None)


def serve_proved(
    listener: Any, meet: Callable[[Any], Proved], answer: Callable[[Proved], None], errors: tuple[type[BaseException], ...]
) -> None:
    """Serve a listening socket until it is closed, each connection in a thread: `meet` has the other end prove itself, and `answer` gets
    what `meet` returns. `errors` of both end a connection.
    """
    strangers = Strangers()

    def attend(connection: Any) -> None:
        with connection, contextlib.suppress(*errors):
            try:
                proved = meet(connection)
            finally:
                strangers.discard(connection)
            answer(proved)

    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # closed
        strangers.add(connection)
        threading.Thread(target=attend, args=(connection,), daemon=True).start()


def read_object(line: bytes) -> dict[str, Any]:
    """A line as a JSON object. Raises ContractError."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ContractError(f"a line that is not JSON was received: {line[:60]!r}") from None
    if not isinstance(value, dict):
        raise ContractError(f"a line that is not a JSON object was received: {line[:60]!r}")
    return value
