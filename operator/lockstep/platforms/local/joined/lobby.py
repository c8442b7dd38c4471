"""The door of a launch: it takes joiners until every node has a machine, gives each its run.json, and lets those that come back in
again.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from lockstep.api.errors import ConfigError
from lockstep.platforms.local.joined.channel import accept
from lockstep.platforms.local.joined.machine import Joining, NodeMachine, place_text
from lockstep.platforms.local.joined.seats import Launched, devices_there, refusal, rooms, run_there
from lockstep.platforms.local.joined.token import LaunchToken
from lockstep.platforms.output import tell
from lockstep_gang.contract.channel import Channel, listen
from lockstep_gang.contract.lines import PROOF_SECONDS, Refusals
from lockstep_gang.contract.run import Run
from lockstep_spec.codec import ContractError, from_json, to_json
from lockstep_spec.exits import FAILED
from lockstep_spec.words import number_of

STRANGERS_MAX = 64
"""Connections without a proof. At more of them the oldest is closed: a joiner's proof takes no time."""


@dataclass
class Guest:
    """A machine that takes part, and its connection while there is one."""

    joining: Joining
    channel: Channel | None
    has_ended: bool = False
    """It has left with the job's end."""

    @property
    def machine(self) -> NodeMachine:
        return self.joining.machine

    def send(self, kind: str, **values: object) -> None:
        if self.channel is not None:
            self.channel.send({"kind": kind, **values})


