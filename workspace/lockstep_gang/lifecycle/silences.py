"""Silences: nodes that are not heard though nobody closed their connection. They tell which two can't talk, and that no rank is to blame
(pure).

A process that ends closes its connections; a network that drops packets, a machine that hangs and an agent that doesn't run say nothing.
Meanwhile the ranks of all other nodes wait for those of that node, and their limits pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone

from lockstep_gang.contract.placewords import words_of
from lockstep_gang.contract.report import Cause, Failure
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import SILENCE_SECONDS
from lockstep_gang.lifecycle.gang import Gang, Silence
from lockstep_spec.words import clauses


def with_silence(gang: Gang, silence: Silence) -> Gang:
    """The gang after a connected node was found silent."""
    return replace(gang, silences=(*(other for other in gang.silences if other.node != silence.node), silence))


def with_silence_over(gang: Gang, node: int, now: float) -> Gang:
    silences = tuple(replace(s, until=now) if s.node == node and s.until is None else s for s in gang.silences)
    return gang if silences == gang.silences else replace(gang, silences=silences)


def without_silence(gang: Gang, node: int) -> Gang:
    """The gang after the end of the node's connection was heard: that says more than its silence before."""
    silences = tuple(silence for silence in gang.silences if silence.node != node or silence.until is not None)
    return gang if len(silences) == len(gang.silences) else replace(gang, silences=silences)


def open_silences(gang: Gang) -> tuple[Silence, ...]:
    """Silences that are not over, the first one first."""
    return tuple(sorted((s for s in gang.silences if s.until is None), key=lambda silence: silence.since))


def open_silence_of(gang: Gang, node: int) -> Silence | None:
    return next((silence for silence in open_silences(gang) if silence.node == node), None)


def silence_to_blame(gang: Gang, run: Run, since: float) -> Failure | None:
    """Failure to name instead of a rank that waited for others from `since` on; None: all nodes were heard since, or it has got on after
    that.
    """
    silences = [silence for silence in _in_time(gang, since) if silence.until is None or silence.until >= since]
    if not silences:
        return None
    first = min(silences, key=lambda silence: (silence.until is not None, silence.since))
    return silent_node_failure(first, run) if first.until is None else _interrupted(first, run)


def with_interruption_said(failure: Failure, gang: Gang, run: Run) -> Failure:
    """The failure of ranks that wait, or that lost a peer, with the newest interruption of the attempt that it doesn't name itself."""
    over = [silence for silence in _in_time(gang, 0.0) if silence.until is not None]
    if not over or failure.cause is Cause.NODE_LOST or _could_not_talk(over[-1], run) in failure.message:
        return failure
    note = f"; before that {_could_not_talk(over[-1], run)}"
    return replace(failure, message=f"{failure.message[: 1000 - len(note)]}{note}")


def _in_time(gang: Gang, since: float) -> list[Silence]:
    """Silences that didn't begin after the attempt was stopped."""
    return [silence for silence in gang.silences if silence.since <= gang.stop_began or gang.stop_began < since]


def silent_node_failure(silence: Silence, run: Run) -> Failure:
    text = (
        f"{run.node_name(silence.node)} was lost: nothing was heard from it for {SILENCE_SECONDS:.0f} s, and nobody closed its connection; "
        f"{_why(silence, run)}"
    )
    return Failure(message=text, node=silence.node, cause=Cause.NODE_LOST)


def _interrupted(silence: Silence, run: Run) -> Failure:
    text = (
        f"{_could_not_talk(silence, run)}; ranks waited for each other until their time was up, and none of them is to blame: connections"
        f" between them may be dead since then, as where a firewall forgets connections: {words_of(run).peers}"
    )
    return Failure(message=text, node=silence.node, cause=Cause.FABRIC)


def _could_not_talk(silence: Silence, run: Run) -> str:
    seconds = (silence.until or silence.since) - silence.since
    how = (
        f"could not talk for {seconds:.0f} s, from {_clock(silence.since)} on"
        if seconds >= 1
        else f"lost their connection at {_clock(silence.since)}"
    )
    return f"{run.node_name(0)} and {run.node_name(silence.node)} {how}"


def open_silences_text(gang: Gang, run: Run) -> str:
    """Sentences such as `node 1 (x-1) has not been heard since 12:00:05 UTC: …`; empty while all are heard."""
    silences = open_silences(gang)
    return clauses([f"{run.node_name(s.node)} has not been heard since {_clock(s.since)}: {_why(s, run)}" for s in silences])


def silence_lines(before: Gang, after: Gang, run: Run) -> Iterator[str]:
    """Lines for the log about silences that have changed."""
    if before.silences is after.silences:
        return
    earlier = {(silence.node, silence.since, silence.until) for silence in before.silences}
    for silence in after.silences:
        if (silence.node, silence.since, silence.until) in earlier:
            continue
        if silence.until is None:
            yield f"{run.node_name(silence.node)} has not been heard since {_clock(silence.since)}: {_why(silence, run)}"
        else:
            yield f"{run.node_name(silence.node)} is heard again, after {silence.until - silence.since:.0f} s"


def _why(silence: Silence, run: Run) -> str:
    if silence.arrives:
        return f"its machine receives what {run.node_name(0)} sends, so its agent is stopped or gets no CPU"
    return f"what {run.node_name(0)} sends doesn't arrive there, so the network between the two is broken, or that machine hangs or is down"


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, timezone.utc):%H:%M:%S} UTC"  # noqa: UP017 (datetime.UTC is Python 3.11)
