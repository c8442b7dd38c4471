"""The ranks of one attempt on this node: start, output, stop, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep_gang.agent.ranks.environment import RankPlace, inherited, rank_environment, with_start
from lockstep_gang.agent.ranks.memory import MemoryGroup, process_limit
from lockstep_gang.agent.ranks.nccl_log import LogChoice, NcclLogs, log_choice
from lockstep_gang.agent.ranks.processes import EndedProcess, group_is_gone, kill_strays, send, send_to_group, start_process
from lockstep_gang.agent.ranks.progress_server import offered
from lockstep_gang.agent.ranks.relay import Relay, drain
from lockstep_gang.agent.ranks.reports import read_error_file
from lockstep_gang.agent.ranks.room import lack_of_room
from lockstep_gang.agent.ranks.script import argv, file_elsewhere, local_rank_option, program_problem, with_local_rank
from lockstep_gang.agent.ranks.stacks import ask_for_stacks, dumped, head_line, shortened, stack_path, state_after_kill, write_stacks
from lockstep_gang.agent.ranks.standby import Standby
from lockstep_gang.contract.messages import (
    Activity,
    Beat,
    Dumped,
    Error,
    OutOfMemory,
    Pace,
    RankExit,
    RankReport,
    RankState,
    Start,
    Step,
    rank_report_to_json,
)
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.causes import signal_of
from lockstep_gang.lifecycle.hang import STOPPED
from lockstep_machine.processes import ProcessState, process_state
from lockstep_machine.readings import PROC
from lockstep_spec.exits import DONE, SAVED

NOT_STARTED = 127  # a shell's code for a command that can't be found


@dataclass(frozen=True)
class LocalNode:
    """Values that are the same for all attempts on this node."""

    run: Run
    index: int
    run_path: str
    report_socket: Path
    folder: Path
    """For this agent alone, mode 0700."""
    reporting: Mapping[str, str] = field(default_factory=dict)
    """Variables that tell a script where its progress is taken."""
    start: str = ""
    """Folder of what each rank's Python runs first (`rankstart`); none: nothing."""
    secret_file: str = ""
    """File of what the run's ranks prove to each other; '': they have nothing."""


