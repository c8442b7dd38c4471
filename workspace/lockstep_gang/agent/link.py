"""The agent's connection to the coordinator: made again whenever it is lost, silent for a while at most; and last words where it can't be
made.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep_gang.contract.channel import Channel, connect
from lockstep_gang.contract.lines import PassedOver
from lockstep_gang.contract.messages import AgentMessage, Hello, NewerKind, Order, Ping, Pong, message_to_json, order
from lockstep_gang.contract.placewords import words_of
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import PING_SECONDS, spread_seconds
from lockstep_gang.contract.trouble import Trouble, TroubleKind
from lockstep_gang.coordinator.network import resolved, trouble_of
from lockstep_spec.codec import ContractError
from lockstep_spec.words import printable_line

SAY_SECONDS = 10.0
BACKLOG_BYTES = 4 * 1024 * 1024
RETRY_SECONDS = (0.1, 1.0)
EAGER_TRIES = 60
"""Tries of a gang's agent that may connect at once before it waits longer: pods of one job come within seconds of each other."""
QUIET_SECONDS = 3 * PING_SECONDS
"""Silence after which a connection is made anew."""


@dataclass(frozen=True)
class Handlers:
    """Callbacks of the link: for the message that opens a connection, after it was sent, with every order, and with a line for the log."""

    hello: Callable[[], Hello]
    connected: Callable[[], None]
    take: Callable[[Order], None]
    say: Callable[[str], None]


class Link:
    """Connection of this node to the coordinator."""

    def __init__(self, run: Run, key: bytes, node: int, handlers: Handlers) -> None:
        self._run, self._key, self._node = run, key, node
        self._hello, self._connected_to, self._take, self._say = handlers.hello, handlers.connected, handlers.take, handlers.say
        self._passed_over = PassedOver(handlers.say)
        self._channel: Channel | None = None
        self._last_heard = time.monotonic()
        self.address = (run.addresses[0], run.coordinator_port)
        self.trouble: Trouble | None = None
        """Reason why it has never been connected, if there is more to it than a node 0 that isn't up yet."""
        self._was_connected = False

    @property
    def last_heard(self) -> float:
        """`time.monotonic` of the last sign of life from the coordinator."""
        return max(self._last_heard, self._channel.last_heard if self._channel is not None else 0.0)

    def send(self, message: AgentMessage) -> None:
        """Send at once. Without a connection the message is left out, since the next Hello says all that counts."""
        if self._channel is not None:
            self._channel.send(message_to_json(message))

    @property
    def has_room(self) -> bool:
        """True if there is a connection that takes what is sent: worth sending what can be left out."""
        return self._channel is not None and self._channel.backlog_bytes < BACKLOG_BYTES

    async def run(self) -> None:
        """Keep the connection up, until cancelled."""
        while True:
            channel = await self._connected()
            try:
                channel.send(message_to_json(self._hello()))
                self._channel = channel
                self._connected_to()
                await self._listen(channel)
            except ContractError as error:
                self._say(f"closed the connection to the coordinator: {error}")
            except (EOFError, OSError, asyncio.TimeoutError):  # noqa: UP041 (another class in Python 3.10)
                self._say("lost the connection to the coordinator")
            finally:
                self._last_heard = self.last_heard
                self._channel = None
                channel.close()
            await asyncio.sleep(random.uniform(0, spread_seconds(self._run.nodes)))  # noqa: S311 (no secret): all lost it at once

    async def _listen(self, channel: Channel) -> None:
        watching = asyncio.ensure_future(watch(channel, QUIET_SECONDS, channel.abort))
        try:
            while True:
                try:
                    message = order(await channel.receive())
                except NewerKind as error:
                    self._passed_over.add(error)
                    continue
                if isinstance(message, Ping):
                    self.send(Pong())
                else:
                    self._take(message)
        finally:
            watching.cancel()

    async def _connected(self) -> Channel:
        wait, say_at = RETRY_SECONDS[0], time.monotonic() + SAY_SECONDS
        spread, tries = spread_seconds(self._run.nodes), 0
        while True:
            try:
                if not self._was_connected:
                    await resolved(*self.address)
                channel = await connect(self.address, self._key, self._run.job.uid, self._node)
                self._was_connected, self.trouble = True, None
                return channel
            except (ContractError, EOFError, OSError, asyncio.TimeoutError) as error:  # noqa: UP041
                trouble = None if self._was_connected else trouble_of(error, *self.address, "node 0", words_of(self._run))
                # A pod that has no address yet has no name either.
                self.trouble = None if trouble is not None and trouble.kind is TroubleKind.NAME else trouble
                if time.monotonic() >= say_at:
                    self._say(f"waiting for the coordinator on node 0, {self.address[0]}:{self.address[1]} ({_reason(error)})")
                    say_at = time.monotonic() + SAY_SECONDS
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311 (no secret): nor do they try again at once
            tries += 1
            if spread or tries > EAGER_TRIES:
                wait = min(wait * 2, RETRY_SECONDS[1] + spread)


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "it closed the connection: does it have the same key, and the same job?"
    return str(error) or type(error).__name__


