"""How much a gang remembers, from how much on it says that a rank is slow, and how often it looks: each at its promised number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep_gang.contract.interactive import Asked, Interactive
from lockstep_gang.contract.messages import Pace, Start
from lockstep_gang.contract.report import Straggler
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.lifecycle.gang import Phase, Request
from lockstep_gang.lifecycle.goodput import accounted_now_and_then
from lockstep_gang.lifecycle.session import interactive_report
from lockstep_gang.lifecycle.stragglers import with_sample, with_stragglers
from unit.gang.cases import make_run
from unit.gang.story import Story, hello, started


def straggler_after(*slowdowns: float, before: tuple[Straggler, ...] = ()) -> tuple[str, ...]:
    """Slowdown of rank 1 that is reported after these samples of it and as many of rank 0, which takes a millisecond for each."""
    story = started()
    gang = replace(story.gang, stragglers=before)
    for rank in range(2):
        paces: tuple[Pace, ...] = ()
        for step, slowdown in enumerate(slowdowns):
            paces = with_sample(paces, Pace(rank, step, 1, round(1000 * (slowdown if rank else 1))))
        gang = gang.with_rank(rank, replace(gang.ranks[rank], paces=paces))
    return tuple(straggler.slowdown for straggler in with_stragglers(gang, story.run).stragglers)


STRAGGLED = (Straggler(1, 1, "1.50", 20),)


@pytest.mark.parametrize(
    ("slowdowns", "before", "reported"),
    [
        ([2.0] * 19, (), ()),
        ([2.0] * 20, (), ("2.00",)),
        ([2.0] * 30 + [1.0] * 7, (), ()),  # of the last thirty
        ([1.0] * 70 + [2.0] * 30, (), ("2.00",)),
        ([1.24] * 20, (), ()),
        ([1.26] * 20, (), ("1.26",)),
        ([1.3] * 15 + [1.0] * 5, (), ()),  # 75 % of the samples
        ([1.3] * 16 + [1.0] * 4, (), ("1.30",)),
        ([1.3] * 15 + [1.09] * 5, (), ()),
        ([1.3] * 15 + [1.11] * 5, (), ("1.30",)),
        ([1.11] * 20, STRAGGLED, ()),
        ([1.13] * 20, STRAGGLED, ("1.13",)),
        ([1.7] * 20, STRAGGLED, ("1.50",)),
        ([1.74] * 20, STRAGGLED, ("1.74",)),
        ([1.32] * 20, STRAGGLED, ("1.50",)),
        ([1.29] * 20, STRAGGLED, ("1.29",)),
    ],
)
def test_a_rank_is_slow_by_these_figures(slowdowns: list[float], before: tuple[Straggler, ...], reported: tuple[str, ...]) -> None:
    assert straggler_after(*slowdowns, before=before) == reported


def test_every_65th_attempt_has_the_port_of_the_first() -> None:
    def port(attempt: int) -> int:
        story = Story(make_run(master_port=29500, restart=RestartPolicy(3, 0))).hears(0, hello(0, known=attempt - 1))
        order, *_ = [order for _, order in story.hears(1, hello(1, known=attempt - 1)).orders if isinstance(order, Start)]
        assert order.attempt == attempt
        return order.master_port

    assert [port(attempt) for attempt in (1, 2, 64, 65)] == [29500, 29501, 29563, 29500]


def test_of_a_request_256_characters_are_reported() -> None:
    run = make_run(command=(), interactive=Interactive(idle_seconds=600, warn_seconds=300))
    gang = Story(run).hears(0, hello(0)).hears(1, hello(1)).gang
    asked = Asked("1", ("a" * 1000,), "/workspace", "b" * 1000)
    report = interactive_report(replace(gang, session=replace(gang.session, request=Request(asked, 0, "agent-0", 1000.0))), run)
    assert report is not None and (report.script, report.by) == ("a" * 256, "b" * 256)


@pytest.mark.parametrize(("seconds", "is_accounted"), [(4.999, False), (5.0, True)])
def test_what_a_gang_that_stops_spends_is_accounted_every_five_seconds(seconds: float, is_accounted: bool) -> None:
    story = started().exits(0, 1)
    assert story.gang.phase is Phase.STOPPING
    before = replace(story.gang, goodput=replace(story.gang.goodput, began=1, until=1_000_000))
    assert (accounted_now_and_then(before, story.run, 1000.0 + seconds) is not before) == is_accounted
