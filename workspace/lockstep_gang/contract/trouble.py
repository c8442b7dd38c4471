"""Reasons why a node is not heard: a module by itself, since verbs that know only these need not load the whole report."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_spec.choices import Choice


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
