"""Kubernetes Events of a job: changes from one status to the next, in plain words. Pure.

Two statuses say all: whoever writes a transition sends its event, once, and an operator that has just started repeats none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from lockstep.api.objects import Object, conditions_of, is_true
from lockstep.api.status import ConditionType
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.stopping import stop_event
from lockstep.plan.times import age
from lockstep_spec.words import number_of, printable_line

NORMAL, WARNING = "Normal", "Warning"
MESSAGE_BYTES = 1024
"""Bytes of an event's message that the API takes (events.k8s.io)."""
SILENCE_SECONDS = 600.0
"""The same reason with the same message is sent again only after so long: a condition may flap."""
BURST, REFILL_SECONDS = 25, 60.0
"""Events of one job at once, and the time in which one more is allowed. The end of something is always sent."""
_ENDS = frozenset({"Complete", "Failed", "IdleWarning", "IdleReleased"})
_HOUR = len("2026-01-01T00")

# Conditions whose True is worth telling: under which reason, and whether it is good. Their False is worth telling only when it names
# a trouble, that is when the reason is none of `_QUIET`.
_HOLDS: Mapping[str, tuple[str, str]] = {
    ConditionType.ACCEPTED: (NORMAL, "Accepted"),
    ConditionType.SUSPENDED: (NORMAL, "Suspended"),
    ConditionType.PODS_SCHEDULED: (NORMAL, "PodsScheduled"),
    ConditionType.RANKS_READY: (NORMAL, "RanksReady"),
    ConditionType.FABRIC_VERIFIED: (NORMAL, "FabricVerified"),
    ConditionType.STRAGGLING: (WARNING, "SlowRank"),
    ConditionType.SAVES_FAILING: (WARNING, "SaveFailed"),
    ConditionType.COMPLETE: (NORMAL, "Complete"),
    ConditionType.FAILED: (WARNING, "Failed"),
    ConditionType.HELD: (NORMAL, "HoldOnFailure"),
}
_TROUBLE = frozenset({
    ConditionType.ACCEPTED, ConditionType.PODS_SCHEDULED, ConditionType.NODES_HEALTHY, ConditionType.RANKS_READY,
    ConditionType.FABRIC_VERIFIED,
})  # fmt: skip
_OVER: Mapping[str, tuple[str, str]] = {
    ConditionType.STRAGGLING: ("True", "StragglingEnded"),
    ConditionType.SAVES_FAILING: ("True", "SavesWork"),
    ConditionType.NODES_HEALTHY: ("False", "NodesHealthy"),
    ConditionType.FAILED: ("True", "Retried"),
}
"""A trouble that ends: what the condition's status was until then, and the reason of the event about its end."""
_QUIET = frozenset({
    "NotAccepted", "Suspended", "Stopping", "Finished", "PodsNotCreated", "Scheduling", "PodsNotScheduled", "Starting", "WaitingForReport",
    "WaitingForRanks", "Ready", "Resizing", "StartReplaced", "Queued", "NodesReleased", "DeadlineExceeded", "PreflightFailed",
    "NodeExcluded",
})  # fmt: skip
_SUMMARY = {
    "NoReport": WARNING,
    "NodeNotHeard": WARNING,
    "RecordUnwritten": WARNING,
    "Resizing": NORMAL,
    "StartReplaced": NORMAL,
    "Queued": NORMAL,
    "NodesReleased": NORMAL,
    "DeadlineExceeded": WARNING,
}
"""Reasons of the summary that no other condition has."""
_CAUSES = {"Hang": "RankHung", "Preempted": "Preempted", "Fabric": "FabricFailed"}
"""Restarts that have a reason of their own; the others are Restarting."""


@dataclass(frozen=True)
class JobEvent:
    """A Kubernetes Event about the job, sent once at a transition."""

    type: str
    reason: str
    message: str


def events_between(before: Object, after: Object) -> tuple[JobEvent, ...]:
    """Return what happened between two statuses, in the order in which it happens to a job."""
    stop = stop_event(before, after)
    stopped = () if stop is None else (JobEvent(*stop),)
    changes = (
        *stopped,
        *_conditions(before, after),
        *_attempts(before, after),
        *_preflight(before, after),
        *_excluded(before, after),
        *_sizes(before, after),
        *_idleness(before, after),
    )
    return tuple(map(_printable, (*changes, *_checkpoint(before, after))))


def _printable(event: JobEvent) -> JobEvent:
    """On one line that can be printed, as long as the API takes it."""
    return replace(event, message=printable_line(event.message).encode(errors="replace")[:MESSAGE_BYTES].decode(errors="ignore"))


def _conditions(before: Object, after: Object) -> Iterator[JobEvent]:
    old, new = conditions_of(before), conditions_of(after)
    for kind, condition in new.items():
        previous = old.get(kind, {})
        if (previous.get("status"), previous.get("reason")) == (condition["status"], condition["reason"]):
            continue
        turned = previous.get("status") != condition["status"]
        if condition["status"] == "True" and turned and kind in _HOLDS:
            yield JobEvent(*_HOLDS[ConditionType(kind)], condition["message"])
        elif condition["status"] == "False" and kind in _TROUBLE and condition["reason"] not in _QUIET:
            yield JobEvent(WARNING, condition["reason"], condition["message"])
        elif kind == ConditionType.ACCEPTED and condition["reason"] == Reason.CHANGE_PENDING:
            yield JobEvent(NORMAL, condition["reason"], condition["message"])
        elif kind == ConditionType.SUSPENDED and condition["status"] == "False":
            yield from _suspension(previous, condition)
        elif kind == ConditionType.PROGRESSING and condition["reason"] in _SUMMARY:
            yield JobEvent(_SUMMARY[condition["reason"]], condition["reason"], condition["message"])
        elif kind in _OVER and turned and previous.get("status") == _OVER[ConditionType(kind)][0]:
            yield JobEvent(NORMAL, _OVER[ConditionType(kind)][1], condition["message"])