class RankProcess:
    """One rank: its process, its pipe, and what is known of it."""

    def __init__(self, node: LocalNode, start: Start, local_rank: int, write: Callable[..., None]) -> None:
        group_rank = node.index if start.group_rank is None else start.group_rank
        first = node.run.ranks_of(node.index).start if start.first_rank is None else start.first_rank
        self.rank = first + local_rank
        self.pid = 0
        self.pipe = -1
        self.ready = False
        self._step: int | None = None
        """Last step that it has reported."""
        self._stepped_at = 0.0
        self._progress: dict[type, RankReport] = {}
        """Newest report of each kind of its progress, the newest last."""
        self.ordered = False
        self.error: Error | None = None
        self.exit: RankExit | None = None
        self._attempt, self._run = start.attempt, node.run
        run, asked = node.run, start.run
        self._command = run.command if asked is None else argv(asked)
        self._local_rank, self._gets_local_rank = local_rank, run.local_rank
        if asked is not None:  # (the text of its Python program decides)
            self._gets_local_rank = None if self._command[1:] == asked.command else False
        self._folder = run.working_directory if asked is None else asked.folder
        self._state_before: ProcessState | None = None
        """State of its process before it was killed."""
        self._asked_for_stacks = False
        self._relay = Relay(self.rank, write)
        self._error_file = node.folder / f"error-{start.attempt}-{self.rank}.json"
        files = (node.run_path, str(node.report_socket), str(self._error_file), node.secret_file)
        place = RankPlace(node.index, group_rank, self.rank, local_rank, *files)
        container = inherited()
        container |= offered(node.reporting, {**container, **node.run.environment})
        environment = rank_environment(node.run, start, place, container)
        self._environment = with_start(environment, node.start) if node.start else environment

    def log_nccl(self, run: Run, pattern: str) -> LogChoice:
        """Let NCCL log to `pattern`, as far as nobody else has said where and what."""
        choice = log_choice(run.fabric, run.gpus_per_node, self._environment, pattern)
        self._environment |= choice.variables
        return choice

    def note(self, line: str, is_warning: bool) -> None:
        """Pass on a line of NCCL's log; a warning may say why the rank ends."""
        self._relay.note(line, remember=is_warning)

    @property
    def environment(self) -> Mapping[str, str]:
        return self._environment

    def local_rank_option(self) -> str:
        """Option by which its script gets its local rank; '': none."""
        return local_rank_option(self._command, self._folder, self._environment, self._gets_local_rank)

    def start(self, standby: Standby, option: str) -> None:
        """Start the rank, as the standby process that waits for it if there is one. A command that can't be started counts as an exit.
        `option`: of its local rank.
        """
        taken = standby.take(self._environment)
        if taken is not None:
            self.pid, self.pipe = taken
            return
        self.pipe, write_end = os.pipe()
        os.set_blocking(self.pipe, False)
        try:
            command = with_local_rank(self._command, option, self._local_rank)
            self.pid = start_process(command, self._folder, self._environment, write_end)
        except OSError as error:
            problem = program_problem(self._command[0], self._folder, self._environment)
            reason = Error(self.rank, type(error).__name__, problem or f"{error.strerror}: {error.filename or self._command[0]}")
            self.exit = RankExit(self.rank, NOT_STARTED, None, False, reason, (reason.message,), process_limit=process_limit())
        finally:
            os.close(write_end)

    def relay(self) -> bool:
        """Pass on what the rank wrote. False: its output has ended."""
        return drain(self.pipe, self._relay)

    def ask_for_stacks(self, trainer: bool) -> None:
        """Make the rank write its stacks; all that it writes from here on belongs to them."""
        self._asked_for_stacks = self.ordered = True
        self._relay.captured = []
        self._state_before = ask_for_stacks(self.pid, trainer)

    def look(self) -> None:
        """Note the process's state if it is stopped: then it is why others have failed."""
        if self._state_before is None:
            state = process_state(PROC / str(self.pid))
            self._state_before = state if state.letter in STOPPED else None

    def survived(self) -> Dumped:
        """State of what is left of it after SIGKILL."""
        state = state_after_kill(self.pid)
        return Dumped(self._attempt, self.rank, state.letter, state.kernel_function)

    def dumped(self, node: LocalNode) -> Dumped | None:
        """Return once what was seen of it; None: nobody looked, or nothing was found."""
        seen, self._state_before = self._state_before, None
        if seen is None:
            return None
        lines = self._relay.captured or []
        path = stack_path(node.run.run_dir, self._attempt, self.rank)
        head = head_line(self.rank, node.index, self._attempt, self.pid, seen)
        shown = shortened(lines, node.run.world_size)
        return dumped(self._attempt, self.rank, seen, lines, write_stacks(path, head, shown) if self._asked_for_stacks else None)

    def ended(self, ended: EndedProcess, out_of_memory: OutOfMemory | None) -> RankExit:
        """Exit of the rank. All it wrote before its end is in the pipe by now, so its last lines are its last."""
        self.relay()
        self._relay.finish()
        error = self.error or read_error_file(self._error_file, self.rank)
        lines, fresh = tuple(self._relay.last_lines), self._relay.fresh_from
        self.exit = RankExit(self.rank, ended.exit_code, ended.signal, self.ordered, error, lines, fresh, out_of_memory, ended.left)
        if ended.exit_code != 0 and not self.ordered:
            texts = (*self.exit.fresh_lines, error.message if error is not None else "", ended.signal or signal_of(ended.exit_code) or "")
            room, elsewhere = lack_of_room(self._run, texts), file_elsewhere(self._run, texts)
            self.exit = replace(self.exit, process_limit=process_limit(), no_room=room, elsewhere=elsewhere)
        return self.exit

    def state(self) -> RankState:
        age = None if self._step is None else int(time.monotonic() - self._stepped_at)
        told = (replace(report, metrics={}) if isinstance(report, Step) else report for report in self._progress.values())
        progress = tuple(map(rank_report_to_json, told))
        return RankState(self.rank, self.ready, self.exit, self._step, age, progress)

    def progressed(self, report: Activity | Step | Beat | Pace) -> None:
        """Note how far the rank has come, and keep what it has told of its progress, for a connection that is made anew."""
        if isinstance(report, (Step, Pace)) and (self._step is None or report.step > self._step):
            self._step, self._stepped_at = report.step, time.monotonic()
            self._relay.went_on()
        if not isinstance(report, Pace):
            self._progress.pop(type(report), None)
            self._progress[type(report)] = report


def environments_of(node: LocalNode, start: Start) -> list[Mapping[str, str]]:
    """Variables that this node's ranks have in an attempt, but for those of NCCL's log."""
    return [RankProcess(node, start, local, lambda *_: None).environment for local in range(len(node.run.ranks_of(node.index)))]


