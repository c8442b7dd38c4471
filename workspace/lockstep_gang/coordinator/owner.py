"""The owner of a run's folder: one job at a time, so that two of one name on one volume don't train in one folder.

`gang/owner.N.json` names the owner, and counts up while its coordinator lives. A coordinator takes over by creating N + 1, which only one
of several can; the highest number counts: at once from one of its own job, or of a job that has ended, else after DEAD_SECONDS without a
sign of life. What a power cut leaves is the owner before or the new one, which is dead after that time if it doesn't come back.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep_gang.contract.run import POD_IPS, Run
from lockstep_gang.coordinator.machine import boot_id
from lockstep_gang.coordinator.records import read_record
from lockstep_spec.codec import ContractError, to_json
from lockstep_spec.files import Signs, write_durably

BEAT_SECONDS = 10.0
LOOK_SECONDS = 2.0
DEAD_SECONDS = 60.0
_FILE = re.compile(r"owner\.([1-9][0-9]{0,17})\.json")


class Replaced(OSError):
    """Another coordinator has taken the folder over: this one was taken for lost, and nothing it knows counts."""

    def __init__(self, text: str, job_uid: str) -> None:
        super().__init__(errno.ESTALE, text)
        self.job_uid = job_uid
        """Job of the other one."""


@dataclass(frozen=True)
class Owner:
    """Content of the file. As it is here, of one that is damaged or not whole: it may be any job's."""

    job_uid: str = ""
    place: str = "another job"
    """The job and where it runs, for people."""
    instance: str = ""
    """Random, of the coordinator."""
    process: str = ""
    """`BOOT NAMESPACE PID` of the coordinator: within the same ones others see if it is gone. Empty where that isn't known."""
    count: int = 0
    ended: bool = False


class Ownership:
    """This coordinator's part in who owns the folder. Every method may take as long as the volume does."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = Path(run.run_dir) / "gang"
        self._own = Owner(run.job.uid, place_of(run), secrets.token_hex(8), _process(os.getpid()))
        self._number = 0
        """Number of the own file; 0: none."""
        self._signs = Signs(clock)
        self._first: dict[int, Owner] = {}
        self._writing = threading.Lock()

    def take(self) -> tuple[str, bool] | None:
        """Take the folder, unless another job has it: words for that, and if it has shown a sign of life. Raises OSError."""
        with self._writing:
            number, owner = self._newest()
            silent_seconds = self._signs.unchanged_seconds({str(number): repr(owner).encode()})[str(number)]
            is_free = owner.job_uid == self._own.job_uid or owner.ended or _is_gone(owner.process) or silent_seconds >= DEAD_SECONDS
            if number and not is_free:
                return owner.place, bool(owner.instance) and owner != self._first.setdefault(number, owner)
            self._folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another was faster: the look after it says which
                self._create(self._file(number + 1))
            newest, owner = self._newest()
            if owner.instance != self._own.instance:
                return owner.place, False
            self._number = newest
            for older in set(self._numbers()) - {newest}:
                with contextlib.suppress(OSError):
                    self._file(older).unlink()
            return None

    def check(self) -> None:
        """Raise Replaced when another coordinator has taken the folder since this one did, and OSError."""
        owner = self._newest()[1] if self._number else self._own
        if owner.instance not in ("", self._own.instance):
            text = f"{owner.place} has taken over {self._folder.parent}, where this job had shown no sign of life for {DEAD_SECONDS:.0f} s"
            raise Replaced(text, owner.job_uid)

    def beat(self) -> None:
        """Show a sign of life. Raises Replaced when another coordinator has taken the folder, and OSError."""
        with self._writing:
            if not self._own.ended:
                self.check()
                self._own = replace(self._own, count=self._own.count + 1)
                self._write(self._file(self._number))

    def let_go(self) -> None:
        """Leave the folder to the next job, which else waits. A newer coordinator of the same job keeps it."""
        with self._writing, contextlib.suppress(OSError):
            self._own = replace(self._own, ended=True)
            number, owner = self._newest()
            if owner.instance == self._own.instance:
                self._write(self._file(number))

    def _create(self, file: Path) -> None:
        """Write the first content, of several coordinators only one. Raises FileExistsError in the others, and OSError, and then leaves
        nothing.
        """
        file.touch(exist_ok=False)
        try:
            self._write(file)
        except OSError:
            file.unlink(missing_ok=True)
            raise

    def _write(self, file: Path) -> None:
        write_durably(file, json.dumps(to_json(self._own)).encode())

    def _newest(self) -> tuple[int, Owner]:
        """Highest number, and what its file says; 0: there is none."""
        number = max(self._numbers(), default=0)
        try:
            return number, read_record(Owner, self._file(number)) or Owner()
        except ContractError:
            return number, Owner()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return number, Owner()

    def _numbers(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [int(match[1]) for path in self._folder.iterdir() if (match := _FILE.fullmatch(path.name))]
        return []

    def _file(self, number: int) -> Path:
        return self._folder / f"owner.{number}.json"


def place_of(run: Run) -> str:
    """Return words by which a person finds the job: `job x in namespace a (node 0 at 10.0.0.7)`."""
    address = os.environ.get(POD_IPS, "").split(",")[0]
    if run.host is not None:
        return f"job {run.job.name} on hosts (node 0 at {run.addresses[0]})"
    if address:
        return f"job {run.job.name} in namespace {run.job.namespace} (node 0 at {address})"
    return f"job {run.job.name} as processes on {socket.gethostname()}"


def _process(pid: int) -> str:
    try:
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {pid}" if (boot := boot_id()) else ""
    except OSError:
        return ""


def _is_gone(process: str) -> bool:
    pid = process.rpartition(" ")[2]
    return pid.isdecimal() and _process(int(pid)) == process and not Path(f"/proc/{pid}").exists()
