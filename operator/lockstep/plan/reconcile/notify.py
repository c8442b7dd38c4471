"""The message about a job's end: what it says, whether it is still to be sent, where it may go, and when to try again. Pure.

At least once: the outcome is written to status after the receiver has answered, so an operator that ends in between sends it again. The
message's id is the same then, and a receiver that must not count twice can tell by it.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lockstep.api.objects import Object, is_true
from lockstep.api.status import NotificationStatus
from lockstep.api.statuspart import taken_from
from lockstep.plan.observed import Observed
from lockstep.plan.times import seconds_of
from lockstep_spec.words import duration, printable_line

BOUND_SECONDS = 1800.0
"""Seconds after the end of the job in which delivery is tried; one try is made in any case."""
WAIT_SECONDS = (5.0, 300.0)
"""Wait after the first failed try, and the longest one; doubled in between."""
TRIES_MAX = 16
"""Most tries, even if the clock that wrote the end was wrong."""
SENTENCE_CHARACTERS = 1000
_IN_CLUSTER = (".svc", ".svc.cluster.local")


@dataclass(frozen=True)
class Message:
    """Notification to send, and the Secret that holds its URL."""

    id: str
    secret: str
    key: str
    body: Object
    ended: float
    """Seconds since the epoch."""


def due_message(observed: Observed) -> Message | None:
    """Return the notification to send; None if the job asks for none, its stored status has no end, or it was sent."""
    notify, status = observed.job["spec"].get("notify"), observed.status
    complete = is_true(status, "Complete")
    if notify is None or not (complete or is_true(status, "Failed")):
        return None
    outcome = "Complete" if complete else "Failed"
    name = f"{observed.uid}-{status.get('retry') or 0}-{outcome}"
    if (status.get("notification") or {}).get("id") == name:
        return None
    where = notify["webhookSecretRef"]
    return Message(name, where["name"], where["key"], _body(observed, name, outcome), _seconds(status.get("completionTime")) or 0.0)


def _body(observed: Observed, name: str, outcome: str) -> Object:
    status = observed.status
    failure, trainer = status.get("failure") or {}, status.get("trainer") or {}
    sentence = next(c["message"] for c in status["conditions"] if c["type"] == outcome)[:SENTENCE_CHARACTERS]
    begun, ended = _seconds(status.get("startTime")), _seconds(status.get("completionTime"))
    duration = round(ended - begun) if begun is not None and ended is not None else None
    cause = failure.get("cause") if outcome == "Failed" else None
    body: dict[str, Any] = {
        "id": name,
        "namespace": observed.namespace,
        "name": observed.name,
        "outcome": outcome,
        "cause": cause,
        "message": sentence,
        "step": trainer.get("step"),
        "totalSteps": trainer.get("totalSteps"),
        "durationSeconds": duration,
        "goodputPercentage": (status.get("goodput") or {}).get("percentage"),
    }
    return {**{key: value for key, value in body.items() if value is not None}, "text": _text(body)}


def _text(body: Object) -> str:
    """One sentence, as chat services show it."""
    total = f" of {body['totalSteps']}" if body["totalSteps"] is not None else ""
    parts = [
        f"TrainingJob {body['namespace']}/{body['name']} {'is complete' if body['outcome'] == 'Complete' else 'has failed'}",
        f" ({body['cause']})" if body["cause"] else "",
        f" at step {body['step']}{total}" if body["step"] is not None else "",
        f" after {duration(body['durationSeconds'])}" if body["durationSeconds"] is not None else "",
        f": {body['message']}" if body["outcome"] == "Failed" else "",
    ]
    return "".join(parts)


def _seconds(time: str | None) -> float | None:
    return None if time is None else seconds_of(time)


def url_problem(url: str) -> str | None:
    """Return why nothing may be sent to this URL, which is a secret and never part of the text; None if it may be used."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".").lower()
        _ = parts.port
    except ValueError:
        return "the Secret's value is no URL"
    if not host or not url.isprintable():
        return "the Secret's value is no URL with a host"
    if is_forbidden(host):
        return "the URL's host is a link-local address, where clouds keep credentials"
    if parts.scheme == "https" or (parts.scheme == "http" and _is_near(host)):
        return None
    return "the URL must begin with https://; http:// only for a Service of this cluster (NAME.NAMESPACE.svc)"


def is_forbidden(address: str) -> bool:
    """An address, not a name, that nothing is ever sent to."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None) or parsed
    return bool(mapped.is_link_local or mapped.is_multicast or mapped.is_unspecified)


def _is_near(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(_IN_CLUSTER)


def next_try(attempts: int, ended: float, now: float) -> float | None:
    """Seconds until the next try after so many; None: it is given up."""
    wait: float = min(WAIT_SECONDS[0] * 2 ** (attempts - 1), WAIT_SECONDS[1])
    return wait if now + wait <= min(ended, now) + BOUND_SECONDS and attempts <= TRIES_MAX else None


def notification_status(observed: Observed) -> NotificationStatus | None:
    sent = observed.delivery
    if sent is None:
        return NotificationStatus.stored(observed.status.get("notification"))
    return taken_from(sent, NotificationStatus, message=printable_line(sent.message))
