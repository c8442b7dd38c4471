"""Losses of nodes that the cluster explains: those don't count toward the restart budget (pure).

A connection that closed says only that a node is gone. Whether its machine died, its pod had to make room, or its agent just ran out of
memory is known to the cluster, and is heard seconds before or after. Where there is no cluster, the agent that is back knows whether its
machine was off, or slept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from lockstep_gang.contract.messages import Hello
from lockstep_gang.contract.reply import Fact, FactType
from lockstep_gang.contract.report import HISTORY, Cause, Failure, Restart
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import SILENCE_SECONDS, seconds_of, stamp
from lockstep_gang.lifecycle.gang import LOSSES, OWN_FAULTS, Gang, Phase

BEFORE_SECONDS, AFTER_SECONDS = 600.0, 120.0
"""Largest age of a fact before and after a loss that it explains. A Node is NotReady 40 to 100 s after its last sign."""
AWAY_SECONDS, BACK_SECONDS = 60.0, 10.0
"""Time after a loss in which the operator's answer may still explain it, while the node is away and when its agent is back."""
SLEPT_SHARE = 0.5
"""Least part of a node's absence that its machine slept if that is why it was lost; the rest is the way back into the network."""
UNANSWERED_SECONDS = 300.0
"""Longest wait for an operator that does not answer at all."""
_CAUSES = {
    FactType.NODE_LOST: Cause.NODE_LOST, FactType.PREEMPTED: Cause.PREEMPTED, FactType.EVICTED: Cause.NODE_LOST,
    FactType.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY, FactType.CONTAINER_ENDED: Cause.NODE_LOST, FactType.DELETED: Cause.NODE_LOST,
}  # fmt: skip
_WORDS = {
    FactType.NODE_LOST: "was lost", FactType.PREEMPTED: "was preempted", FactType.EVICTED: "was evicted",
    FactType.OUT_OF_MEMORY: "ran out of host memory", FactType.CONTAINER_ENDED: "was lost", FactType.DELETED: "lost its pod",
}  # fmt: skip
_PRESSURES = (
    (Cause.STORAGE, re.compile(r"ephemeral|\bdisk|nodefs|imagefs|inodes", re.IGNORECASE)),
    (Cause.OUT_OF_MEMORY, re.compile(r"low on resource: memory|memory ?pressure", re.IGNORECASE)),
)
"""Reasons for which a Node evicts pods, in the kubelet's words."""


def explaining_fact(gang: Gang, failure: Failure, failed_at: float) -> Fact | None:
    """Fact that shows that this failure was the cluster's doing; None: nobody says so."""
    used = {entry.explained_by for entry in gang.history}
    facts = (*gang.facts.latest, *gang.facts.machines)
    fitting = [fact for fact in facts if fact.type in LOSSES and fact.pod_uid not in used and _is_near(fact, failed_at)]
    if failure.rank is None and failure.cause is Cause.NODE_LOST:
        return next((fact for fact in fitting if fact.node == failure.node), None)
    if failure.cause is Cause.FABRIC:  # a peer of the lost node was heard first
        return next((fact for fact in fitting if 0 <= fact.node < len(gang.nodes) and not gang.nodes[fact.node].connected), None)
    return None


def _is_near(fact: Fact, failed_at: float) -> bool:
    since = seconds_of(fact.since)
    return since is None or failed_at - BEFORE_SECONDS <= since <= failed_at + AFTER_SECONDS


def explained_by_fact(failure: Failure, fact: Fact) -> Failure:
    """The failure in the cluster's words."""
    message = f": {fact.message}" if fact.message else ""
    cause = _CAUSES[fact.type]
    if fact.type is FactType.EVICTED:
        cause = next((kind for kind, words in _PRESSURES if words.search(fact.message)), cause)
    return Failure(f"node {fact.node} {_WORDS[fact.type]}{message}", node=fact.node, cause=cause, step=failure.step)


def with_facts(gang: Gang, facts: Sequence[Fact], now: float) -> Gang:
    """The gang after a reply of the operator. Losses that its facts explain get their budget back."""
    return _explained(replace(gang, facts=replace(gang.facts, latest=tuple(facts), heard_at=now)), now)


def with_machine_heard(gang: Gang, run: Run, hello: Hello, now: float) -> Gang:
    """The gang that hears from a node's agent before the node counts as here. Its machine was off, slept or was cut off: that explains its
    loss.
    """
    before = gang.nodes[hello.node]
    lost_at = next((silence.since for silence in gang.silences if silence.node == hello.node and silence.until is None), before.closed_at)
    if run.report is not None or not before.boot_id or not hello.boot_id:
        return gang
    if hello.boot_id != before.boot_id:
        fact = _machine_fact(run, hello.node, "Restarted", "its machine was off or started anew", hello.boot_id, lost_at or now)
        return _with_machine_fact(gang, fact, now)
    if hello.instance != before.instance or lost_at is None:
        return gang
    slept = hello.slept_seconds - before.slept_seconds
    if slept >= SLEPT_SHARE * (now - lost_at) > 0:
        return _with_machine_fact(gang, slept_fact(run, hello.node, slept, f"{hello.instance} {hello.slept_seconds:.0f}", lost_at), now)
    if run.host is not None and now - lost_at >= SILENCE_SECONDS:
        words = "its agent ran on meanwhile, so the network between it and node 0 was down"
        return _with_machine_fact(gang, _machine_fact(run, hello.node, "CutOff", words, f"{hello.instance} {now:.0f}", lost_at), now)
    return gang


