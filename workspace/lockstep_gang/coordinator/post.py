"""One POST of a report over HTTPS."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lockstep_gang.contract.proof import report_signature
from lockstep_gang.contract.run import ReportTarget

TIMEOUT_SECONDS = 10.0
REPLY_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    def number(self, name: str) -> int | None:
        """A whole number in the body's JSON object, if there is one of this name."""
        try:
            value = json.loads(self.body).get(name)
        except (ValueError, AttributeError, RecursionError):
            return None
        return value if type(value) is int else None


def post(target: ReportTarget, key: bytes, body: bytes) -> Answer:
    """Blocking: for a thread. The token is read each time, since the kubelet renews it. Raises OSError, ValueError, http.client.HTTPException."""
    url = urlsplit(target.url)
    headers = {
        "Authorization": f"Bearer {Path(target.token_file).read_text(encoding='ascii').strip()}",
        "Content-Type": "application/json",
        "X-Lockstep-Signature": report_signature(key, body),
    }
    context = ssl.create_default_context(cadata=target.ca_pem)
    connection = http.client.HTTPSConnection(url.hostname or "", url.port, timeout=TIMEOUT_SECONDS, context=context)
    try:
        connection.request("POST", url.path, body=body, headers=headers)
        response = connection.getresponse()
        return Answer(response.status, response.read(REPLY_BYTES_MAX))
    finally:
        connection.close()
