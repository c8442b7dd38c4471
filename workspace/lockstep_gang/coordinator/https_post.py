"""One POST of a report over HTTPS."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from dataclasses import dataclass
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


def post(target: ReportTarget, key: bytes, job: JobIdentity, body: bytes, address: str | None = None) -> Answer:
    """Send a report. Blocking: for a thread. The token is read each time, since the kubelet renews it. Raises OSError, ValueError,
    http.client.HTTPException.

    `address` (host:port): of the replica of the operator to send it to, instead of any that the target's name leads to.
    """
    url = urlsplit(target.url)
    headers = {
        "Authorization": f"Bearer {Path(target.token_file).read_text(encoding='ascii').strip()}",
        "Content-Type": "application/json",
        JOB_HEADER: job_header(job),
        SIGNATURE_HEADER: report_signature(key, body),
    }
    context = ssl.create_default_context(cadata=target.ca_pem)
    plain = http.client.HTTPSConnection(url.hostname or "", url.port, timeout=TIMEOUT_SECONDS, context=context)
    connection = plain if address is None else _ConnectionTo(address, url, context)
    try:
        connection.request("POST", url.path, body=body, headers=headers)
        response = connection.getresponse()
        return Answer(response.status, response.read(REPLY_BYTES_MAX))
    finally:
        connection.close()
