"""The socket on which ranks report, and torch's error file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from lockstep_gang.contract.messages import RANK_REPORT_BYTES_MAX, Error, RankReport, rank_report_from_json
from lockstep_spec.codec import ContractError
from lockstep_spec.files import read_regular
from lockstep_spec.words import printable_line

_BUFFER_BYTES = 4 * 1024 * 1024
ERROR_FILE_BYTES_MAX = 1024 * 1024


class ReportSocket:
    """A Unix datagram socket that only this user can reach, in `folder` (mode 0700)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "report.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._socket.bind(str(self.path))
        self.path.chmod(0o600)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def received(self) -> Iterator[RankReport | ContractError]:
        """Everything that has arrived, without waiting; what can't be understood comes as its error."""
        while True:
            try:
                data = self._socket.recv(RANK_REPORT_BYTES_MAX + 1)
            except OSError:
                return
            yield parse_datagram(data)


def parse_datagram(data: bytes) -> RankReport | ContractError:
    if len(data) > RANK_REPORT_BYTES_MAX:
        return ContractError(f"a rank's report is longer than {RANK_REPORT_BYTES_MAX} bytes")
    try:
        return rank_report_from_json(json.loads(data))
    except ContractError as error:
        return error
    except (ValueError, RecursionError) as error:
        return ContractError(f"a rank's report is not JSON: {error}")


def read_error_file(path: Path, rank: int) -> Error | None:
    """Error that torch's `@record` wrote before the rank ended, if it did."""
    try:
        value = json.loads(read_regular(path, ERROR_FILE_BYTES_MAX))["message"]
        text = str(value.get("message", "")) if isinstance(value, dict) else str(value)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    name, _, message = text.partition(": ")
    extra = value.get("extraInfo") if isinstance(value, dict) else None
    called = extra.get("py_callstack") if isinstance(extra, dict) else None
    stack = called if isinstance(called, str) else ""
    exception = name if name.isidentifier() else "Error"
    words = printable_line(message if name.isidentifier() else text)
    return Error(rank, printable_line(exception), words[:2000], tuple(printable_line(line) for line in stack.splitlines()[-20:]))


def make_folder(parent: Path) -> Path:
    """A folder of this agent's own, mode 0700. Raises OSError."""
    folder = parent / f"lockstep-{os.getpid()}-{os.urandom(4).hex()}"
    folder.mkdir(mode=0o700)
    return folder


def remove_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