def with_own_sleep(gang: Gang, run: Run, seconds: float, now: float) -> Gang:
    """The gang whose coordinator slept with its machine for so long: meanwhile the other nodes heard nothing from it, and stopped."""
    return gang if run.report is not None else _with_machine_fact(gang, slept_fact(run, 0, seconds, f"coordinator {now:.0f}", now), now)


def slept_fact(run: Run, node: int, seconds: float, mark: str, since: float) -> Fact:
    return _machine_fact(run, node, "Slept", f"its machine slept for {seconds:.0f} s", mark, since)


def _machine_fact(run: Run, node: int, reason: str, message: str, mark: str, since: float) -> Fact:
    return Fact(FactType.NODE_LOST, node, run.pod_name(node), reason, message, pod_uid=mark, since=stamp(since))


def _with_machine_fact(gang: Gang, fact: Fact, now: float) -> Gang:
    """The gang with what an agent knows of its machine. A loss that is charged already gets its budget back; else the fact stays for one
    that is to be charged.
    """
    others = tuple(other for other in gang.facts.machines if other.node != fact.node)
    gang = _explained(replace(gang, facts=replace(gang.facts, machines=(*others, fact))), now)
    return replace(gang, facts=replace(gang.facts, machines=others)) if gang.phase is Phase.WAITING else gang


def _explained(gang: Gang, now: float) -> Gang:
    """The gang whose losses that a fact explains have their budget back."""
    for index, entry in enumerate(gang.history):
        fact = explaining_fact(gang, entry.failure, seconds_of(entry.failed) or now) if entry.explained_by is None else None
        if fact is not None:
            gang = _corrected(gang, index, fact)
    return with_nodes_that_left(gang, gang.facts.left)


def _corrected(gang: Gang, index: int, fact: Fact) -> Gang:
    entry, is_own = gang.history[index], fact.type in OWN_FAULTS
    failure = explained_by_fact(entry.failure, fact)
    corrected = replace(entry, failure=failure, counts=entry.counts and is_own, explained_by=fact.pod_uid)
    counted = [i for i, other in enumerate(gang.history) if other.counts]
    recent = counted[-gang.budget.counted :] if gang.budget.counted else []  # the others are of before the last new commit
    is_newest = index == len(gang.history) - 1 and gang.failure is not None
    return replace(
        gang,
        history=(*gang.history[:index], corrected, *gang.history[index + 1 :]),
        budget=replace(gang.budget, counted=gang.budget.counted - (index in recent and not is_own)),
        failure=failure if is_newest else gang.failure,
    )


def with_nodes_that_left(gang: Gang, left: Sequence[Restart]) -> Gang:
    """The gang after nodes left and its ranks had saved: an entry of the history where the cluster says why."""
    for entry in left:
        fact = explaining_fact(gang, entry.failure, seconds_of(entry.failed) or 0.0)
        if fact is not None:
            return _remembered(gang, replace(entry, failure=explained_by_fact(entry.failure, fact), explained_by=fact.pod_uid))
    return replace(gang, facts=replace(gang.facts, left=tuple(left)))


def with_unexplained_leave(gang: Gang) -> Gang:
    """The gang as its next attempt starts, if nobody has said why a node left: a stop of the job would have taken the coordinator's
    node too, so it was something else. A fact that comes later still says what."""
    first = next((entry for entry in gang.facts.left if entry.failure.node), None)
    return _remembered(gang, first) if first is not None else replace(gang, facts=replace(gang.facts, left=()))


def _remembered(gang: Gang, entry: Restart) -> Gang:
    """The gang with an entry of its history that costs nothing of the budget."""
    return replace(
        gang,
        history=(*gang.history, entry)[-HISTORY:],
        budget=replace(gang.budget, failures=gang.budget.failures + 1),
        failure=entry.failure if gang.phase is Phase.WAITING else gang.failure,
        facts=replace(gang.facts, left=()),
    )


def doubted_until(gang: Gang, run: Run) -> float | None:
    """Time until which the last failure may still be explained, which would give its budget back: by the operator, else by the agent of a
    host that may come back. None: nothing is open.
    """
    last = gang.history[-1] if gang.history else None
    if last is None or not last.counts or last.failure.cause is not Cause.NODE_LOST or last.failure.node is None:
        return None
    failed_at = seconds_of(last.failed) or 0.0
    if run.report is None:
        away = run.timeouts.return_seconds
        return None if away is None or gang.nodes[last.failure.node].connected else failed_at + away
    until = failed_at + (BACK_SECONDS if gang.nodes[last.failure.node].connected else AWAY_SECONDS)
    return None if gang.facts.heard_at >= until else failed_at + UNANSWERED_SECONDS


def is_doubted(gang: Gang, run: Run, now: float) -> bool:
    until = doubted_until(gang, run)
    return until is not None and now < until


def waits_for_facts(gang: Gang) -> bool:
    """Return True if the operator's next answer is waited for."""
    return gang.phase is Phase.WAITING and gang.nodes.counts.present < len(gang.nodes)
