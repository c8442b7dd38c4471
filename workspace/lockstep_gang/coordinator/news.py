"""What the operator hears of a change, and how soon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lockstep_gang.contract.run import Run
from lockstep_gang.coordinator.reporter import Reporter
from lockstep_gang.lifecycle.gang import Gang, Phase
from lockstep_gang.lifecycle.summary import message_facts, message_of, state_of, summarise


def report_change(reporter: Reporter, before: Gang, after: Gang, run: Run, tail: Callable[[], tuple[str, ...]]) -> None:
    """`tail`: the last lines of node 0's log, which go with a turn. A report takes a look at every rank: but for turns it is made when it is sent."""
    if _turns(before) != _turns(after):
        reporter.transition(replace(summarise(after, run), log=tail()))
    elif _is_news(before, after, run):
        reporter.news(partial(summarise, after, run))
    else:
        reporter.refresh(partial(summarise, after, run))


def _is_news(before: Gang, after: Gang, run: Run) -> bool:
    if (before.checkpoint, before.failed_saves) != (after.checkpoint, after.failed_saves):
        return True
    if (before.fabric.verdict, before.stragglers) != (after.fabric.verdict, after.stragglers):
        return True
    if message_facts(before) == message_facts(after):
        return False
    return after.phase is Phase.ACTIVE or message_of(before, run) != message_of(after, run)


def _turns(gang: Gang) -> tuple[object, ...]:
    """What the operator hears of at once."""
    return state_of(gang), gang.attempt, gang.stopped, gang.session.idleness
