"""A copy to many hosts that crosses this machine's link once: to the first over ssh, from there host to host, while it arrives.

Hosts don't log in to each other. Each listens on its stated address for the next one, and both prove a key that is made for one try and
reaches them over ssh. A host that can't reach the one before it gets its files from this machine instead, and that is said. Where something
breaks, all begin again with what has arrived.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.api.errors import ConfigError, Failed
from lockstep.plan.hosts.facts import HostFacts
from lockstep.plan.hosts.place import addresses_of
from lockstep.platforms.files.transfer import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, TRIES, Carried, Sender, TransferProgress, between
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.hosts.ssh import HostUnreachable
from lockstep.platforms.inpod import carry, source_of
from lockstep.platforms.inpod.wire import Gone, Wire
from lockstep.platforms.onhost import station
from lockstep.programs import Broken, Place, Program, ProgramFailed, answer_of, lines_in, python_program

BEAT_SECONDS = 15.0
PREPARE_SECONDS = 60.0
LAST_WORDS_SECONDS = 1.0
_BEAT = b'{"busy": true}\n'
Say = Callable[[str], None]


@dataclass(frozen=True)
class Stop:
    """A host of the chain."""

    host: str
    place: Place
    target: str
    """Path that the copy gets there."""
    roots: tuple[str, ...]
    """Folders that it must be below."""
    address: str | None
    """Address at which the next host reaches it; None: nobody knows one."""


def stated_addresses(fleet: Fleet, hosts: Mapping[str, HostFacts]) -> Sequence[str | None]:
    """Return the address of each host as the next one reaches it; None: nobody knows one."""
    try:
        return addresses_of([fleet.cluster.host(host) for host in hosts], hosts)
    except ConfigError:  # said for every host that this concerns
        return [fleet.cluster.host(host).address for host in hosts]


class Chain:
    """One copy: from a path of this machine, or of its first host, to all of its hosts."""

    def __init__(
        self,
        stops: Sequence[Stop],
        source: str,
        ports: Sequence[int],
        progress: Mapping[str, TransferProgress],
        say: Say,
        *,
        is_there: bool = False,
        private: bool = False,
        sender: Sender | None = None,
    ) -> None:
        """`is_there`: the source is a path of the first host, and this machine sends nothing. `say` gets each way around as one line.

        `private`: only the user of each host may write to the files; else that user's own umask counts there.
        """
        self._stops, self._source, self._ports = {stop.host: stop for stop in stops}, source, list(ports)
        self._progress, self._say, self._is_there, self._private = progress, say, is_there, private
        self._sender = sender
        self.results: dict[str, Carried | Exception] = {}
        """Outcome on each host."""
        self._said: set[str] = set()

    async def run(self) -> dict[str, Carried | Exception]:
        """Copy, again after something broke, as long as it makes progress. Return what became of each host."""
        left, pause = TRIES, FIRST_PAUSE_SECONDS
        first = True
        while True:
            before = self._passed(), len(self.results)
            broken = await self._try(first=first)
            pending = [host for host in self._stops if host not in self.results]
            if not pending:
                return {host: self.results[host] for host in self._stops}
            first = False
            left, pause = (
                (TRIES, FIRST_PAUSE_SECONDS)
                if (self._passed(), len(self.results)) > before
                else (left - 1, min(2 * pause, LONGEST_PAUSE_SECONDS))
            )
            if left == 0:
                for host in pending:
                    reason = broken.get(host) or "another host broke the chain"
                    self.results[host] = Failed(f"{reason}; what has arrived is kept: run the same command again to continue")
            elif any(host in broken for host in pending):
                await asyncio.sleep(pause)

    def _passed(self) -> int:
        return sum(progress.passed for progress in self._progress.values())

    def _fail(self, host: str, error: Exception) -> None:
        if not isinstance(self.results.get(host), Carried):
            self.results[host] = error

    async def _try(self, *, first: bool) -> dict[str, str]:
        """Copy once to all hosts that didn't fail. Return why those broke that are to be tried again; all that is known for good is in
        `results`.
        """
        stops = [stop for host, stop in self._stops.items() if not isinstance(self.results.get(host), Exception)]
        broken: dict[str, str] = {}
        async with AsyncExitStack() as stack:
            links: list[_Link] = []
            opened = await asyncio.gather(*(stack.enter_async_context(_opened(stop)) for stop in stops), return_exceptions=True)
            for stop, link in zip(stops, opened, strict=True):
                if isinstance(link, _Link):
                    links.append(link)
                elif isinstance(link, Broken | HostUnreachable) and not first:
                    broken[stop.host] = str(link)
                elif isinstance(link, Failed | OSError):
                    self._fail(stop.host, link)
                else:
                    raise link
            origin = next(iter(self._stops))
            if self._is_there and (not links or links[0].stop.host != origin):
                reason = self.results.get(origin) or broken.get(origin)
                for link in links:
                    self._fail(link.stop.host, Failed(f"its files were to come from host {origin}: {reason}"))
                return broken
            if all(link.stop.host in self.results for link in links):
                return broken
            try:
                heads = await self._joined(links)
            except _LinkFailed as failure:
                self._settle(failure, broken)
                return broken
            await self._copied(links, heads, broken)
        return broken

    async def _joined(self, links: Sequence[_Link]) -> list[_Link]:
        """Let each host listen, and connect to the one before it. Return those that get their files from this machine. Raises
        _LinkFailed.
        """
        key = secrets.token_hex(32)

        async def listen(number: int, link: _Link) -> None:
            feeds = number + 1 < len(links) and link.stop.address is not None
            await link.tell(
                {
                    "key": key,
                    "take": link.stop.target,
                    "roots": list(link.stop.roots),
                    "feeds": feeds,
                    "private": self._private,
                    "sender": self._sender and self._sender.request(link.stop.roots),
                    "address": link.stop.address,
                    "ports": self._ports,
                }
            )
            if feeds:
                answer = await link.answer()
                link.port, link.problem = answer.get("listening"), str(answer.get("problem", ""))
            elif number + 1 < len(links):
                link.problem = "its address is not known: state hosts[].address"

        async def connect(before: _Link, link: _Link) -> None:
            if before.port is not None:
                await link.tell({"from": [before.stop.address, before.port]})
                answer = await link.answer()
                if "connected" in answer:
                    link.is_fed = True
                    return
                before.problem = str(answer.get("unreachable", answer))
                before.problem = f"{before.stop.address} port {before.port}: {before.problem}"
            await before.tell({"alone": True})

        await _all(_of(link, listen(number, link)) for number, link in enumerate(links))
        pairs = list(pairwise(links))
        await _all(_of(link, connect(before, link)) for before, link in pairs)
        for before, link in pairs:
            if not link.is_fed:
                self._tell_around(before, link)
        return [link for link in links if not link.is_fed]

    def _tell_around(self, before: _Link, link: _Link) -> None:
        host = link.stop.host
        if self._is_there:
            raise _LinkFailed(link, Failed(f"it can't reach host {before.stop.host} ({before.problem}), which was to send it the files"))
        line = f"host {host} can't reach host {before.stop.host} ({before.problem}): its files go from this machine"
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    async def _copied(self, links: Sequence[_Link], heads: Sequence[_Link], broken: dict[str, str]) -> None:
        works: dict[asyncio.Task[Carried], _Link] = {}
        for link in links:
            from_here = link in heads and not self._is_there
            carried = self._from_here(link) if from_here else self._from_there(link, heads)
            works[asyncio.create_task(carried)] = link
        beats = asyncio.create_task(self._beat(links, heads))
        try:
            waiting, failed = set(works), False
            while waiting and not failed:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if any(task.exception() is not None for task in done):  # the one that broke the chain may say so a little later
                    more, waiting = await asyncio.wait(waiting, timeout=LAST_WORDS_SECONDS) if waiting else (set(), waiting)
                    done |= more
                for task in done:
                    error = task.exception()
                    if error is None:
                        self.results.setdefault(works[task].stop.host, task.result())
                    else:
                        failed = True
                        self._settle(_LinkFailed(works[task], error), broken)
        finally:
            beats.cancel()
            for work in works:
                work.cancel()
            await asyncio.gather(*works, beats, return_exceptions=True)

    def _settle(self, failure: _LinkFailed, broken: dict[str, str]) -> None:
        host, error = failure.link.stop.host, failure.error
        if isinstance(error, Broken | Gone | TimeoutError | HostUnreachable):
            broken[host] = str(error) or "it does not answer"
        elif isinstance(error, Failed | OSError):
            self._fail(host, error)
        else:
            raise error

    async def _from_here(self, link: _Link) -> Carried:
        progress = self._progress[link.stop.host]

        def give(wire: Wire) -> dict[str, Any]:
            return carry.give(wire, Path(self._source), passed=progress.passing, expected=progress.expect)

        await link.tell({"from": "home"})
        mine, theirs = socket.socketpair()
        try:
            counts = await between(link.program, mine, theirs, give)
        except ProgramFailed as error:
            if link.program.code == station.AGAIN:
                raise Broken(str(error)) from None
            raise
        finally:
            mine.close()
            theirs.close()
        link.is_quiet = True
        return Carried(**counts)

    async def _from_there(self, link: _Link, heads: Sequence[_Link]) -> Carried:
        """Follow what a host says that gets its files from another one, or from itself."""
        progress = self._progress[link.stop.host]
        if link in heads:
            await link.tell({"from": self._source})
        while True:
            answer = await link.answer()
            if "expected" in answer:
                progress.expect(_count(answer, "expected"))
            elif "passed" in answer:
                progress.passing(_count(answer, "passed"))
            elif "arrived" in answer and isinstance(answer["arrived"], dict):
                counts = answer["arrived"]
                return Carried(**{name: _count(counts, name) for name in ("files", "sent", "bytes", "resumed")})
            elif "failed" in answer:
                raise Failed(str(answer["failed"])[:2000])
            elif "gone" in answer:
                raise Gone(str(answer["gone"])[:2000])

    async def _beat(self, links: Sequence[_Link], heads: Sequence[_Link]) -> None:
        """Let every host know that this machine is there, but while it gets files from here: then it hears those."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for link in links:
                if link.is_quiet or link not in heads or self._is_there:
                    with suppress(Failed):
                        await link.program.write(_BEAT)


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Wait for all, then raise the first error."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _of(link: _Link, work: Awaitable[None]) -> None:
    """Name the host of what goes wrong. Raises _LinkFailed."""
    try:
        async with asyncio.timeout(PREPARE_SECONDS):
            await work
    except (Failed, OSError) as error:
        raise _LinkFailed(link, error) from None


