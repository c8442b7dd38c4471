"""The durable record on node 0's volume: `attempts.jsonl`, `end.json`, `goodput.json` and `report.json` in the folder `gang` of the run's folder.

Every write replaces the whole file by rename after fsync, so that a reader sees the old or the new one, never half.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lockstep_gang.contract.report import CheckpointReport, Goodput
from lockstep_gang.lifecycle.history import AttemptRecord, EndRecord
from lockstep_spec.codec import ContractError, from_json, to_json
from lockstep_spec.files import open_new, open_regular, read_regular, sync_directory

T = TypeVar("T")
TAIL_BYTES = 16 * 1024
"""Size of the end of the attempts' file that is read at first for its last line."""
FILE_BYTES_MAX = 16 * 1024 * 1024
"""Largest record that is read: none that was written here comes near, and nothing else in its place gets into memory."""


@dataclass(frozen=True)
class GoodputRecord:
    """The account of one job; another job of the same name begins its own."""

    job_uid: str
    goodput: Goodput = field(default_factory=Goodput)
    checkpoint: CheckpointReport | None = None
    """The newest commit: the records of attempts have that of their begin or end, and a coordinator that is killed writes no end."""


NO_FILE = frozenset({errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.EISDIR, errno.ENXIO})
"""Errors of `read_regular` for a FIFO, a device, a link, a folder or a file without measure: trying again would not help."""


class Replaced(OSError):
    """Another coordinator has taken the folder over: this one was taken for lost, and nothing it knows counts."""

    def __init__(self, text: str, job_uid: str) -> None:
        super().__init__(errno.ESTALE, text)
        self.job_uid = job_uid
        """Job of the other one."""


class Records:
    """Records in the run's folder. Raises OSError when the volume can't be read or written, ContractError when a record can't be understood."""

    def __init__(self, run_dir: str) -> None:
        self._folder = Path(run_dir) / "gang"
        self._attempts_path = self._folder / "attempts.jsonl"
        self._end_path = self._folder / "end.json"
        self._has_ended = False
        self._goodput_path = self._folder / "goodput.json"
        self.report_path = self._folder / "report.json"
        self._own = os.urandom(4).hex()
        """Part of drafts' names: on a shared volume a coordinator that was replaced may yet write."""
        self._newest = 0
        """The highest attempt that this process has read or written."""
        self.are_owned = True
        """False while another job has the folder: the account and the report, which wait for nobody, aren't written then."""

    def attempts(self) -> list[AttemptRecord]:
        """The newest attempts that were started here, oldest first, of earlier jobs of this name too."""
        text = _text(self._attempts_path)
        if text is None:
            return []
        lines = text.splitlines()
        records = [_parsed(AttemptRecord, line, f"{self._attempts_path}:{number}") for number, line in enumerate(lines, 1)]
        self._newest = max((record.attempt for record in records), default=0)
        return records

    def end(self) -> EndRecord | None:
        text = _text(self._end_path)
        return None if text is None else _parsed(EndRecord, text, str(self._end_path))

    def write_attempts(self, attempts: Sequence[AttemptRecord]) -> None:
        """Write the attempts, durably when it returns."""
        self._refuse_newer()
        self._newest = max((record.attempt for record in attempts), default=0)
        self._replace(self._attempts_path, "".join(json.dumps(to_json(record)) + "\n" for record in attempts))

    def write_end(self, end: EndRecord) -> None:
        """Write the end, durably when it returns."""
        self._refuse_newer()
        self._replace(self._end_path, json.dumps(to_json(end), indent=1) + "\n")
        self._has_ended = True

    def goodput(self, job_uid: str) -> GoodputRecord:
        """Account of this job's time, as far as an earlier coordinator wrote it."""
        text = _text(self._goodput_path)
        if text is None:
            return GoodputRecord(job_uid)
        record = _parsed(GoodputRecord, text, str(self._goodput_path))
        return record if record.job_uid == job_uid else GoodputRecord(job_uid)

    def write_goodput(self, record: GoodputRecord) -> None:
        """Write the account, durably when it returns."""
        if self.are_owned:
            self._refuse_newer()
            self._replace(self._goodput_path, json.dumps(to_json(record)) + "\n")

    def write_report(self, text: str) -> None:
        """Write the report of the moment, durably when it returns. A folder that somebody removed after the end stays away."""
        if not self.are_owned or (self._has_ended and not self._folder.is_dir()):
            return
        self._refuse_newer()
        self._replace(self.report_path, text)

    def _refuse_newer(self) -> None:
        """Raise Replaced. A coordinator that wrote between this look and the write is not seen: its attempt begins again under the next number."""
        try:
            last = _last_line(self._attempts_path)
        except (FileNotFoundError, NotADirectoryError):
            return
        newest = _parsed(AttemptRecord, last, str(self._attempts_path)) if last else None
        if newest is not None and newest.attempt > self._newest:
            raise Replaced(f"attempt {newest.attempt} of another coordinator is there, so this node 0 was replaced", newest.job_uid)

    def _replace(self, path: Path, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{self._own}.draft")
        with os.fdopen(open_new(draft), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_directory(self._folder)


def _text(path: Path) -> str | None:
    """Text of a file; None: there is no such file. Raises ContractError for what can't be one of these records, whoever put it there."""
    try:
        return _decoded(read_regular(path, FILE_BYTES_MAX), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in NO_FILE:
            raise _no_record(path, error.strerror) from None
        raise


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_record(path, str(error)) from None


def _no_record(where: object, why: object) -> ContractError:
    return ContractError(f"{where} is not JSON ({why}): put the file back, or move the folder away to start anew")


def _parsed(kind: type[T], text: str, where: str) -> T:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_record(where, error) from None
    return from_json(kind, value, where)


def _last_line(path: Path) -> str:
    """The file's last line, empty where it has none. Of a long file only the end is read: it is looked at before every write of anything."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        length = TAIL_BYTES
        while True:
            file.seek(max(0, size - length))
            lines = file.read().splitlines()
            if len(lines) > 1 or length >= size:
                return _decoded(lines[-1], path) if lines else ""
            if length > FILE_BYTES_MAX:
                raise _no_record(path, f"its last line has more than {FILE_BYTES_MAX} bytes")
            length *= 8
