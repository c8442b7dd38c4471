"""What the operator hears of a change, and how soon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lockstep_gang.contract.run import Run
from lockstep_gang.coordinator.reporter import Reporter
from lockstep_gang.lifecycle.gang import Gang
from lockstep_gang.lifecycle.summary import message_of, state_of, summarise


def report_change(reporter: Reporter, before: Gang, after: Gang, run: Run, tail: Callable[[], tuple[str, ...]]) -> None:
    """`tail`: the last lines of node 0's log, which go with a turn."""
    report = summarise(after, run)
    if _turns(before) != _turns(after):
        reporter.transition(replace(report, log=tail()))
    elif (before.checkpoint, before.fabric.verdict, before.stragglers, message_of(before, run)) != (
        report.checkpoint,
        report.fabric,
        after.stragglers,
        report.message,
    ):
        reporter.news(report)
    else:
        reporter.refresh(report)


def _turns(gang: Gang) -> tuple[object, ...]:
    """What the operator hears of at once."""
    return state_of(gang), gang.attempt, gang.stopped, gang.session.idleness
