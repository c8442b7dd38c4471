"""What keeps a node from being heard."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class TroubleKind(str, Enum):  # noqa: UP042 (StrEnum is Python 3.11; agents run on 3.10)
    """The first word of an agent's last words, and a reason of the job's conditions."""

    DNS = "DNSUnavailable"
    NAME = "NameNotFound"  # DNS answers, and doesn't know the name
    NETWORK = "NetworkBlocked"
    REFUSED = "ReportRefused"


@dataclass(frozen=True)
class Trouble:
    kind: TroubleKind
    text: str
