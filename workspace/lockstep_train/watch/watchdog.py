"""The watching thread of a rank, the signals that it wakes up for, and the record that it leaves of a hang.

It ends the process in three cases that the main thread can't see, because it waits inside a collective:
- an activity takes longer than its limit: every thread's stack is written down, the others hear of it, exit 76;
- another rank has marked the attempt's end: a hang (76), a failure (1), or a stop before there is anything to save (75);
- SIGTERM comes while the run is still loading: nothing has changed on disk, so it ends at once, and so do the others.

It also tells the agent where this rank is, so that somebody outside can judge it when not even this thread runs any more; and it writes
the stacks down when the agent asks for them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lockstep_spec.codec import from_json, to_json
from lockstep_spec.exits import FAILED, HANG, SAVED
from lockstep_train.base.errors import Hang, Stopped, TrainerError
from lockstep_train.base.limits import Watch
from lockstep_train.report import Reporter
from lockstep_train.report.terminal import print_error
from lockstep_train.watch.beats import Beat, explain

if TYPE_CHECKING:  # it imports torch, which comes later
    from lockstep_train.base.store import Store


class StopSignal:
    """Set by SIGTERM; the main thread reads it at borders, where all ranks agree on it.

    SIGTERM to a rank means save and stop, and nothing else. A second one means the same. SIGUSR2: write down where it is, and end.
    """

    def __init__(self) -> None:
        self.requested = False
        self.stacks_requested = False
        """Set by SIGUSR2: the gang hangs and is about to be stopped."""
        self._readable: int | None = None

    def install(self) -> None:
        """Install the handlers, in the main thread, before torch is imported, so that a signal during start-up isn't lost."""
        self._readable, writable = os.pipe()
        os.set_blocking(self._readable, False)
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGUSR2, self._handle_usr2)

    def wait(self, seconds: float) -> None:
        """Wait, in another thread, for `seconds`, or until the signal comes. While the main thread waits within a
        collective no Python runs there, not even the handler; the C handler's byte in the pipe is seen all the same."""
        if self._readable is None:
            select.select([], [], [], seconds)
            return
        ready, _, _ = select.select([self._readable], [], [], seconds)
        signals = os.read(self._readable, 4096) if ready else b""
        self.requested = self.requested or signal.SIGTERM in signals
        self.stacks_requested = self.stacks_requested or signal.SIGUSR2 in signals

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def _handle_usr2(self, number: int, frame: FrameType | None) -> None:
        """Do nothing: the byte in the pipe is what counts."""


RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""NCCL's flight recorder: PyTorch keeps the last collectives of a rank in memory, which shows on which one ranks disagree."""


def switch_on_recorder(logs: Path) -> None:
    """Switch the flight recorder on, before the process group is made. What the user has set stays."""
    for name, value in {**RECORDER, "TORCH_FR_DUMP_TEMP_FILE": str(logs / "nccl-timeout-rank-")}.items():
        os.environ.setdefault(name, value)


def write_flight_record(path: Path) -> None:
    """Write the flight recorder's record as JSON, where there is one. Raises OSError."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    records = _records(torch._C._distributed_c10d)
    if records:
        path.write_bytes(next((record for record in records if b'"entries"' in record), records[0]))


def _records(c10d: Any) -> list[bytes]:
    """Records of each of torch's two NCCL backends, of which ranks use one: in torch 2.15 `nccl` is nccl2 unless TORCH_DIST_USE_NCCL2=0,
    and records where the older one's function doesn't look. torch 2.11 has no nccl2, and the new function knows no backend."""
    records = []
    if hasattr(c10d, "_dump_fr_trace_json"):
        with contextlib.suppress(TypeError):
            records.append(c10d._dump_fr_trace_json(backend="nccl2"))
    if hasattr(c10d, "_dump_nccl_trace_json"):
        records.append(c10d._dump_nccl_trace_json())
    return records


PERIOD_SECONDS = 1.0
BEAT_SECONDS = 5.0
"""Interval at which the agent hears of a rank that has not moved."""
LOOKS_APART_SECONDS = 3.0
JOIN_SECONDS = 10.0
"""Seconds that a stop during start-up waits for the store, to tell the others."""
GRACE_SECONDS = 10.0
"""Wait after another rank's failure: the main thread usually gets an error of its own, which says more."""
GOODBYE_SECONDS = 3.0
"""Seconds that rank 0, which keeps the store, waits for the others to have read why they end."""
STORE_TIMEOUT_SECONDS = 5.0
END_KEY = "watch/end"
"""Key of the store under which an attempt's early end is marked, once."""


