"""The durable record on node 0's volume: `attempts.jsonl`, `end.json`, `goodput.json` and `report.json` in the folder `gang` of the run's
folder.

Every write replaces the whole file by rename after fsync before it returns, so that a reader sees the old or the new one, never half.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lockstep_gang.contract.report import CheckpointReport, Goodput
from lockstep_gang.lifecycle.history import AttemptRecord, EndRecord
from lockstep_spec.codec import ContractError, from_json, to_json
from lockstep_spec.files import read_regular, write_durably

T = TypeVar("T")
FILE_BYTES_MAX = 16 * 1024 * 1024
"""Largest record that is read: none that was written here comes near, and nothing else in its place gets into memory."""


@dataclass(frozen=True)
class GoodputRecord:
    """The account of one job; another job of the same name begins its own."""

    job_uid: str
    goodput: Goodput = field(default_factory=Goodput)
    checkpoint: CheckpointReport | None = None
    """The newest commit: the records of attempts have that of their begin or end, and a coordinator that is killed writes no end."""


_NO_FILE = frozenset({errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.EISDIR, errno.ENXIO})
"""Errors of `read_regular` for a FIFO, a device, a link, a folder or a file without measure: trying again would not help."""


class Records:
    """Records in the run's folder. Raises OSError when the volume can't be read or written, ContractError when a record can't be
    understood.

    `check` raises where another coordinator has the folder. One that takes it between this look and the write is not seen: its attempt
    begins again.
    """

    def __init__(self, run_dir: str, check: Callable[[], None] = lambda: None) -> None:
        self._folder = Path(run_dir) / "gang"
        self._attempts_path = self._folder / "attempts.jsonl"
        self._end_path = self._folder / "end.json"
        self._has_ended = False
        self._goodput_path = self._folder / "goodput.json"
        self.report_path = self._folder / "report.json"
        self._check = check
        self.are_owned = True
        """False while another job has the folder: the account and the report, which wait for nobody, aren't written then."""

    def attempts(self) -> list[AttemptRecord]:
        """The newest attempts that were started here, oldest first, of earlier jobs of this name too."""
        text = _text(self._attempts_path)
        if text is None:
            return []
        return [_parsed(AttemptRecord, line, f"{self._attempts_path}:{number}") for number, line in enumerate(text.splitlines(), 1)]

    def end(self) -> EndRecord | None:
        return read_record(EndRecord, self._end_path)

    def write_attempts(self, attempts: Sequence[AttemptRecord]) -> None:
        self._replace(self._attempts_path, "".join(json.dumps(to_json(record)) + "\n" for record in attempts))

    def write_end(self, end: EndRecord) -> None:
        self._replace(self._end_path, json.dumps(to_json(end), indent=1) + "\n")
        self._has_ended = True

    def goodput(self, job_uid: str) -> GoodputRecord:
        """Account of this job's time, as far as an earlier coordinator wrote it."""
        record = read_record(GoodputRecord, self._goodput_path)
        return record if record is not None and record.job_uid == job_uid else GoodputRecord(job_uid)

    def write_goodput(self, record: GoodputRecord) -> None:
        if self.are_owned:
            self._replace(self._goodput_path, json.dumps(to_json(record)) + "\n")

    def write_report(self, text: str) -> None:
        """Write the report of the moment. A folder that somebody removed after the end stays away."""
        if not self.are_owned or (self._has_ended and not self._folder.is_dir()):
            return
        self._replace(self.report_path, text)

    def _replace(self, path: Path, text: str) -> None:
        self._check()
        self._folder.mkdir(parents=True, exist_ok=True)
        write_durably(path, text.encode())


def read_record(kind: type[T], path: Path) -> T | None:
    """A file's record; None: there is no such file. Raises ContractError and OSError."""
    text = _text(path)
    return None if text is None else _parsed(kind, text, str(path))


def _text(path: Path) -> str | None:
    """Text of a file; None: there is no such file. Raises ContractError for what can't be one of these records, whoever put it there."""
    try:
        return read_regular(path, FILE_BYTES_MAX).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_record(path, str(error)) from None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _no_record(path, error.strerror) from None
        raise


def _no_record(where: object, why: object) -> ContractError:
    return ContractError(f"{where} is not JSON ({why}): put the file back, or move the folder away to start anew")


def _parsed(kind: type[T], text: str, where: str) -> T:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_record(where, error) from None
    return from_json(kind, value, where)
