"""The agent: carries out the coordinator's orders on this node, and reports what happens here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep_gang.agent.interactive import DevNode
from lockstep_gang.agent.link import CutOff, Handlers, Link, watch
from lockstep_gang.agent.log import Console
from lockstep_gang.agent.outbox import Outbox, bounded
from lockstep_gang.agent.preflight.answers import NodePreflight, ask_trainer
from lockstep_gang.agent.ranks.fabric import FabricReporter
from lockstep_gang.agent.ranks.processes import become_subreaper, ended_children
from lockstep_gang.agent.ranks.progress_server import ProgressServer
from lockstep_gang.agent.ranks.ranks import LocalNode, LocalRanks, Survivors, environments_of
from lockstep_gang.agent.ranks.reports import ReportSocket
from lockstep_gang.agent.ranks.room import LOOK_SECONDS, Leavings, leavings_of
from lockstep_gang.agent.ranks.stacks import remove_old
from lockstep_gang.agent.ranks.standby import Standby
from lockstep_gang.build import build_id
from lockstep_gang.contract.lines import PassedOver
from lockstep_gang.contract.messages import (
    Activity,
    Beat,
    Error,
    Exited,
    Finish,
    Hello,
    Leaving,
    NewerKind,
    Order,
    Pace,
    RankExit,
    RankReport,
    Start,
    Started,
    Step,
    Stop,
    StopMode,
    Stopped,
)
from lockstep_gang.contract.preflight import Check
from lockstep_gang.contract.report import ENDS, State
from lockstep_gang.contract.run import Run, WhenDone
from lockstep_gang.contract.times import SILENCE_SECONDS
from lockstep_gang.contract.trouble import Trouble
from lockstep_gang.coordinator.machine import boot_id, slept_seconds
from lockstep_gang.coordinator.waits import in_thread
from lockstep_spec.choices import StorageMode
from lockstep_spec.codec import ContractError
from lockstep_spec.exits import DONE, FAILED, SAVED, UNREACHABLE
from lockstep_spec.words import duration

KEEP_SECONDS = 3.0
"""Longest wait of the agent's end until NCCL's logs are on the job's volume."""
LEFT_SECONDS = 1.0
"""Time until the agent looks again for what is left of its ranks' children; mostly it hears their end before."""
DUMP_SECONDS = 3.0
"""Time that ranks have to write their stacks."""