class Reason(Enum):
    """Reason of an end, and what a rank that sees the mark does."""

    STOP = "stop"
    """Asked to stop before there is anything to save: end, saved and stopped."""
    FAILED = "failed"
    """A rank has failed: end soon, unless the main thread notices by itself."""
    HANG = "hang"
    """A rank hangs: end as hung."""


@dataclass(frozen=True)
class Mark:
    reason: Reason
    rank: int
    message: str


def make_mark(store: Store, mark: Mark) -> None:
    """Mark the attempt's end; only the first mark counts."""
    store.compare_set(END_KEY, "", json.dumps({"reason": mark.reason.value, "rank": mark.rank, "message": mark.message}))


def read_mark(store: Store) -> Mark | None:
    if not store.check([END_KEY]):
        return None
    value = json.loads(store.get(END_KEY))
    return Mark(Reason(value["reason"]), value["rank"], value["message"])


@dataclass(frozen=True)
class RankPlace:
    """Place of a rank: its number, its attempt, and the folder for what it writes down when it hangs."""

    rank: int
    attempt: int
    logs: Path

    def file(self, what: str, ending: str) -> Path:
        return self.logs / f"{what}-attempt-{self.attempt}-rank-{self.rank}.{ending}"


class Watchdog(Watch):
    """Watching thread of a rank, started before anything slow; `joined` gives it the store once there is one."""

    def __init__(self, stop: StopSignal, reporter: Reporter, place: RankPlace, leave: Callable[[int], None]) -> None:
        """`leave` ends the process with an exit code."""
        self._stop = stop
        self._reporter = reporter
        self._rank = place.rank
        self._place = place
        self._leave = leave
        self._store: Store | None = None
        self._ranks = 1
        self._gpus = False
        self._loading = True
        self._closed = threading.Event()
        self._now = ("Start", "", 0.0, float("inf"), 0)  # activity, place, since, limit, position: replaced as one
        self._beats = 0
        self._last_beat: tuple[int, float] = (-1, 0.0)  # position, when: the agent's last beat
        self._lost_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def joined(self, store: Store, ranks: int, *, gpus: bool = False) -> None:
        """`store`: a connection of this thread's own; one that waits for a key lets no other thread use it."""
        store.set_timeout(timedelta(seconds=STORE_TIMEOUT_SECONDS))
        self._ranks = ranks
        self._gpus = gpus
        self._store = store

    def close(self) -> None:
        """Watch no longer: what follows is the end of the process."""
        self._closed.set()

    def begin(self, activity: str, limit_seconds: float) -> None:
        self._now = (activity, "", time.monotonic(), limit_seconds, self._now[4] + 1)

    def at(self, place: str) -> None:
        activity, _, since, limit, position = self._now
        self._now = (activity, place, since, limit, position + 1)

    def loaded(self) -> None:
        self._loading = False

    def failed(self, error: BaseException) -> None:
        """Mark a failure, from the main thread when it ends with an error: the others should not wait for this rank."""
        self.close()
        if self._store is not None:
            with contextlib.suppress(Exception):  # the store may be what failed
                make_mark(self._store, Mark(Reason.FAILED, self._rank, f"{type(error).__name__}: {error}"[:500]))

    def end_of_others(self) -> TrainerError | None:
        """Error that tells why the others have ended, where an error of the main thread only shows that they have: a connection that is
        gone.
        """
        with contextlib.suppress(Exception):
            mark = read_mark(self._store) if self._store is not None else None
            if mark is not None and mark.reason is not Reason.FAILED:
                return {Reason.STOP: Stopped, Reason.HANG: Hang}[mark.reason](mark.message)
        return None

    def _run(self) -> None:
        while not self._closed.is_set():
            self._stop.wait(PERIOD_SECONDS)
            if self._closed.is_set():
                return
            if self._stop.stacks_requested:
                self._write_stacks()
                self._end(HANG, "the agent asked where this rank is, because the ranks hang")
            if self._loading and self._stop.requested:
                self._leave_early()
            self._tell_agent()
            self._exchange()
            _, _, since, limit, _ = self._now
            if time.monotonic() - since > limit:
                self._expire(limit)

    def _tell_agent(self) -> None:
        activity, place, _, limit, position = self._now
        if position == self._last_beat[0] and time.monotonic() - self._last_beat[1] < BEAT_SECONDS:
            return
        self._last_beat = (position, time.monotonic())
        limit_seconds = round(limit) if limit != float("inf") else None
        self._reporter.agent.send("beat", activity=activity, place=place, position=position, limitSeconds=limit_seconds)

    def _exchange(self) -> None:
        """Say where this rank is, and hear whether the attempt ends."""
        if self._store is None:
            return
        try:
            self._post(self._store)
            mark = read_mark(self._store)
        except Exception as error:  # whatever the store's connection does: it is gone
            self._lose_store(error)
            return
        self._lost_since = None
        if mark is not None:
            self._obey(mark)

    def _post(self, store: Store) -> None:
        self._beats += 1
        store.set(f"watch/beat/{self._rank}", json.dumps(to_json(self._beat())))

    def _beat(self) -> Beat:
        activity, place, since, _, position = self._now
        return Beat(position, activity, place, round(time.monotonic() - since, 1), self._beats)

    def _lose_store(self, error: Exception) -> None:
        """Handle a lost store. Rank 0 keeps it: without it this rank can't go on. If rank 0 had ended, its agent would have stopped this
        rank by now: it is frozen, or the network between is cut.
        """
        self._lost_since = self._lost_since or time.monotonic()
        if time.monotonic() - self._lost_since > GRACE_SECONDS and not self._closed.is_set():
            message = f"rank 0 can no longer be reached ({error})"
            if self._loading and self._stop.requested:
                self._end(SAVED, message)
            self._hang(message)

    def _obey(self, mark: Mark) -> None:
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.set(f"watch/read/{self._rank}", "")
        if mark.reason is Reason.STOP:
            self._end(SAVED, mark.message)
        if mark.reason is Reason.HANG:
            self._hang(mark.message)
        if not self._closed.wait(GRACE_SECONDS):
            self._end(FAILED, f"rank {mark.rank} has failed ({mark.message}); this rank can't go on without it")

    def _leave_early(self) -> None:
        """Leave without a save, because nothing has changed: the next start begins where this one did."""
        end = time.monotonic() + JOIN_SECONDS
        while self._store is None and time.monotonic() < end:
            time.sleep(0.05)
        message = "asked to stop before the first step: the state is the one it started from"
        self._tell(Mark(Reason.STOP, self._rank, message))
        self._end(SAVED, message)

    def _expire(self, limit: float) -> None:
        """End an activity that takes too long. Two looks at all ranks tell which of them still live. All of them may be looking: so this
        one goes on to beat meanwhile.
        """
        self._exchange()
        before = self._read_beats()
        end = time.monotonic() + LOOKS_APART_SECONDS
        while time.monotonic() < end:
            self._stop.wait(PERIOD_SECONDS)
            self._exchange()
        message = explain(self._beat(), limit, before, self._read_beats(), self._ranks, gpus=self._gpus)
        self._tell(Mark(Reason.HANG, self._rank, message))
        self._hang(message)

    def _read_beats(self) -> dict[int, Beat]:
        beats = {self._rank: self._beat()}
        with contextlib.suppress(Exception):
            for rank in range(self._ranks):
                key = f"watch/beat/{rank}"
                if rank != self._rank and self._store is not None and self._store.check([key]):
                    beats[rank] = from_json(Beat, json.loads(self._store.get(key)), "beat")
        return beats

    def _hang(self, message: str) -> None:
        self._write_stacks()
        self._reporter.agent.send_error(Hang(message))
        self._reporter.event("hang", message=message)
        self._end(HANG, message)

    def _write_stacks(self) -> None:
        """Write the stacks of all threads to standard error and to a file beside the run's logs; on a GPU also NCCL's last operations."""
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        with contextlib.suppress(OSError):
            self._place.logs.mkdir(parents=True, exist_ok=True)
            with self._place.file("hang", "txt").open("w") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
            write_flight_record(self._place.file("nccl", "json"))

    def _tell(self, mark: Mark) -> None:
        if self._store is not None:
            with contextlib.suppress(Exception):
                make_mark(self._store, mark)

    def _end(self, code: int, message: str) -> None:
        print_error(f"lockstep_train: rank {self._rank}: {message}")
        if self._rank == 0:
            self._wait_for_readers()
        self._leave(code)

    def _wait_for_readers(self) -> None:
        """Wait for the others to have read why: the store ends with this process."""
        end = time.monotonic() + GOODBYE_SECONDS
        keys = [f"watch/read/{rank}" for rank in range(1, self._ranks)]
        with contextlib.suppress(Exception):
            while self._store is not None and keys and time.monotonic() < end and not self._store.check(keys):
                time.sleep(0.05)
