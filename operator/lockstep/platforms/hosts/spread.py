"""A copy to many hosts that crosses this machine's link once: to one host over ssh, from there to the others. Each that has it gives it on,
to one host at a time.

Hosts don't log in to each other. Each listens on its stated address, and both ends prove a key that is made for one copy and reaches them
over ssh. A host that can't reach the one that gives gets its files from this machine instead, and that is said.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.api.errors import Failed
from lockstep.platforms.files.transfer import Carried, Sender, TransferProgress, giving, retried, wired
from lockstep.platforms.hosts.ssh import HostUnreachable
from lockstep.platforms.inpod import source_of
from lockstep.platforms.onhost import station
from lockstep.programs import Broken, Place, kept_alive, python_program
from lockstep_machine.wire import MESSAGE_CHARACTERS_MAX, Gone, Wire, no_protocol

BEAT_SECONDS = 15.0


@dataclass(frozen=True)
class Stop:
    """A host that gets a copy."""

    host: str
    place: Place
    target: str
    """Path that the copy gets there."""
    roots: list[str]
    """Folders that it must be below."""
    address: str | None
    """Address at which other hosts reach it; None: nobody knows one."""
    progress: TransferProgress


class OutOfReach(Exception):
    """A host can't connect to the one that gives; the message says why."""


@dataclass
class Spread:
    """One copy to all of its hosts, from a path of this machine; with `is_there` from a path of the first host."""

    stops: Sequence[Stop]
    source: str
    ports: Sequence[int]
    say: Callable[[str], None]
    """Gets each way around as one line."""
    sender: Sender | None
    """None: only the user of each host may write to the files; else that user's own umask counts there."""
    is_there: bool = False
    _key: str = field(default_factory=lambda: secrets.token_hex(32))
    _givers: asyncio.Queue[tuple[str, list[Any]]] = field(default_factory=asyncio.Queue)
    """Hosts that have everything and give to no other one just now, with the address and port of each."""
    _gives: bool = False
    _deaf: str = ""
    """The last host that has everything and can't give it, and why."""
    _around: set[str] = field(default_factory=set)
    _results: dict[str, Carried | Exception] = field(default_factory=dict)
    _stations: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def run(self) -> dict[str, Carried | Exception]:
        """Copy, again after something broke, as long as it makes progress. Return what became of each host."""
        async with self._stations:
            for stop in self.stops:
                if not self._gives:
                    await self._copy(stop)
            await asyncio.gather(*(self._copy(stop) for stop in self.stops if stop.host not in self._results))
        return {stop.host: self._results[stop.host] for stop in self.stops}

    async def _copy(self, stop: Stop) -> None:
        try:
            self._results[stop.host] = await retried(lambda: self._once(stop), stop.progress)
        except (Failed, OSError) as error:
            self._results[stop.host] = error

    async def _once(self, stop: Stop) -> Carried:
        problem, first = self._deaf, self.stops[0]
        if self._gives and stop.host not in self._around:
            host, where = await self._givers.get()
            try:
                return await self._taken(stop, where)
            except OutOfReach as error:
                problem = f"host {host} ({where[0]} port {where[1]}: {error})"
            finally:
                self._givers.put_nowait((host, where))
        if self.is_there and stop is not first:
            if problem:
                raise Failed(f"it can't reach {problem}, which was to send it the files")
            raise Failed(f"its files were to come from host {first.host}: {self._results[first.host]}")
        if problem and stop.host not in self._around:
            self._around.add(stop.host)
            self.say(f"host {stop.host} can't reach {problem}: its files go from this machine")
        return await self._taken(stop, self.source if self.is_there else None)

    async def _taken(self, stop: Stop, origin: Any) -> Carried:
        """Let the host take everything, and give it on from then. Raises OutOfReach, Gone, Failed, OSError."""
        sender = self.sender and self.sender.request(stop.roots)
        request = {"key": self._key, "from": origin, "take": stop.target, "roots": stop.roots, "sender": sender}
        request |= {"address": stop.address, "ports": list(self.ports), "private": sender is None}
        ready: dict[str, Any] = {}

        def end(wire: Wire) -> dict[str, Any]:
            wire.say(request)
            ready.update(wire.hear())
            return _followed(wire, stop.progress) if origin is not None else giving(Path(self.source), stop.progress)(wire)

        try:
            async with AsyncExitStack() as stack:
                program = await stack.enter_async_context(python_program(stop.place, source_of(station)))
                carried = Carried(**await (await stack.enter_async_context(wired(program))).run(end))
                await stack.enter_async_context(kept_alive(program, b'{"busy": true}\n', BEAT_SECONDS))
                self._stations.push_async_exit(stack.pop_all())
        except (Broken, HostUnreachable) as error:
            raise Gone(str(error)) from error
        if isinstance(port := ready.get("port"), int):
            self._gives = True
            self._givers.put_nowait((stop.host, [stop.address, port]))
        else:
            self._deaf = f"host {stop.host} ({str(ready.get('deaf'))[:MESSAGE_CHARACTERS_MAX]})"
        return carried


def _followed(wire: Wire, progress: TransferProgress) -> dict[str, int]:
    """Follow what a host says that gets its files from another one, or from itself. Raises Gone, OutOfReach, CarryError."""
    while True:
        match answer := wire.hear():
            case {"expected": int(size)}:
                progress.expect(size)
            case {"passed": int(size)}:
                progress.passing(size)
            case {"unreachable": str(words)}:
                raise OutOfReach(words[:MESSAGE_CHARACTERS_MAX])
            case {"arrived": {"files": int(files), "sent": int(sent), "bytes": int(size), "resumed": int(resumed)}}:
                return {"files": files, "sent": sent, "bytes": size, "resumed": resumed}
            case _:
                raise no_protocol(f"it says {str(answer)[:80]}")
