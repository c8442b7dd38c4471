"""Hosts the lifecycle: takes in what agents say, decides, makes records durable, then gives orders and reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from lockstep_gang.contract.exits import PING_SECONDS
from lockstep_gang.contract.interactive import Printed
from lockstep_gang.contract.messages import AgentMessage, Hello, Order, Ping, Start, StopMode, message_to_json
from lockstep_gang.contract.reply import Reply
from lockstep_gang.contract.report import State
from lockstep_gang.contract.run import Run
from lockstep_gang.coordinator.account import ACCOUNT_SECONDS, Account
from lockstep_gang.coordinator.channel import Channel
from lockstep_gang.coordinator.ports import free_port
from lockstep_gang.coordinator.records import Records, Replaced
from lockstep_gang.coordinator.reporter import Reporter
from lockstep_gang.coordinator.showing import Showing
from lockstep_gang.coordinator.telling import telling
from lockstep_gang.coordinator.waiting import either, in_thread
from lockstep_gang.lifecycle.budget import stamp
from lockstep_gang.lifecycle.decide import Decision, decide
from lockstep_gang.lifecycle.gang import Gang, Phase
from lockstep_gang.lifecycle.goodput import accounted
from lockstep_gang.lifecycle.hang import excused
from lockstep_gang.lifecycle.history import begun_records, closed_records, corrected_records, end_record, resumed
from lockstep_gang.lifecycle.losses import heard, is_asking
from lockstep_gang.lifecycle.observe import closed, observe
from lockstep_gang.lifecycle.placement import with_racks
from lockstep_gang.lifecycle.start import waits_for
from lockstep_gang.lifecycle.stops import stop_report
from lockstep_gang.lifecycle.summary import message_of, state_of, summarise

WAITING_LINE_SECONDS = 10.0
STORAGE_RETRY_SECONDS = 10.0
COMMIT_SECONDS = 1.0
"""Least time between two writes of the newest commit."""
PAUSED_SECONDS = 2.0
"""A wake-up so late means that this process itself did not run."""
SETTLE_SECONDS = 5.0
"""How long the end of node 0's agent waits, after a save's grace is over, for the other agents and for the operator to take the last report."""


def _turns(gang: Gang) -> tuple[object, ...]:
    """What the operator hears of at once."""
    return state_of(gang), gang.attempt, gang.stopped, gang.session.idleness


@dataclass(frozen=True)
class Output:
    """Node 0's log: a line into it, and its last lines."""

    say: Callable[[str], None]
    tail: Callable[[], tuple[str, ...]]
    write: Callable[[str], None]
    """As `say`, a line that is somebody else's."""