LOOK_SECONDS = 1.0
PAUSED_SECONDS = 2.0
"""Delay of a look that means that this process itself did not run: its pod was frozen, or its machine moved or starved."""


async def watch(link: Link | Channel, silence_seconds: float, unheard: Callable[[], None]) -> None:
    """Call `unheard` every second from `silence_seconds` of silence on, until cancelled. After a pause of this process the silence begins
    anew.
    """
    since = time.monotonic()
    while True:
        since = max(since, link.last_heard)
        left = since + silence_seconds - time.monotonic()
        if left <= 0:
            unheard()
        due = time.monotonic() + (min(left, LOOK_SECONDS) if left > 0 else LOOK_SECONDS)
        await asyncio.sleep(due - time.monotonic())
        if time.monotonic() - due > PAUSED_SECONDS:  # what was said meanwhile is still to be read
            since = time.monotonic()


LAST_WORDS = Path("/dev/termination-log")
"""File in which the kubelet reads them; only pods have it."""
LEFT = Path("/tmp")  # noqa: S108 (the pod's own volume, which outlives its containers)
PATIENCE_SECONDS = 6.0
CHECK_SECONDS = 0.5
CHARACTERS = 1000


class CutOff:
    """Watch for trouble that lasts, and leave last words: what the container of a node that reaches nobody says when it ends, which the
    kubelet keeps with the pod.

    So before anything runs there, it ends once with a sentence, is started again by the kubelet, and goes on trying. A sentence of each
    kind is left once a pod: the kubelet waits longer before every further start.
    """

    def __init__(self, trouble: Callable[[], Trouble | None], last_words: Path = LAST_WORDS, left: Path = LEFT) -> None:
        """`trouble`: what keeps this node from being heard while nothing runs on it; None: nothing, or there is work that must not end for
        it.
        """
        self._trouble, self._last_words, self._left = trouble, last_words, left

    async def wait(self, patience_seconds: float = PATIENCE_SECONDS) -> Trouble:
        """Return once the last words are left, after which the agent ends. Outside of a pod it never returns."""
        since, kind = time.monotonic(), ""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            trouble = self._trouble()
            if trouble is None or trouble.kind.value != kind:
                since, kind = time.monotonic(), trouble.kind.value if trouble is not None else ""
            if trouble is not None and time.monotonic() - since >= patience_seconds and self._leave(trouble):
                return trouble

    def _leave(self, trouble: Trouble) -> bool:
        """Write the last words. False: they were written before, or nobody would read them."""
        mark = self._left / f"lockstep-said-{trouble.kind.value}"
        try:
            if not self._last_words.exists() or mark.exists():
                return False
            mark.touch()
            self._last_words.write_text(printable_line(f"{trouble.kind.value}: {trouble.text}")[:CHARACTERS], encoding="utf-8")
        except OSError:
            return False
        return True