def _suspension(previous: Object, condition: Object) -> Iterator[JobEvent]:
    if condition["reason"] == "Stopping":
        yield JobEvent(NORMAL, "Stopping", condition["message"])
    elif previous.get("status") == "True" and condition["reason"] != "Finished":
        yield JobEvent(NORMAL, "Resumed", condition["message"])


def _attempts(before: Object, after: Object) -> Iterator[JobEvent]:
    """Failures that were followed by another attempt, then its start. Event Failed has the last failure of a failed job."""
    newest = max((entry["attempt"] for entry in before.get("restartHistory", [])), default=0)
    final = is_true(after, "Failed")
    for entry in after.get("restartHistory", []):
        if entry["attempt"] <= newest or (final and entry["attempt"] == after.get("attempts")):
            continue
        count = entry.get("lostSteps")
        lost = f"; {number_of(count, 'step')} {'is' if count == 1 else 'are'} done again" if count else ""
        yield JobEvent(
            WARNING,
            _CAUSES.get(entry["cause"], "Restarting"),
            f"attempt {entry['attempt']} failed ({entry['cause']}): {entry['message']}{lost}",
        )
    attempt = after.get("attempts") or 0
    if attempt > (before.get("attempts") or 0):
        desired = (after.get("ranks") or {}).get("desired")
        yield JobEvent(NORMAL, "AttemptStarted", f"attempt {attempt} starts" + (f" with {number_of(desired, 'rank')}" if desired else ""))


def _preflight(before: Object, after: Object) -> Iterator[JobEvent]:
    preflight = after.get("preflight")
    if not preflight or preflight.get("time") == (before.get("preflight") or {}).get("time"):
        return
    findings = preflight.get("findings", [])
    if preflight["ok"] and not findings:
        yield JobEvent(
            NORMAL, "PreflightPassed", f"{number_of(preflight['checks'], 'check')} passed on {number_of(preflight['nodes'], 'node')}"
        )
        return
    texts = [f"{f['check']}: {f['message']}" + (f" on {f['nodeName']}" if f.get("nodeName") else "") + f"; {f['fix']}" for f in findings]
    yield JobEvent(WARNING, "PreflightWarned" if preflight["ok"] else "PreflightFailed", " | ".join(texts[:5]) or "no finding was given")


def _excluded(before: Object, after: Object) -> Iterator[JobEvent]:
    excluded = {node["name"] for node in before.get("excludedNodes") or []}
    for node in after.get("excludedNodes") or []:
        if node["name"] not in excluded:
            yield JobEvent(
                WARNING,
                "NodeExcluded",
                f"node {node['name']} is left out of this job's next start: {node['message']}; suspending the job clears the list",
            )


def _idleness(before: Object, after: Object) -> Iterator[JobEvent]:
    """Events of a dev environment: the warning, and the release."""
    old, new = before.get("interactive") or {}, after.get("interactive") or {}
    since = f"nobody has used the environment since {new.get('idleSince', 'a long time ago')}"
    if "releaseTime" in new and "releaseTime" not in old:
        yield JobEvent(
            WARNING, "IdleWarning", f"{since}: its GPUs are released at {new['releaseTime']} unless somebody starts a run or uses a shell"
        )
    if "released" in new and "released" not in old:
        yield JobEvent(WARNING, "IdleReleased", f"{since}: its GPUs are released; `lockstep resume` brings it back")


def _sizes(before: Object, after: Object) -> Iterator[JobEvent]:
    old, new = ((status.get("ranks") or {}).get("desired") for status in (before, after))
    if old and new and old != new:
        yield JobEvent(NORMAL, "Resized", f"from {old} to {new} ranks")


def _checkpoint(before: Object, after: Object) -> Iterator[JobEvent]:
    """The first one, then one an hour: a job that saves every minute would push all other events out."""
    old, new = before.get("checkpoint"), after.get("checkpoint")
    if new and (old is None or old["lastCommitTime"][:_HOUR] != new["lastCommitTime"][:_HOUR]):
        yield JobEvent(NORMAL, "CheckpointCommitted", f"step {new['lastCommittedStep']}" + (f": {new['path']}" if new.get("path") else ""))


@dataclass(frozen=True)
class SentEvents:
    """Events of one job that this process has sent: the last time of each, and how many more it may send."""

    last: Mapping[tuple[str, str], float] = field(default_factory=lambda: MappingProxyType({}))
    left: float = BURST
    at: float = 0.0


def worth_sending(sent: SentEvents, new: tuple[JobEvent, ...], now: float) -> tuple[SentEvents, tuple[JobEvent, ...]]:
    """Return what to remember, and those of `new` that are neither a repetition nor too many."""
    left = min(float(BURST), sent.left + age(sent.at, now) / REFILL_SECONDS)
    last = {key: when for key, when in sent.last.items() if age(when, now) < SILENCE_SECONDS}
    fresh = []
    for event in map(_printable, new):
        key = (event.reason, event.message)
        if key in last or (left < 1 and event.reason not in _ENDS):
            continue
        last[key], left = now, max(0.0, left - 1)
        fresh.append(event)
    return SentEvents(last, left, now), tuple(fresh)
