"""NCCL's own log of every rank: asked for by variables, read as it grows, shown as far as wanted, and kept for the last attempt.

NCCL writes one file a process into this agent's own folder. A rank could fill a disk with it (TRACE), so a file that grows over a bound is
emptied under NCCL's hands: it goes on writing at its old place, and the hole before it takes no room.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from lockstep_gang.agent.ranks.relay import LINE_BYTES_MAX, printable_bytes
from lockstep_gang.contract.fabric import FabricAsked, RankFabric
from lockstep_gang.lifecycle.fabric.nccl import messages, read_line
from lockstep_spec.files import open_regular, read_regular, write_durably, write_new

SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET"
PART_BYTES = 2 * 1024 * 1024
"""Size of the first and of the last part that are kept of a rank's log."""
FILES_MAX = 64
"""Log files of one rank: each program that it starts has one, too."""
NAMES_MAX = 4096
"""Log files of all ranks. A rank that fills the folder must not keep its agent from all else."""
READ_BYTES = 1024 * 1024
"""Size read of a file at a time: a rank that floods its log must not keep its agent from all else."""
_READ_LEVELS = frozenset({"INFO", "TRACE"})
Write = Callable[[int, str, bool], None]
"""(rank, line, whether it is a warning) into the job's log."""


@dataclass(frozen=True)
class LogChoice:
    """Variables that tell NCCL where to log, how much of the log is shown, and why nothing can be read from it, if so."""

    variables: dict[str, str]
    shown: str | None = None
    unread: str = ""


def log_choice(asked: FabricAsked | None, gpus: int, environment: Mapping[str, str], pattern: str) -> LogChoice:
    """Choose what NCCL logs. `given` is the rank's environment without this, and wins; `pattern` is the file that Lockstep reads."""
    if asked is None or gpus == 0:
        return LogChoice({})
    if environment.get("NCCL_DEBUG_FILE"):
        return LogChoice(
            {}, unread=f"NCCL_DEBUG_FILE is {environment['NCCL_DEBUG_FILE']}, so NCCL logs there: remove it to have the fabric verified"
        )
    own = environment.get("NCCL_DEBUG", "")
    level, shown, unread = "TRACE" if asked.nccl_debug == "TRACE" else "INFO", asked.nccl_debug, ""
    if own and own != asked.nccl_debug:
        level, shown = own, own.upper()
        unread = "" if shown in _READ_LEVELS else f"NCCL_DEBUG is {own}: remove it, or set it to INFO, to have the fabric verified"
    subsystems = environment.get("NCCL_DEBUG_SUBSYS") or SUBSYSTEMS
    return LogChoice({"NCCL_DEBUG": level, "NCCL_DEBUG_SUBSYS": subsystems, "NCCL_DEBUG_FILE": pattern}, shown, unread)


def is_shown(level: str, shown: str | None) -> bool:
    """Return True for a warning, and for what NCCL_DEBUG would have shown."""
    if level == "WARN":
        return True
    return shown is not None if level == "VERSION" else shown == "TRACE" or (shown == "INFO" and level == "INFO")


