"""Hosts the lifecycle: takes in what agents say, decides, makes records durable, then gives orders and reports."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from lockstep_gang.build import build_id
from lockstep_gang.contract.channel import Channel
from lockstep_gang.contract.interactive import Printed
from lockstep_gang.contract.messages import AgentMessage, Exited, Hello, Pong, StopMode
from lockstep_gang.contract.reply import Reply
from lockstep_gang.contract.report import State, Unwritten
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import stamp
from lockstep_gang.contract.trouble import Trouble
from lockstep_gang.coordinator.channels import Channels, RunOutput
from lockstep_gang.coordinator.ledger import ACCOUNT_SECONDS, Ledger
from lockstep_gang.coordinator.log_lines import log_lines
from lockstep_gang.coordinator.machine import seconds_since_boot, slept_seconds
from lockstep_gang.coordinator.owner import BEAT_SECONDS, DEAD_SECONDS, LOOK_SECONDS, Ownership, Replaced
from lockstep_gang.coordinator.records import Records
from lockstep_gang.coordinator.reports import report_change, reports_of
from lockstep_gang.coordinator.waits import happens_within, in_thread
from lockstep_gang.lifecycle.decide import Decision, decide
from lockstep_gang.lifecycle.gang import Gang, Phase, Silence
from lockstep_gang.lifecycle.goodput import accounted
from lockstep_gang.lifecycle.hang import with_pause, with_reconnects_extended
from lockstep_gang.lifecycle.losses import waits_for_facts, with_facts, with_own_sleep
from lockstep_gang.lifecycle.observe import connection_closed, ended_as_ordered, node_heard_again, observe
from lockstep_gang.lifecycle.placement import with_racks
from lockstep_gang.lifecycle.preflight.rounds import ends_with_it
from lockstep_gang.lifecycle.silences import with_silence
from lockstep_gang.lifecycle.start import awaits_folder, waits_for, without_folder
from lockstep_gang.lifecycle.stops import stop_report
from lockstep_gang.lifecycle.summary import message_of, state_of, summarize
from lockstep_spec.codec import ContractError

WAITING_LINE_SECONDS = 10.0
STORAGE_RETRY_SECONDS = 10.0
COMMIT_SECONDS = 1.0
"""Least time between two writes of the newest commit."""
PULSE_SECONDS = 1.0
BUSY_SECONDS = 0.25
"""Delay of a pulse that means that there is much to do, such as taking back a thousand connections."""
PAUSED_SECONDS = 2.0
"""Delay of a pulse that means that this process itself did not run, or had too much to do."""
SLOW_SECONDS = 5.0
"""Time of a write from which on it is reported: it is the volume that everything waits for."""
SETTLE_SECONDS = 5.0
"""Time that node 0's agent waits at its end, after a save's grace, for the other agents and for the operator to take the last report."""


Change = Callable[[Gang], Gang]
T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """Node 0's log: a line into it, and its last lines."""

    say: Callable[[str], None]
    tail: Callable[[], tuple[str, ...]]
    write: Callable[[str], None]
    """Write a line that isn't Lockstep's own."""
    keep: Callable[[], None] = lambda: None
    """Begin to keep the log in the run's folder, which is this job's from now on."""


