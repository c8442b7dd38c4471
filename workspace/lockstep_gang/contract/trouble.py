"""Reasons why a node is not heard: a module by itself, since verbs that know only these need not load the whole report."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep_spec.choices import Choice
from lockstep_spec.words import any_of

LOST_PEER = any_of(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|: EOFError: $",
    r"remote process (exited|has terminated)|remote end closed|peer .*(closed|gone)",
    r"unhandled system error|ncclRemoteError|ncclSystemError|failed to recv, got 0 bytes",
    flags=re.IGNORECASE,
)
"""Words of gloo, NCCL and TCPStore in a rank that lost its peer."""


class TroubleKind(Choice):
    """The first word of an agent's last words, and a reason of the job's conditions."""

    DNS = "DNSUnavailable"
    NAME = "NameNotFound"  # DNS answers, and doesn't know the name
    NETWORK = "NetworkBlocked"
    REFUSED = "ReportRefused"


@dataclass(frozen=True)
class Trouble:
    """Reason why a node is not heard."""

    kind: TroubleKind
    text: str
