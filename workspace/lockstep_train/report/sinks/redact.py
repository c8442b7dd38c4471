"""Redaction: no secret leaves through a line or a file of ours."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 6
"""A shorter value would black out common words."""


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return `text` without users and passwords of URLs, and without values of environment variables that are named like secrets."""
    text = _USER_IN_URL.sub("***@", text)
    for name, value in (os.environ if environ is None else environ).items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text