class Coordinator:
    """The only one that starts and stops attempts. Raises ContractError and OSError when the volume's records can't be read."""

    def __init__(self, run: Run, key: bytes, output: Output) -> None:
        self._run = run
        self._output = output
        self._clock = time.time() - seconds_since_boot()
        self._slept_seconds = slept_seconds()
        self._owner = Ownership(run)
        self._records = Records(run.run_dir, self._owner.check)
        self.gang = self._opened()
        self._changes: deque[Change] = deque()
        """Changes that were heard and not taken in yet, while a record is being written."""
        self._ends: list[tuple[int, Exited]] = []
        """Ends of ranks that are being stopped, not taken in yet."""
        self._deciding = False
        """True if a decision about what was taken in is scheduled."""
        self._pulse_due = self._now() + PULSE_SECONDS
        self._recording: asyncio.Future[None] | None = None
        self._corrects = False
        self._retry_at = 0.0
        self._channels = Channels(run, output.say)
        self._showing = RunOutput(self._channels.of_node)
        self._builds = {"", build_id()}
        self._meet(run.build, "run.json")
        self._wake = asyncio.Event()
        self._wake_at: float | None = None
        self._broken: BaseException | None = None
        self._changed = asyncio.Event()
        self._committed = asyncio.Event()
        self._reports = reports_of(run, key, self._records, self._replied, output.say)
        if self._reports is not None:
            self._reports.transition(summarize(self.gang, run, log=output.tail()))

    def _opened(self) -> Gang:
        """Read the records as they are now. Returns the gang that goes on from them."""
        self._ledger = Ledger(self._records, self._run, self._output.say)
        return self._ledger.opened(self._run, self._now())

    @property
    def unheard_trouble(self) -> Trouble | None:
        """Trouble that keeps the operator from hearing of an incomplete gang; a complete one starts and runs all the same."""
        if (
            self._reports is None
            or self.gang.phase is not Phase.WAITING
            or self.gang.attempt
            or not self.gang.nodes.counts.here < self._run.nodes
        ):
            return None
        return self._reports.trouble

    async def run(self) -> None:
        """Run until cancelled: wake-ups, pings, the waiting line, signs of life and the reports.

        Nothing that is heard is taken in before the run's folder is this job's. Raises Replaced once a newer coordinator of the job has it.
        """
        own = [self._decide_in_time(), self._pulse(), self._channels.ping(), self._say_what_is_missing(), self._keep_account()]
        self._records.are_owned = False
        if self.gang.phase is not Phase.ENDED and not ends_with_it(self._run):
            self._recording = asyncio.get_running_loop().create_future()
            own.append(self._keep_folder())
        if self._reports is not None:
            own.append(self._reports.run())
        tasks = [asyncio.ensure_future(task) for task in own]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _keep_folder(self) -> None:
        """Go on from the folder's records once it is this job's, and show signs of life in it. The job ends where another one lives in
        it.
        """
        until = self._now() + DEAD_SECONDS
        while (other := await self._other_owner()) is not None:
            place, lives = other
            if lives:
                return self._go_on(without_folder(self.gang, f"the run's folder {self._run.run_dir} is in use by {place}"))
            self._be(awaits_folder(self.gang, self._run, place, until))
            await asyncio.sleep(LOOK_SECONDS)
        self._records.are_owned = True
        self._output.keep()
        self._go_on(await in_thread(self._opened, "records"))
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            try:
                await in_thread(self._owner.beat, "owner")
            except Replaced as error:
                return self._lose_folder(error)
            except OSError:
                continue  # it is said where it holds up a record

    async def _other_owner(self) -> tuple[str, bool] | None:
        while True:
            try:
                return await self._answer(in_thread(self._owner.take, "owner"), None)
            except OSError as error:
                self._have_trouble(self._ledger.trouble(error), None)
                await asyncio.sleep(STORAGE_RETRY_SECONDS)

    def _go_on(self, gang: Gang) -> None:
        self._be(gang)
        self._recording = None
        self._advance()

    def _lose_folder(self, error: Replaced) -> None:
        self._records.are_owned = False
        if error.job_uid == self._run.job.uid:  # which goes on there, so this process alone ends
            self._broken = error
            self._wake.set()
        else:
            self._become(lambda gang: without_folder(gang, str(error.strerror)))

    def connected(self, node: int, channel: Channel, hello: Hello) -> bool:
        """Take a proved connection, in the place of an older one of the same node. False: its agent was replaced and doesn't know it."""
        if not self._channels.take(node, channel, hello.instance):
            return False
        self._meet(hello.build, f"the agent of node {node}")
        self._become(partial(self._greeted, node, channel, hello, self._now()))
        return True

    def _meet(self, build: str, whose: str) -> None:
        """Say once of each other build that it is there: a tag that was pushed again, say, before a pod was made again."""
        if build not in self._builds:
            self._builds.add(build)
            self._output.say(f"warning, {whose} is of build {build[:40]} of Lockstep, and node 0's agent of {build_id()}; the job goes on")

    def _greeted(self, node: int, channel: Channel, hello: Hello, now: float, gang: Gang) -> Gang:
        self._channels.know(node, channel)
        after = observe(gang, self._run, node, hello, now)
        self._corrects |= after.history != gang.history
        return after

    def heard(self, node: int, message: AgentMessage) -> None:
        """Take in a message. Raises ContractError for a malformed report."""
        if isinstance(message, Pong):
            return  # a sign of life, which the connection has seen
        if isinstance(message, Printed):
            self._printed(node, message)
            return
        if isinstance(message, Exited) and message.exit.ordered and self.gang.phase is Phase.STOPPING and self._recording is None:
            self._ends.append((node, message))  # thousands come at once when a big gang is stopped
            self._decide_soon()
            return
        now = self._now()
        if self._recording is not None:
            observe(self.gang, self._run, node, message, now)  # taken in later, and refused now
        self._become(lambda gang: observe(gang, self._run, node, message, now))

    def _printed(self, node: int, message: Printed) -> None:
        """Show output of a dev environment's ranks: all of it goes into node 0's log and to whoever asked. Node 0's agent has logged its
        own.
        """
        if message.attempt != self.gang.attempt:
            return
        for line in message.lines if node != 0 else ():
            self._output.write(line)
        self._showing.show(self.gang.session.request, message.lines)

    def _say(self, line: str) -> None:
        self._output.say(line)
        self._showing.show(self.gang.session.request, (f"[lockstep] {line}",))

    def unheard(self, node: int, channel: Channel, seconds: float) -> None:
        """Note that nothing has come over a node's open connection for so long."""
        if self._channels.of_node.get(node) is channel:
            silence = Silence(node, self._now() - seconds, channel.arrives)
            self._become(lambda gang: with_silence(gang, silence))

    def heard_again(self, node: int, channel: Channel) -> None:
        if self._channels.of_node.get(node) is channel:
            now = self._now()
            self._become(lambda gang: node_heard_again(gang, node, now))

    def disconnected(self, node: int, channel: Channel) -> None:
        if self._channels.drop(node, channel):
            now = self._now()
            self._become(lambda gang: connection_closed(gang, node, now, unheard=channel.is_given_up))

    async def settle(self) -> None:
        """Before node 0's agent ends: let the other nodes save or hear the end, and the operator take the last report.

        It may take as long as ranks may take to save: without the coordinator nobody would know how the stop went.
        """
        saving = self.gang.phase is Phase.STOPPING and self.gang.stopping is StopMode.SAVE
        deadline = (self.gang.stop_began + self._run.save_grace_seconds if saving else self._now()) + SETTLE_SECONDS
        while self._now() < deadline and not self._settled():
            self._changed.clear()
            await happens_within(self._changed, deadline - self._now())
        if self.gang.phase is Phase.STOPPING and self.gang.stopping is StopMode.SAVE:
            before, self.gang = self.gang, replace(self.gang, stopped=stop_report(self.gang, self._run, self._now()))
            self._tell(before)
            if self._recording is None:  # asked for, so it is no failure, though a node did not answer in time
                self._write(partial(self._ledger.close, "Stopped", self.gang), None)
            if self._recording is not None:
                await asyncio.wait([self._recording], timeout=SETTLE_SECONDS)
        if self._reports is not None:
            await self._reports.flush(SETTLE_SECONDS)
        await asyncio.wait([in_thread(self._owner.let_go, "owner")], timeout=SETTLE_SECONDS)

    def _settled(self) -> bool:
        if self._recording is not None:
            return not self._records.are_owned
        if self.gang.phase is Phase.ENDED:
            others = range(1, self._run.nodes)
            return not any(node in self._channels.of_node or not self.gang.nodes[node].instance for node in others)
        return self.gang.phase is Phase.WAITING

    def _replied(self, reply: Reply) -> None:
        now = self._now()

        def change(gang: Gang) -> Gang:
            after = replace(with_facts(gang, reply.facts, now), placement=with_racks(gang.placement, reply.racks))
            self._corrects |= (gang.history, gang.budget) != (after.history, after.budget)
            return after

        self._become(change)

    def _become(self, change: Change) -> None:
        """Take in a change: at once, or when the record that is being written is there. What follows is decided once for all that came
        together.
        """
        self._excuse()
        self._changes.append(change)
        if self._recording is None:
            self._take_in()
            self._decide_soon()

    def _take_in(self) -> None:
        if self._ends:
            ends, self._ends = self._ends, []
            self._be(ended_as_ordered(self.gang, self._run, ends))
        while self._changes:
            self._be(self._changes.popleft()(self.gang))

    def _decide_soon(self) -> None:
        if not self._deciding:
            self._deciding = True
            asyncio.get_running_loop().call_soon(self._decided)

    def _decided(self) -> None:
        self._deciding = False
        if self._recording is None and self._broken is None:
            try:
                self._advance()
            except Exception as error:  # nobody waits for a callback: it ends the coordinator elsewhere
                self._broken = error
                self._wake.set()

    def _advance(self) -> None:
        """Decide until nothing follows from what was heard any more, or something must be durable first."""
        while True:
            self._take_in()
            if self._corrects:
                self._corrects = False
                return self._write(partial(self._ledger.correct, self.gang), None)
            phase, decision = self.gang.phase, decide(self.gang, self._run, self._now())
            if decision.begin or decision.end or decision.close is not None:
                if self._now() >= self._retry_at:
                    return self._write(partial(self._ledger.write, decision, self._run, self._now()), decision)
                return self._wake_up(self._retry_at)
            self._carry_out(decision)
            if self.gang.phase is phase:
                break
        self._wake_up(decision.wake_at)
        if self._reports is not None:
            self._reports.ask(waits_for_facts(self.gang))

    def _excuse(self) -> None:
        """Judge nobody by a time in which this process did not run, or had too much to do: what was said meanwhile is still to be read."""
        late = self._now() - self._pulse_due
        if late < BUSY_SECONDS:
            return
        self._pulse_due = self._now() + PULSE_SECONDS
        if late > PAUSED_SECONDS:
            self._output.say(f"the coordinator did not run for {late:.0f} s; that time counts against no rank or node")
        self._changes.append(partial(with_pause if late > PAUSED_SECONDS else with_reconnects_extended, seconds=late))
        slept, self._slept_seconds = slept_seconds() - self._slept_seconds, slept_seconds()
        if slept > PAUSED_SECONDS:
            self._changes.append(partial(with_own_sleep, run=self._run, seconds=slept, now=self._now()))
        if self._recording is None:
            self._take_in()

    def _be(self, gang: Gang) -> None:
        before, self.gang = self.gang, gang
        if gang is not before:
            self._tell(before)

    def _carry_out(self, decision: Decision) -> None:
        places = decision.gang.placement.order
        if places != self._run.order:  # else a large gang's layout would be made anew for every decision
            self._run = replace(self._run, order=places)
        self._be(decision.gang)
        for node, order in decision.orders:
            self._channels.send(node, order)
        if decision.end:  # a pod stays after it, and a job of the same name need not wait for that
            in_thread(self._owner.let_go, "owner")

    def _wake_up(self, at: float | None) -> None:
        self._wake_at = at
        self._wake.set()

    def _write(self, work: Callable[[], None], decision: Decision | None) -> None:
        """Write in a thread: meanwhile agents are pinged, the operator hears reports, and SIGTERM is heard."""
        self._wake_up(None)
        self._recording = asyncio.ensure_future(self._written(in_thread(work, "records"), decision))
        self._recording.add_done_callback(self._end_with)

    async def _written(self, writing: asyncio.Future[None], decision: Decision | None) -> None:
        """Carry the decision out when it is durable. Without one nothing is tried again: a coordinator after this one hears the facts as
        well.
        """
        try:
            await self._answer(writing, decision)
        except Replaced as error:
            self._recording = None
            return self._lose_folder(error)
        except (ContractError, OSError) as error:
            self._retry_at = self._now() + STORAGE_RETRY_SECONDS
            self._have_trouble(self._ledger.trouble(error), decision)
        else:
            if decision is not None:
                self._carry_out(replace(decision, gang=replace(decision.gang, unwritten=None, untold=None)))
        if decision is None:
            self._be(replace(self.gang, unwritten=None, untold=None))
        self._go_on(self.gang)

    async def _answer(self, writing: asyncio.Future[T], decision: Decision | None) -> T:
        """Return or raise what the writing does, after having said that the volume takes long for it."""
        await asyncio.wait([writing], timeout=SLOW_SECONDS)
        if not writing.done():
            self._have_trouble(self._ledger.silence(SLOW_SECONDS), decision)
        return await writing

    def _have_trouble(self, trouble: str, decision: Decision | None) -> None:
        before = self.gang.unwritten
        if before is None or trouble != before.problem:
            self._say(trouble)
            since = stamp(self._now()) if before is None else before.since
            after = decision.gang if decision is not None else self.gang
            failed = after.failure if decision is not None and (decision.close == "Failed" or after.phase is Phase.ENDED) else None
            untold = (failed, after.history) if failed is not None else None
            self._be(replace(self.gang, unwritten=Unwritten(trouble, since), untold=untold))

    def _end_with(self, recording: asyncio.Future[None]) -> None:
        """End the coordinator by an error of its recording that must not happen, as elsewhere."""
        if not recording.cancelled() and recording.exception() is not None:
            self._broken = recording.exception()
            self._wake.set()

    def _tell(self, before: Gang) -> None:
        """Write what has changed into the log, and report it."""
        for line in log_lines(before, self.gang, self._run):
            self._say(line)
        self._changed.set()
        if self.gang.checkpoint != before.checkpoint:
            self._committed.set()
        if self._reports is not None:
            report_change(self._reports, before, self.gang, self._run, self._output.tail)

    async def _decide_in_time(self) -> None:
        while True:
            if await happens_within(self._wake, None if self._wake_at is None else max(0.0, self._wake_at - self._now())):
                self._wake.clear()
                if self._broken is not None:
                    raise self._broken
            else:
                self._wake_at = None  # until it is decided what is next
                self._excuse()
                self._decide_soon()

    async def _pulse(self) -> None:
        """Tick every second, so that the coordinator knows that it runs."""
        while True:
            await asyncio.sleep(max(0.0, self._pulse_due - self._now()))
            self._excuse()
            self._pulse_due = self._now() + PULSE_SECONDS

    async def _say_what_is_missing(self) -> None:
        while True:
            await asyncio.sleep(WAITING_LINE_SECONDS)
            is_awaited = self._run.interactive is None or self.gang.session.request is not None
            if waits_for(self.gang, self._now()) or (is_awaited and state_of(self.gang) is State.WAITING):
                self._say(message_of(self.gang, self._run))

    async def _keep_account(self) -> None:
        """Keep the account in reports and on the volume true, even when nothing happens for long. A commit is kept soon."""
        while True:
            await asyncio.sleep(COMMIT_SECONDS)
            await happens_within(self._committed, ACCOUNT_SECONDS - COMMIT_SECONDS)
            self._committed.clear()
            self.gang = accounted(self.gang, self._run, self._now())
            if self._reports is not None:
                self._reports.refresh(partial(summarize, self.gang, self._run))
            in_thread(partial(self._ledger.account.keep, self.gang), "account")

    def _now(self) -> float:
        """Unix time that never jumps: read once, then counted on, also while the machine sleeps."""
        return self._clock + seconds_since_boot()