class Coordinator:
    """The only one that starts and stops attempts. Raises ContractError and OSError when the volume's records can't be read."""

    def __init__(self, run: Run, key: bytes, output: Output) -> None:
        self._run = run
        self._output = output
        self._records = Records(run.run_dir)
        self._attempts = self._records.attempts()
        self._clock = time.time() - time.monotonic()
        self._account = Account(self._records, run, output.say)
        gang = resumed(run, self._attempts, self._records.end(), self._now(), self._account.found().checkpoint)
        self.gang = self._account.opened(gang, self._now())
        self._channels: dict[int, Channel] = {}
        self._showing = Showing(self._channels)
        self._replaced: set[str] = set()
        """Agents, by instance, in whose place another one has come: their pod was taken for lost, and may yet run."""
        self._ports: dict[int, int] = {}
        self._wake = asyncio.Event()
        self._wake_at: float | None = None
        self._changed = asyncio.Event()
        self._committed = asyncio.Event()
        self._reporter = Reporter(run.report, key, self._replied, output.say) if run.report is not None else None
        if self._reporter is not None:
            self._reporter.transition(summarise(self.gang, run, log=output.tail()))

    async def run(self) -> None:
        """Until cancelled: wake-ups, pings, the waiting line and the reports."""
        tasks = [self._decide_in_time(), self._ping(), self._say_what_is_missing(), self._keep_account()]
        if self._reporter is not None:
            tasks.append(self._reporter.run())
        await asyncio.gather(*tasks)

    def connected(self, node: int, channel: Channel, hello: Hello) -> bool:
        """A proved connection; it takes the place of an older one of the same node. False: of an agent that was replaced and knows it not."""
        before = self.gang.nodes[node].instance
        if hello.instance in self._replaced:
            self._output.say(f"node {node} was replaced, and an agent of before is back: it is left alone until it ends")
            return False
        if before not in ("", hello.instance):
            self._replaced.add(before)
        older = self._channels.get(node)
        if older is not None:
            older.close()
        self._channels[node] = channel
        self.heard(node, hello)
        return True

    def heard(self, node: int, message: AgentMessage) -> None:
        if isinstance(message, Printed):
            self._printed(node, message)
        else:
            self._become(observe(self.gang, self._run, node, message, self._now()))

    def _printed(self, node: int, message: Printed) -> None:
        """Output of a dev environment's ranks: all of it is in node 0's log, and seen by whoever asked. Node 0's agent has logged its own."""
        if message.attempt != self.gang.attempt:
            return
        for line in message.lines if node != 0 else ():
            self._output.write(line)
        self._showing.show(self.gang.session.request, message.lines)

    def _say(self, line: str) -> None:
        self._output.say(line)
        self._showing.show(self.gang.session.request, (f"[lockstep] {line}",))

    def disconnected(self, node: int, channel: Channel) -> None:
        if self._channels.get(node) is channel:
            del self._channels[node]
            self._become(closed(self.gang, node, self._now()))

    async def settle(self) -> None:
        """Before node 0's agent ends: let the other nodes save or hear the end, and the operator take the last report.

        It may take as long as ranks may take to save: without the coordinator nobody would know how the stop went.
        """
        saving = self.gang.phase is Phase.STOPPING and self.gang.stopping is StopMode.SAVE
        deadline = (self.gang.stop_began + self._run.save_grace_seconds if saving else self._now()) + SETTLE_SECONDS
        while self._now() < deadline and not self._settled():
            self._changed.clear()
            await asyncio.wait([asyncio.ensure_future(self._changed.wait())], timeout=deadline - self._now())
        if self.gang.phase is Phase.STOPPING and self.gang.stopping is StopMode.SAVE:
            before, self.gang = self.gang, replace(self.gang, stopped=stop_report(self.gang, self._run, self._now()))
            self._tell(before)
            self._close_record("Stopped", self.gang)  # asked for, so it is no failure, though a node did not answer in time
        if self._reporter is not None:
            await self._reporter.flush(SETTLE_SECONDS)

    def _settled(self) -> bool:
        if self.gang.phase is Phase.ENDED:
            others = range(1, self._run.nodes)
            return not any(node in self._channels or not self.gang.nodes[node].instance for node in others)
        return self.gang.phase is Phase.WAITING

    def _replied(self, reply: Reply) -> None:
        before = (self.gang.history, self.gang.budget)
        self._become(replace(heard(self.gang, reply.facts, self._now()), placement=with_racks(self.gang.placement, reply.racks)))
        if (self.gang.history, self.gang.budget) != before:
            self._correct_records()

    def _become(self, gang: Gang) -> None:
        """Take in a new state, then decide until nothing follows from it any more."""
        before, self.gang = self.gang, gang
        self._tell(before)
        while True:
            decision = decide(self.gang, self._run, self._now())
            phase = self.gang.phase
            if not self._recorded(decision):
                return
            before, self.gang = self.gang, decision.gang
            self._run = replace(self._run, order=self.gang.placement.order)
            self._tell(before)
            for node, order in decision.orders:
                self._send(node, order)
            if decision.gang.phase is phase:
                break
        self._wake_at = decision.wake_at
        self._wake.set()
        if self._reporter is not None:
            self._reporter.ask(is_asking(self.gang))

    def _recorded(self, decision: Decision) -> bool:
        """Whether all that must be durable before the orders is."""
        try:
            if decision.begin:
                self._begin_record(decision.gang)
            if decision.end:
                self._records.write_end(end_record(decision.gang, self._run, stamp(self._now())))
            if decision.close is not None:
                self._close_record(decision.close, decision.gang)
            if decision.begin or decision.end or decision.close is not None:
                self._account.keep(decision.gang)
        except OSError as error:
            hint = "" if isinstance(error, Replaced) else ": is the volume full or read-only?"
            trouble = f"cannot write the job's record under {self._run.run_dir}/gang ({error.strerror}){hint}"
            if trouble != self.gang.trouble:
                self._say(trouble)
            self.gang = replace(self.gang, trouble=trouble)
            self._wake_at = self._now() + STORAGE_RETRY_SECONDS
            self._wake.set()
            return False
        return True

    def _begin_record(self, gang: Gang) -> None:
        attempts = begun_records(self._attempts, gang, self._run, stamp(self._now()))
        self._records.write_attempts(attempts)
        self._attempts = attempts

    def _close_record(self, outcome: str, gang: Gang) -> None:
        attempts = closed_records(self._attempts, outcome, gang)
        self._records.write_attempts(attempts)
        self._attempts = attempts

    def _correct_records(self) -> None:
        """Not worth stopping for: a coordinator after this one hears the facts as well."""
        try:
            attempts = corrected_records(self._attempts, self.gang)
            self._records.write_attempts(attempts)
            self._attempts = attempts
        except OSError as error:
            self._output.say(f"cannot correct the job's record under {self._run.run_dir}/gang: {error.strerror}")

    def _send(self, node: int, order: Order) -> None:
        if isinstance(order, Start):
            port = self._ports.setdefault(order.attempt, free_port(self._run.addresses[0], order.master_port))
            order = replace(order, master_port=port)
        self._channels[node].send(message_to_json(order))

    def _tell(self, before: Gang) -> None:
        """Into the log and to the operator, as far as something changed."""
        for line in telling(before, self.gang, self._run):
            self._say(line)
        self._changed.set()
        if self.gang.checkpoint != before.checkpoint:
            self._committed.set()
        if self._reporter is None or before == self.gang:
            return
        report = summarise(self.gang, self._run)
        if _turns(before) != _turns(self.gang):
            self._reporter.transition(replace(report, log=self._output.tail()))
        elif (before.checkpoint, before.fabric.verdict, before.stragglers, message_of(before, self._run)) != (
            report.checkpoint,
            report.fabric,
            self.gang.stragglers,
            report.message,
        ):
            self._reporter.news(report)
        else:
            self._reporter.refresh(report)

    async def _decide_in_time(self) -> None:
        while True:
            waiting = asyncio.ensure_future(self._wake.wait())
            timeout = None if self._wake_at is None else max(0.0, self._wake_at - self._now())
            done, _ = await asyncio.wait([waiting], timeout=timeout)
            if done:
                self._wake.clear()
            else:
                waiting.cancel()
                late = self._now() - (self._wake_at or self._now())
                if late > PAUSED_SECONDS:  # stopped, or starved: what agents said meanwhile is still to be read
                    self._output.say(f"the coordinator did not run for {late:.0f} s; no rank is judged by that time")
                    self.gang = excused(self.gang, late)
                self._become(self.gang)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            for channel in self._channels.values():
                channel.send(message_to_json(Ping()))

    async def _say_what_is_missing(self) -> None:
        while True:
            await asyncio.sleep(WAITING_LINE_SECONDS)
            wanted = self._run.interactive is None or self.gang.session.request is not None
            if waits_for(self.gang, self._now()) or (wanted and state_of(self.gang) is State.WAITING):
                self._say(message_of(self.gang, self._run))

    async def _keep_account(self) -> None:
        """Also when nothing happens for long: what the time was spent on stays true in reports and on the volume. A commit is kept soon."""
        while True:
            await asyncio.sleep(COMMIT_SECONDS)
            await either(self._committed, ACCOUNT_SECONDS - COMMIT_SECONDS)
            self._committed.clear()
            self.gang = accounted(self.gang, self._run, self._now())
            if self._reporter is not None:
                self._reporter.refresh(summarise(self.gang, self._run))
            in_thread(partial(self._account.keep, self.gang))

    def _now(self) -> float:
        """Unix time that never jumps: read once, then counted on."""
        return self._clock + time.monotonic()