class Lobby:
    """Machines of one launch: before the job all that may join, from then on those that it runs on."""

    def __init__(self, launched: Launched, first: NodeMachine, attempts: int = 0) -> None:
        """`attempts`: highest attempt of the job that the folder of the launch's machine tells: it may have been another node before."""
        self._launched, self._first, self._attempts = launched, first, attempts
        self._token: LaunchToken | None = None
        self._guests: dict[tuple[str, str], Guest] = {}
        """In the order in which they came."""
        self._nodes: dict[tuple[str, str], int] = {}
        """Node of each machine, once all are there."""
        self._full: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._refusals = Refusals(tell)
        self._is_over = False

    async def open(self) -> None:
        """Take the launch's port, on its address alone. Raises ConfigError."""
        address, port = self._first.address, self._launched.port
        try:
            probe = await listen(lambda *_: None, address, port + 1)  # the coordinator's, soon
            probe.close()
            await probe.wait_closed()
            self._server = await listen(self._accepted, address, port, serves=False)
        except OSError as error:
            raise ConfigError(
                f"--at: port {port} or {port + 1} of {address} can't be listened on ({error.strerror}): name another port, of which the"
                " next one is free, too"
            ) from None

    async def admit(self, token: LaunchToken) -> None:
        """Let those in who have the token."""
        assert self._server is not None  # noqa: S101 (it was opened)
        self._token = token
        await self._server.start_serving()
        if self._launched.nodes == 1:
            self._full.set_result(None)

    async def gather(self) -> list[Run]:
        """Wait until every node has a machine. Returns the run of each, by node; those of joiners are on their way."""
        await asyncio.shield(self._full)
        return [self._run(node) for node in range(self._launched.nodes)]

    def stop(self, *, now: bool) -> None:
        """Tell all joiners to let their ranks save and stop; `now`: to stop at once."""
        for guest in self._guests.values():
            guest.send("stop", now=now)

    async def end(self, code: int, message: str, seconds: float) -> None:
        """Tell joiners how it ended, and close: at once when they have left, else after `seconds`."""
        self._is_over = True
        if self._server is not None:
            self._server.close()
        for guest in self._guests.values():
            guest.send("over", code=code, message=message)
        connected = [task for task in self._tasks if not task.done()]
        for writer in list(self._strangers):
            writer.transport.abort()
        if connected:
            await asyncio.wait(connected, timeout=seconds)
        for task in connected:
            task.cancel()
        await asyncio.gather(*connected, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._strangers[writer] = None
        if len(self._strangers) > STRANGERS_MAX:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        task = asyncio.ensure_future(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str((writer.get_extra_info("peername") or ("nowhere",))[0])
        try:
            assert self._token is not None  # noqa: S101 (nobody is taken before)
            channel = await accept((reader, writer), self._token)
            self._strangers.pop(writer, None)
            channel.send({"kind": "welcome", "job": self._launched.job.metadata.name})
            async with asyncio.timeout(PROOF_SECONDS):
                joining = from_json(Joining, await channel.receive(), "a joiner's message")
        except ContractError as error:
            self._refusals.add(f"lockstep: refused a connection from {peer}: {error}")
        except (EOFError, OSError):
            pass  # a probe of the port
        else:
            await self._serve(channel, joining)
        finally:
            self._strangers.pop(writer, None)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, channel: Channel, joining: Joining) -> None:
        reason = refusal(self._launched, joining.machine, self._first, channel.connection.getpeername()[0]) or self._why_no_room(joining)
        if reason is not None:
            tell(f"lockstep: refused {joining.machine.title}: {reason}")
            channel.send({"kind": "refused", "message": reason})
            channel.close()
            await channel.wait_closed()
            return
        earlier = self._guests.get(joining.identity)
        if earlier is not None and earlier.channel is not None:
            earlier.channel.abort()  # the machine came back before its old connection was given up
        guest = self._guests[joining.identity] = Guest(joining, channel)
        self._welcome(guest)
        try:
            while True:
                guest.has_ended = (await channel.receive()).get("code") in (0, FAILED)
        except (EOFError, OSError, ContractError):
            pass
        finally:
            self._left(guest)

    def _why_no_room(self, joining: Joining) -> str | None:
        last, mine = self._launched.nodes - 1, joining.identity
        if joining.node is not None and not 1 <= joining.node <= last:
            return f"--node is {joining.node}, must be 1 to {last}: the launch is node 0"
        if self._nodes:
            return self._why_not_back(joining)
        holder = next(
            (guest for identity, guest in self._guests.items() if identity != mine and guest.joining.node == joining.node is not None), None
        )
        if holder is not None:
            return f"node {joining.node} is {holder.machine.title} already: give each machine a number of its own"
        return None

    def _why_not_back(self, joining: Joining) -> str | None:
        """Reason why a machine can't come back to the job, which has its machines; None: it can."""
        earlier = self._guests.get(joining.identity)
        if earlier is None:
            names = ", ".join([self._first.title, *(guest.machine.title for guest in self._guests.values())])
            return f"the job's {self._launched.nodes} machines are chosen ({names}): stop it with Ctrl-C and launch it again"
        node = self._nodes[joining.identity]
        if joining.node not in (None, node):
            return f"--node is {joining.node}, but this machine is node {node} of this launch: leave --node out"
        before, now = (len(devices_there(self._launched, one)) for one in (earlier.machine, joining.machine))
        if before != now:
            return f"it had {number_of(before, 'GPU')} when the job started, and has {now} now: launch the job again"
        return None

    def _welcome(self, guest: Guest) -> None:
        if self._nodes:
            node = self._nodes[guest.joining.identity]
            tell(f"lockstep: node {node} is back: {guest.machine.title}")
            self._assign(guest, node)
            return
        present, nodes = len(self._guests) + 1, self._launched.nodes
        tell(f"lockstep: {_described(guest.machine)} has joined, {present} of {nodes} machines are there")
        if present == nodes:
            try:
                self._seat_all()
            except Exception as error:
                self._full.set_exception(error)
            return
        for other in self._guests.values():
            other.send("waiting", present=present, nodes=nodes)

    def _seat_all(self) -> None:
        stated = {identity: guest.joining.node for identity, guest in self._guests.items() if guest.joining.node is not None}
        free = iter(rooms(stated.values(), self._launched.nodes))
        self._nodes = {identity: stated[identity] if identity in stated else next(free) for identity in self._guests}
        tell(f"lockstep: node 0: {_described(self._first)}")
        for identity, node in sorted(self._nodes.items(), key=lambda item: item[1]):
            tell(f"lockstep: node {node}: {_described(self._guests[identity].machine)}")
            self._assign(self._guests[identity], node)
        self._full.set_result(None)

    def _run(self, node: int) -> Run:
        by_node = {number: self._guests[identity].machine for identity, number in self._nodes.items()}
        attempts = max([self._attempts, *(guest.joining.attempts for guest in self._guests.values())])
        return run_there(self._launched, [self._first, *(by_node[number] for number in sorted(by_node))], node, attempts)

    def _assign(self, guest: Guest, node: int) -> None:
        guest.send("assigned", node=node, run=to_json(self._run(node)), variables=list(self._launched.variables))

    def _left(self, guest: Guest) -> None:
        guest.channel = None
        identity = guest.joining.identity
        if self._is_over or guest.has_ended or self._guests.get(identity) is not guest:
            return
        where = place_text(self._first.address, self._launched.port)
        if self._nodes:
            tell(f"lockstep: node {self._nodes[identity]} has gone: {guest.machine.title}; to bring it back, there: lockstep join {where}")
        else:
            del self._guests[identity]
            tell(f"lockstep: {guest.machine.title} has gone, {len(self._guests) + 1} of {self._launched.nodes} machines are there")


def _described(machine: NodeMachine) -> str:
    gpus = number_of(len(machine.gpus), "GPU") if machine.gpus else "no GPU"
    interface = f"over {machine.interface}" if machine.interface else "over an unknown interface"
    return f"{machine.title} {interface}, {gpus}, {machine.workspace}"