class LocalRanks:
    """All ranks of one attempt on this node."""

    def __init__(self, node: LocalNode, start: Start, write: Callable[..., None]) -> None:
        self.attempt = start.attempt
        self._node = node
        self._ranks = [RankProcess(node, start, local, write) for local in range(len(node.run.ranks_of(node.index)))]
        self._by_pid: dict[int, RankProcess] = {}
        self._outlived: set[int] = set()
        self._finished = False
        self._memory = MemoryGroup()
        self.nccl = NcclLogs(node.folder, start.attempt, self._note)
        for rank in self._ranks:
            self.nccl.add(rank.rank, rank.log_nccl(node.run, self.nccl.pattern(rank.rank)))

    def start(self, standby: Standby) -> None:
        option = self._ranks[0].local_rank_option()
        for rank in self._ranks:
            rank.start(standby, option)
            if rank.exit is None:
                self._by_pid[rank.pid] = rank
                asyncio.get_running_loop().add_reader(rank.pipe, self._output, rank)

    @property
    def numbers(self) -> list[int]:
        """Numbers of this node's ranks."""
        return [rank.rank for rank in self._ranks]

    @property
    def leaders(self) -> dict[int, RankProcess]:
        """Ranks that run, by process id."""
        return self._by_pid

    def find(self, rank: int) -> RankProcess | None:
        return next((r for r in self._ranks if r.rank == rank), None)

    def prepare_next(self, standby: Standby) -> None:
        """Let the next attempt's ranks begin to import, if this one has failed and its ranks know how to wait."""
        if self._node.run.training is not None and any(exit_.exit_code not in (DONE, SAVED) for exit_ in self.exits()):
            standby.prepare(self._node.run.command, self._node.run.working_directory, [rank.environment for rank in self._ranks])

    def states(self) -> tuple[RankState, ...]:
        return tuple(rank.state() for rank in self._ranks)

    def exits(self) -> list[RankExit]:
        return [rank.exit for rank in self._ranks if rank.exit is not None]

    def save(self) -> None:
        """Send SIGTERM to each rank, once: a second one would meet it while it ends. Not to its children: data loaders that die would break
        the save.
        """
        for pid, rank in self._by_pid.items():
            if not rank.ordered:
                rank.ordered = True
                send(pid, signal.SIGTERM)

    def ask_for_stacks(self) -> None:
        for rank in self._by_pid.values():
            rank.ask_for_stacks(trainer=self._node.run.training is not None)

    def dumps(self) -> list[Dumped]:
        """States and stacks of ranks that still run, each once."""
        return [dump for rank in self._by_pid.values() if (dump := rank.dumped(self._node)) is not None]

    def left(self) -> list[RankProcess]:
        """Ranks that run, and those of which a child does: one that a device holds up outlives the shell script that started it."""
        return [rank for rank in self._ranks if rank.pid in self._by_pid or rank.pid in self._outlived]

    def look_for_children(self) -> None:
        """Note which ranks are outlived by their children. Called at every child's end, before another process can get the number of a
        group.
        """
        self._outlived = {pid for pid in self._outlived if not group_is_gone(pid)}

    def survivors(self) -> list[Dumped]:
        """States of what is left of ranks that were killed."""
        return [rank.survived() for rank in self.left()]

    def dumped(self, rank: int) -> Dumped | None:
        found = self.find(rank)
        return found.dumped(self._node) if found is not None else None

    def kill(self) -> None:
        for pid, rank in self._by_pid.items():
            rank.ordered = True
            rank.look()
            send_to_group(pid, signal.SIGKILL)

    def reap(self, ended: EndedProcess) -> RankExit | None:
        """The exit of the rank that this child was; None for an orphan."""
        rank = self._by_pid.pop(ended.pid, None)
        if rank is None:
            return None
        self._outlived.add(ended.pid)
        return rank.ended(ended, self._memory.killed(ended.peak_bytes) if not rank.ordered else None)

    def finish(self) -> None:
        """End processes that left their session and close the pipes, once, when no rank runs any more."""
        if self._finished:
            return
        self._finished = True
        kill_strays(f"LOCKSTEP_REPORT_SOCKET={self._node.report_socket}")
        for rank in self._ranks:
            self._close(rank)

    def _note(self, rank: int, line: str, is_warning: bool) -> None:
        process = self.find(rank)
        if process is not None:
            process.note(line, is_warning)

    def _output(self, rank: RankProcess) -> None:
        if not rank.relay():
            self._close(rank)

    def _close(self, rank: RankProcess) -> None:
        if rank.pipe >= 0:
            asyncio.get_running_loop().remove_reader(rank.pipe)
            with contextlib.suppress(OSError):
                os.close(rank.pipe)
            rank.pipe = -1


SURVIVED_SECONDS = 5.0
"""Time after SIGKILL from which on a rank that hasn't ended is reported."""


class Survivors:
    """Report ranks that outlive SIGKILL, again and again: the coordinator may be away, and their state may change."""

    def __init__(self, send: Callable[[Dumped], None]) -> None:
        self._send = send
        self._attempt = 0

    def killed(self, ranks: LocalRanks) -> None:
        """Begin to report: its ranks were sent SIGKILL, for the first time or again."""
        if ranks.attempt != self._attempt and ranks.left():
            self._attempt = ranks.attempt
            asyncio.get_running_loop().call_later(SURVIVED_SECONDS, self._tell, ranks)

    def _tell(self, ranks: LocalRanks) -> None:
        dumps = ranks.survivors()
        for dump in dumps:
            self._send(dump)
        if dumps:
            asyncio.get_running_loop().call_later(SURVIVED_SECONDS, self._tell, ranks)