class LogFile:
    """One growing file, read line by line. If it is gone or unreadable, there is nothing new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._base = 0
        """Offset at which what is still in the file begins."""
        self._rest = b""
        self._has_head = False

    def lines(self) -> Iterator[str]:
        """Whole lines that are new. The rest of a line that is not whole comes with its end."""
        *whole, self._rest = (self._rest + self._new()).split(b"\n")
        for raw in whole:
            text = raw.strip(b"\0\r ")
            if text:
                yield printable_bytes(text[:LINE_BYTES_MAX])
        if len(self._rest) > LINE_BYTES_MAX:
            self._rest = b""

    def retained(self) -> bytes:
        """First and last part of the file."""
        with contextlib.suppress(OSError):
            with os.fdopen(open_regular(self._path), "rb") as file:
                file.seek(self._base)
                last = file.read(PART_BYTES).lstrip(b"\0")
            head = b""
            with contextlib.suppress(OSError):  # there is none, or not of ours
                head = read_regular(self._head_path, PART_BYTES)
            return head + (b"\n[lockstep] lines are left out here\n" if head else b"") + last
        return b""

    @property
    def _head_path(self) -> Path:
        return self._path.with_suffix(".head")

    def _new(self) -> bytes:
        try:
            with os.fdopen(open_regular(self._path, os.O_RDWR), "r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # emptied here, then written to by one who appends
                    self._offset = self._base = 0
                if size - self._offset > PART_BYTES:  # too fast to be read
                    self._offset = size - READ_BYTES
                    self._rest = b""
                file.seek(self._offset)
                data = file.read(READ_BYTES)
                self._offset += len(data)
                if self._offset - self._base > PART_BYTES:
                    self._empty(file)
        except OSError:
            return b""
        return data

    def _empty(self, file: BinaryIO) -> None:
        if not self._has_head:
            file.seek(0)
            write_new(self._head_path, file.read(PART_BYTES))
            self._has_head = True
        os.ftruncate(file.fileno(), 0)
        self._base = self._offset


@dataclass
class RankLog:
    """Log of one rank: what it says of the fabric, and what of that was sent."""

    fabric: RankFabric
    shown: str | None = None
    files: dict[Path, LogFile] = field(default_factory=dict)
    sent: RankFabric | None = None


class NcclLogs:
    """The logs of one attempt's ranks on this node."""

    def __init__(self, folder: Path, attempt: int, write: Write) -> None:
        self.folder = folder / f"nccl-{attempt}"
        self._attempt = attempt
        self._write = write
        self._ranks: dict[int, RankLog] = {}
        self._keeping: threading.Thread | None = None

    def pattern(self, rank: int) -> str:
        """Value of NCCL_DEBUG_FILE: one file a process, since a rank may start others that use NCCL too."""
        return f"{str(self.folder).replace('%', '%%')}/rank-{rank}.%p.log"

    def add(self, rank: int, choice: LogChoice, fabric: RankFabric | None = None) -> None:
        """Add a rank of this attempt; `fabric` is what is known of it before it starts."""
        if choice.variables:
            self.folder.mkdir(mode=0o700, exist_ok=True)
        self._ranks[rank] = RankLog(fabric or RankFabric(rank, unread=choice.unread), choice.shown)

    def news(self) -> tuple[RankFabric, ...]:
        """Read what is new. Returns the ranks of which more is known than was sent."""
        for rank, log in self._ranks.items():
            for file in self._files(rank, log):
                for line in file.lines():
                    self._take(rank, log, line)
        changed = tuple(log.fabric for log in self._ranks.values() if log.fabric not in (log.sent, RankFabric(log.fabric.rank)))
        for log in self._ranks.values():
            log.sent = log.fabric
        return changed

    def forget_sent(self) -> None:
        """Report everything again: the listener is new."""
        for log in self._ranks.values():
            log.sent = None

    def keep(self, folder: Path, say: Callable[[str], None]) -> None:
        """Copy what there is into `folder` of the job's volume, in a thread: a volume that hangs must not hang the agent."""
        if self.folder.exists():
            self._keeping = threading.Thread(target=self._copy, args=(folder, say), name="nccl-logs", daemon=True)
            self._keeping.start()

    def end(self, seconds: float) -> None:
        """Wait for the copies, but not longer than this."""
        if self._keeping is not None:
            self._keeping.join(seconds)

    def _files(self, rank: int, log: RankLog) -> list[LogFile]:
        begins = f"rank-{rank}."
        for name in sorted(name for name in self._names() if name.startswith(begins) and name.endswith(".log")):
            path = self.folder / name
            if path not in log.files and len(log.files) < FILES_MAX:
                log.files[path] = LogFile(path)
        return list(log.files.values())

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.folder) as entries:
                return [entry.name for entry in islice(entries, NAMES_MAX)]
        except OSError:  # nobody logs there
            return []

    def _take(self, rank: int, log: RankLog, line: str) -> None:
        log.fabric = read_line(log.fabric, line)
        level = next((level for level, _ in messages(line)), "INFO")
        if is_shown(level, log.shown):
            self._write(rank, line, level == "WARN")

    def _copy(self, folder: Path, say: Callable[[str], None]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank, log in self._ranks.items():
                text = b"".join(file.retained() for file in log.files.values())
                head = f"[lockstep] NCCL's log of rank {rank}, attempt {self._attempt}\n"
                write_durably(folder / f"rank-{rank}.log", head.encode() + text)
        except OSError as error:
            say(f"cannot keep NCCL's logs under {folder} ({error.strerror}): is the volume full or read-only?")
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)