@asynccontextmanager
async def _opened(stop: Stop) -> AsyncIterator[_Link]:
    async with python_program(stop.place, source_of(station)) as program:
        yield _Link(stop, program, lines_in(program))


def _count(answer: Mapping[str, Any], name: str) -> int:
    value = answer.get(name)
    if not isinstance(value, int) or value < 0:
        raise ProgramFailed(f"a host says {value!r} as {name}, which is not a valid answer")
    return value


class _LinkFailed(Exception):
    """Failure of one host's program."""

    def __init__(self, link: _Link, error: BaseException) -> None:
        self.link, self.error = link, error


class _Link:
    """The program of a host."""

    def __init__(self, stop: Stop, program: Program, lines: AsyncIterator[bytes]) -> None:
        self.stop, self.program, self._lines = stop, program, lines
        self.port: int | None = None
        self.problem = ""
        """Reason why the next host gets nothing from it."""
        self.is_fed = False
        """True if the host before it gives to it."""
        self.is_quiet = False
        """True once this machine has sent it everything."""

    async def tell(self, message: Mapping[str, object]) -> None:
        await self.program.write(json.dumps(message).encode() + b"\n")

    async def answer(self) -> dict[str, Any]:
        """Next answer. Raises ProgramFailed when it has ended."""
        async for line in self._lines:
            answer = answer_of(line, self.program.place.name)
            if answer != {"busy": True}:
                return answer
        raise self.program.failure()
