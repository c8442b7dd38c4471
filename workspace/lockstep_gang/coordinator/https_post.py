"""Reports over HTTPS, one POST each."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

from lockstep_gang.contract.proof import report_signature
from lockstep_gang.contract.report import JOB_HEADER, SIGNATURE_HEADER, job_header
from lockstep_gang.contract.run import JobIdentity, ReportTarget

T = TypeVar("T")
TIMEOUT_SECONDS = 10.0
ADDRESS_SECONDS = 3.0
"""Time to connect to one replica: when it is gone, the Service knows another."""
REPLY_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    again_seconds: float = 0.0
    """Seconds until the operator takes another one."""
    is_repeated: bool = False
    """True if it was sent twice: the first time may have arrived."""

    def value(self, name: str, kind: type[T]) -> T | None:
        """A value of the body's JSON object that isn't empty, if there is one of this name and kind."""
        try:
            value = json.loads(self.body).get(name)
        except (ValueError, AttributeError, RecursionError):
            return None
        return value or None if type(value) is kind else None


class _ConnectionTo(http.client.HTTPSConnection):
    """Connection to an address of its own, which has to prove by its certificate that it is the target's host."""

    def __init__(self, address: str, url: SplitResult, context: ssl.SSLContext) -> None:
        super().__init__(url.hostname or "", url.port, timeout=TIMEOUT_SECONDS, context=context)
        self._address = urlsplit(f"//{address}")
        self._tls = context

    def connect(self) -> None:
        plain = socket.create_connection((self._address.hostname or "", self._address.port or 443), ADDRESS_SECONDS)
        plain.settimeout(self.timeout)
        self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)


class Sender:
    """Sends reports over one connection, for as long as the operator keeps it. Blocking: for a thread."""

    def __init__(self, target: ReportTarget, key: bytes) -> None:
        self._target = target
        self._key = key
        self._address: str | None = None
        self._connection: http.client.HTTPSConnection | None = None

    def post(self, job: JobIdentity, body: bytes, address: str | None = None) -> Answer:
        """Send a report. The token is read each time, since the kubelet renews it. Raises OSError, ValueError, http.client.HTTPException.

        `address` (host:port): of the replica of the operator to send it to, instead of any that the target's name leads to.
        """
        headers = {
            "Authorization": f"Bearer {Path(self._target.token_file).read_text(encoding='ascii').strip()}",
            "Content-Type": "application/json",
            JOB_HEADER: job_header(job),
            SIGNATURE_HEADER: report_signature(self._key, body),
        }
        if address != self._address:
            self.close()
        was_open = self._connection is not None and self._connection.sock is not None
        try:
            return self._exchange(body, headers, address)
        except (ConnectionError, ssl.SSLError):
            if not was_open:
                raise
            return replace(self._exchange(body, headers, address), is_repeated=True)  # the operator had closed it meanwhile

    def _exchange(self, body: bytes, headers: dict[str, str], address: str | None) -> Answer:
        url, is_whole = urlsplit(self._target.url), False
        if self._connection is None:
            context = ssl.create_default_context(cadata=self._target.ca_pem)
            plain = http.client.HTTPSConnection(url.hostname or "", url.port, timeout=TIMEOUT_SECONDS, context=context)
            self._connection, self._address = plain if address is None else _ConnectionTo(address, url, context), address
        try:
            self._connection.request("POST", url.path, body=body, headers=headers)
            response = self._connection.getresponse()
            again = response.headers.get("Retry-After", "")
            answer = Answer(response.status, response.read(REPLY_BYTES_MAX), float(again) if again.isdecimal() else 0.0)
            is_whole = response.isclosed()
            return answer
        finally:
            if not is_whole:
                self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