class Agent:
    """One node of a gang. `run` ends when the agent's process may end, with its exit code."""

    def __init__(self, run: Run, key: bytes, node: LocalNode, console: Console, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._run, self._node, self._console = run, node, console
        self._silence_seconds = silence_seconds
        self._socket = ReportSocket(node.folder)
        self._progress = ProgressServer(node.folder, self._report, console.say)
        self.link = Link(run, key, node.index, Handlers(self._hello, self._connected, self._take, console.say))
        self._dev = DevNode(node, self.link, console.say)
        self._preflight = NodePreflight(run, key, node.index, self.link.send)
        self._survivors = Survivors(self.link.send)
        self._outbox = Outbox(node.index, run.world_size, self.link.send)
        self._instance = os.urandom(8).hex()
        self._unable = ""
        self._known_attempt = 0
        self._ranks: LocalRanks | None = None
        self._leavings = leavings_of(run, node.folder)
        self._standby = Standby()
        self._running = False
        self._leaving = False
        self._finish: Finish | None = None
        self._gave_up = False
        self._done = asyncio.Event()
        self._malformed_said = False
        self._passed_over = PassedOver(console.say)
        self._fabric = FabricReporter(run, self.link.send)
        self.unheard_trouble: Callable[[], Trouble | None] = lambda: self.link.trouble
        """Return what keeps this node from being heard."""
        self.cut_off: Trouble | None = None
        """Trouble for which the agent ends before anything has run."""

    @property
    def job_has_ended(self) -> bool:
        """True if this node has no part in the job any more, so that nothing is to start its agent again."""
        return self._finish is not None or self._gave_up

    async def run(self) -> int:
        """Serve until the end of the job (if its pod is to end with the job) or until SIGTERM; returns the exit code."""
        loop = asyncio.get_running_loop()
        become_subreaper()
        self._clear_leavings()  # of a container before this one
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGTERM, self._leave)
        loop.add_signal_handler(signal.SIGINT, self._leave)
        loop.add_reader(self._socket.fileno(), self._read_reports)
        if self._run.training is None:  # a script; rank 0 may be on any node
            self._node = replace(self._node, reporting=await self._progress.start())
        self._preflight.begin()
        self._preflight.trainer, self._unable = await ask_trainer(self._run)
        own = (
            self.link.run(),
            watch(self.link, self._silence_seconds, self._unheard),
            self._outbox.run(),
            self._fabric.watch(lambda: self._ranks),
            self._done.wait(),
            self._end_cut_off(),
            *self._patience(),
            *(self._look_at_files(leavings) for leavings in self._leavings if not leavings.own),
        )
        tasks = [asyncio.ensure_future(task) for task in (*own, *await self._dev.start())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # the error of a task that must not end
        finally:
            for task in tasks:
                task.cancel()
            self._kill()
            self._standby.drop()
            self._preflight.end()
            self._dev.close()
            loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._progress.close()
            if self._ranks is not None:
                self._ranks.nccl.end(KEEP_SECONDS)
        return self._exit_code()

    def retire(self) -> None:
        """Kill the ranks of a node 0 that was replaced. A pod stays, since its container would be started again, and take the job back."""
        self._standby.drop()
        self._kill()
        self._gave_up = self._run.host is not None
        self._may_end()

    def end_with(self, parent: int) -> None:
        """Leave once `parent` is not this process's parent any more: it has ended, and nobody else would stop the ranks."""
        if os.getppid() == parent:
            asyncio.get_running_loop().call_later(1.0, self.end_with, parent)
        elif not self._leaving:
            self._leave()

    async def _end_cut_off(self) -> None:
        """Return when this process is to end so that what keeps it from being heard becomes known."""

        def trouble() -> Trouble | None:
            return None if self._known_attempt or self._running or self._leaving or self._finish is not None else self.unheard_trouble()

        self.cut_off = await CutOff(trouble).wait()
        self._console.say(f"nobody hears this node: {self.cut_off.text}; the agent restarts and keeps trying")

    def _patience(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Watch for a node 0 that is away for longer than hosts are waited for: the job is over there, or was deleted, and nobody is left
        to say so.
        """
        limits = self._run.timeouts
        if limits.return_seconds is not None and self._node.index != 0:
            seconds = max(limits.return_seconds, limits.start_seconds)  # node 0 waits no longer for this one either
            yield watch(self.link, seconds, lambda: self._give_up(seconds))

    def _give_up(self, seconds: int) -> None:
        if self._running or self._gave_up:
            return
        self._gave_up = True
        self._console.say(
            f"nothing heard from node 0 for {duration(seconds)}, longer than hosts wait for each other (away_seconds, startTimeoutSeconds):"
            f" this agent ends. To go on with the job: lockstep resume {self._run.job.name}"
        )
        self._may_end()

    def _hello(self) -> Hello:
        states = bounded(self._ranks.states()) if self._ranks is not None else ()
        self._fabric.forget_sent(self._ranks)
        running = self._known_attempt if self._running else 0
        told = (boot_id(), slept_seconds(), self._unable, build_id())
        return Hello(self._node.index, self._instance, self._known_attempt, running, states, self._leaving, *told)

    def _connected(self) -> None:
        self._dev.connected()

    def _take(self, order: Order) -> None:
        if isinstance(order, Check):
            self._prepare(order)
            self._preflight.take(order)
            return
        if self._dev.take(order):
            return
        self._preflight.end()
        if isinstance(order, Start):
            self._start(order)
        elif isinstance(order, Stop):
            self._stop(order)
        elif isinstance(order, Finish):
            self._end(order)

    def _prepare(self, check: Check) -> None:
        """Let the trainer's ranks import beside the self-test: both take seconds, and the start waits for the longer one only."""
        if check.attempt is None or self._run.training is None or self._running or self._leaving or self._standby.leaders:
            return
        before = Start(check.attempt - 1, 0, self._run.addresses[0], self._run.master_port)
        self._standby.prepare(self._run.command, self._run.working_directory, environments_of(self._node, before))

    def _start(self, order: Start) -> None:
        if order.attempt <= self._known_attempt or self._running or self._leaving or self._finish is not None:
            return  # of the past, or ranks of before are here yet
        self._known_attempt = order.attempt
        if self._node.index == 0 or self._run.storage is not StorageMode.SHARED:  # a volume that all share is one node's to tidy
            with contextlib.suppress(RuntimeError):  # no thread can be made: the ranks will say so
                threading.Thread(target=remove_old, args=(Path(self._run.run_dir) / "logs",), name="old stacks", daemon=True).start()
        self._console.begin_attempt(order.attempt)
        self._outbox.begin_attempt(order.attempt)
        self._progress.begin_attempt()
        for leavings in self._leavings:
            leavings.begin_attempt()
        self._ranks = LocalRanks(self._node, order, self._dev.writer(order, self._console.write))
        self._running = True
        if self._node.index != 0:  # else it would be empty where only rank 0 prints
            self._console.say(
                f"attempt {order.attempt} starts; this log has the output of node {self._node.index}'s ranks, node 0's log has the rest"
            )
        self._ranks.start(self._standby)
        self._standby.drop()
        for exit_ in self._ranks.exits():
            self._exited(exit_)
        self.link.send(Started(order.attempt))
        self._finish_attempt()

    def _stop(self, order: Stop) -> None:
        if not self._running:
            self.link.send(Stopped(order.attempt))
            return
        saves = order.mode is StopMode.SAVE or not order.mode.is_known  # which loses no step, and ends
        how = "saving and stopping" if saves else "stopping"
        if self._node.index != 0:  # there the coordinator has said it
            self._console.say(f"{how} attempt {order.attempt}: {order.message}")
        if saves:
            self._save()
        elif order.mode is StopMode.DUMP:
            self._dump()
        else:
            self._kill()

    def _end(self, order: Finish) -> None:
        if order.state not in ENDS:
            self._passed_over.add(f"end {order.state}")
            return
        if self._node.index != 0 and self._finish is None:
            self._console.say(f"{order.state.value}: {order.message}")
        self._finish = order
        self._standby.drop()
        self._kill()
        self._may_end()

    def _leave(self) -> None:
        """Save and stop on SIGTERM; on a second one, stop at once."""
        if self._leaving:
            self._kill()
        else:
            self._leaving = True
            self._standby.drop()
            self.link.send(Leaving())
            self._save()
        self._may_end()

    def _save(self) -> None:
        if self._ranks is not None and self._running:
            self._progress.begin_stop()
            self._ranks.save()
            asyncio.get_running_loop().call_later(self._run.save_grace_seconds, self._kill_attempt, self._known_attempt)

    def _dump(self) -> None:
        if self._ranks is not None and self._running:
            self._ranks.ask_for_stacks()
            asyncio.get_running_loop().call_later(DUMP_SECONDS, self._end_dump, self._known_attempt)

    def _end_dump(self, attempt: int) -> None:
        """Send what was seen of ranks that still run, then kill them, since not all can be killed. The others were reported at their
        end.
        """
        if self._ranks is not None and attempt == self._known_attempt:
            for dump in self._ranks.dumps():
                self.link.send(dump)
            self._kill()

    def _kill_attempt(self, attempt: int) -> None:
        if attempt == self._known_attempt:
            self._kill()

    def _kill(self) -> None:
        if self._ranks is not None:
            self._ranks.kill()
            self._survivors.killed(self._ranks)

    def _reap(self) -> None:
        self._read_reports()  # what a rank said before its end comes before its end
        self._fabric.tell(self._ranks)
        ranks = self._ranks.leaders if self._ranks is not None else {}
        for ended in ended_children({**ranks, **self._standby.leaders}):
            self._standby.ended(ended.pid)
            exit_ = self._ranks.reap(ended) if self._ranks is not None else None
            if exit_ is not None:
                self._exited(exit_)
        self._finish_attempt()

    def _exited(self, exit_: RankExit) -> None:
        self._outbox.flush()
        self._dev.printed.flush()
        dump = self._ranks.dumped(exit_.rank) if self._ranks is not None else None
        if dump is not None:
            self.link.send(dump)
        if self._node.index != 0 and not exit_.ordered and exit_.exit_code != 0:
            self._console.say(f"rank {exit_.rank} {exit_.how}")
        self.link.send(Exited(self._known_attempt, exit_))

    def _finish_attempt(self) -> None:
        """End the attempt once its last rank has ended and that rank's children with it: another attempt's ranks must not meet them."""
        if self._ranks is None or not self._running:
            return
        self._ranks.look_for_children()
        if self._ranks.leaders:
            return
        self._ranks.finish()
        if self._ranks.left():
            asyncio.get_running_loop().call_later(LEFT_SECONDS, self._finish_attempt)  # where orphans are not ours, their end isn't heard
            return
        self._ranks.nccl.keep(Path(self._run.run_dir) / "logs" / "nccl", self._console.say)
        self._clear_leavings()
        self._running = False
        if not self._leaving and self._finish is None:
            self._ranks.prepare_next(self._standby)
        self.link.send(Stopped(self._known_attempt))
        self._may_end()

    def _clear_leavings(self) -> None:
        for leavings in self._leavings:
            if sentence := leavings.clear():
                self._console.say(sentence)

    async def _look_at_files(self, leavings: Leavings) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._ranks is not None and self._running:
                with contextlib.suppress(RuntimeError):  # no thread can be made
                    await in_thread(partial(leavings.look, set(self._ranks.leaders)), "shared memory")

    def _may_end(self) -> None:
        finished = self._finish is not None and self._run.when_done is WhenDone.EXIT
        if not self._running and (finished or self._leaving or self._gave_up):
            self._done.set()

    def _exit_code(self) -> int:
        if self.cut_off is not None:
            return UNREACHABLE
        if self._finish is not None:
            return DONE if self._finish.state is State.COMPLETE else FAILED
        if self._gave_up:
            return FAILED
        exits = self._ranks.exits() if self._ranks is not None else []
        return SAVED if all(exit_.exit_code in (DONE, SAVED) for exit_ in exits) else FAILED

    def _read_reports(self) -> None:
        for report in self._socket.received():
            if isinstance(report, NewerKind):
                self._passed_over.add(report)
            elif isinstance(report, ContractError):
                if not self._malformed_said:
                    self._malformed_said = True
                    self._console.say(f"ignored a malformed report, and will ignore more like it: {report}")
            else:
                self._report(report)

    def _report(self, report: RankReport) -> None:
        rank = self._ranks.find(report.rank) if self._ranks is not None and self._running else None
        if rank is None:
            return
        first, rank.ready = not rank.ready, True
        if isinstance(report, Error):
            rank.error = report
        elif isinstance(report, (Activity, Step, Beat, Pace)):
            rank.progressed(report)
        self._outbox.put(report, first)

    def _unheard(self) -> None:
        """Stop ranks that have no coordinator after the silence: nobody could tell them to stop, and another attempt may start."""
        if self._running and not self._leaving:
            self._console.say(
                f"nothing heard from the coordinator for {self._silence_seconds:.0f} s: stopping this node's ranks, then waiting for it"
            )
            self._kill()
