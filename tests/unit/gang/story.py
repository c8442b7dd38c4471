"""A gang to which things happen, for the tests of its lifecycle: no process, no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep_gang.contract.messages import (
    AgentMessage,
    Exited,
    Hello,
    Order,
    RankExit,
    RankReport,
    RankState,
    Reported,
    Started,
    Stopped,
    rank_report_to_json,
)
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.decide import Decision, decide
from lockstep_gang.lifecycle.gang import Budget, Gang, Phase, new_gang
from lockstep_gang.lifecycle.observe import connection_closed, observe
from lockstep_gang.lifecycle.summary import summarize
from unit.gang.cases import make_run


class Story:
    """A gang to which things happen; remembers what was decided."""

    def __init__(self, run: Run, gang: Gang | None = None) -> None:
        self.run = run
        self.gang = gang or new_gang(run)
        self.now = 1000.0
        self.orders: list[tuple[int, Order]] = []
        self.records: list[str] = []
        self.wake_at: float | None = None

    def decide(self) -> Story:
        self.orders = []
        while True:
            phase, decision = self.gang.phase, decide(self.gang, self.run, self.now)
            self._record(decision)
            self.orders.extend(decision.orders)
            self.gang, self.wake_at = decision.gang, decision.wake_at
            self.run = replace(self.run, order=self.gang.placement.order)
            if self.gang.phase is phase:
                return self

    def _record(self, decision: Decision) -> None:
        self.records += ["begin"] if decision.begin else []
        self.records += ["end"] if decision.end else []
        self.records += [decision.close] if decision.close else []

    def hears(self, node: int, *messages: AgentMessage) -> Story:
        for message in messages:
            self.gang = observe(self.gang, self.run, node, message, self.now)
            self.decide()
        return self

    def reports(self, node: int, *reports: RankReport) -> Story:
        return self.hears(node, *(Reported(self.gang.attempt, rank_report_to_json(report)) for report in reports))

    def exits(self, rank: int, code: int | None = 0, **changes: Any) -> Story:
        exit_ = replace(RankExit(rank, code, None, ordered=False), **changes)
        if exit_.ordered and self.gang.phase is Phase.ACTIVE and self.gang.seeks_until > self.now:  # nobody ends a rank before that is over
            self.waits(self.gang.seeks_until - self.now)
        return self.hears(self.run.node_of(rank), Exited(self.gang.attempt, exit_))

    def loses(self, node: int) -> Story:
        self.gang = connection_closed(self.gang, node, self.now)
        return self.decide()

    def waits(self, seconds: float) -> Story:
        self.now += seconds
        return self.decide()

    @property
    def report(self) -> Any:
        return summarize(self.gang, self.run)


def hello(node: int, attempt: int = 0, known: int = 0, instance: str = "", ranks: tuple[RankState, ...] = ()) -> Hello:
    return Hello(node, instance or f"agent-{node}", known or attempt, attempt, ranks)


def started(attempt: int = 1, **changes: Any) -> Story:
    """A gang whose ranks run."""
    story = Story(make_run(**changes))
    for node in range(story.run.nodes):
        story.hears(node, hello(node, known=attempt - 1))
    for node in range(story.run.nodes):
        story.hears(node, Started(attempt))
    return story


def failed_before(story: Story) -> Story:
    """Since the newest commit, so that the next failure is followed by a backoff."""
    committed = story.gang.checkpoint.step if story.gang.checkpoint is not None else 0
    story.gang = replace(story.gang, budget=Budget(failures=1, counted=1, committed_step=committed))
    return story


def all_stopped(story: Story) -> Story:
    """Every node says that nothing of the attempt runs any more."""
    story.waits(max(0.0, story.gang.seeks_until - story.now))
    for node in range(story.run.nodes):
        story.hears(node, Stopped(story.gang.attempt))
    return story
