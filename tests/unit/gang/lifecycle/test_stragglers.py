"""Who is said to hold the others up, and who isn't, with generated times of steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from lockstep_gang.contract.messages import Pace, Progressed, rank_report_to_json
from lockstep_gang.contract.report import Straggler
from lockstep_gang.coordinator.log_lines import log_lines
from lockstep_gang.lifecycle.gang import Gang, new_gang
from lockstep_gang.lifecycle.stragglers import ENOUGH, WINDOW, with_sample, with_stragglers, with_stragglers_now_and_then
from unit.gang.cases import make_run
from unit.gang.story import Story, started

SECOND = 1_000_000


def noisy(draw: random.Random, spread: float) -> float:
    """A second's work: log-normal, and now and then three times as long (a page that wasn't there, a log that is rotated)."""
    return SECOND * draw.lognormvariate(0, spread) * (3 if draw.random() < 0.03 else 1)


def steps(story: Story, count: int, time_of: Callable[[int, int], float]) -> Iterator[Gang]:
    """The gang after each step; `time_of(rank, step)` in microseconds."""
    gang = story.gang
    for step in range(1, count + 1):
        for rank in range(story.run.world_size - 1, -1, -1):
            before = gang.ranks[rank]
            gang = gang.with_rank(rank, replace(before, paces=with_sample(before.paces, Pace(rank, step, 1, round(time_of(rank, step))))))
        gang = with_stragglers(gang, story.run)
        yield gang


@pytest.mark.parametrize(("world", "spread"), [(2, 0.02), (2, 0.2), (8, 0.1), (8, 0.2), (32, 0.2)])
def test_a_thousand_clean_steps_raise_no_alarm(world: int, spread: float) -> None:
    draw = random.Random(world * 1000 + spread)  # noqa: S311 (no secret)
    story = started(nodes=2, ranks_per_node=world // 2)
    assert not any(gang.stragglers for gang in steps(story, 1000, lambda rank, step: noisy(draw, spread)))


@pytest.mark.parametrize("world", [2, 8])
def test_a_rank_half_as_slow_again_is_named_with_its_node_within_the_window(world: int) -> None:
    draw = random.Random(5)  # noqa: S311 (no secret)
    story = started(nodes=2, ranks_per_node=world // 2)
    slow = world - 1
    last = list(steps(story, WINDOW, lambda rank, step: noisy(draw, 0.1) * (1.5 if rank == slow else 1)))[-1]
    (found,) = last.stragglers
    assert (found.rank, found.node, found.steps) == (slow, 1, ENOUGH)
    assert 1.3 < float(found.slowdown) < 1.7


def test_every_rank_of_a_slow_node_is_named_the_slowest_first() -> None:
    story = started(nodes=4, ranks_per_node=2)
    last = list(steps(story, WINDOW, lambda rank, step: SECOND * {2: 1.4, 3: 1.6}.get(rank, 1)))[-1]
    assert [(straggler.rank, straggler.node, straggler.slowdown) for straggler in last.stragglers] == [(3, 1, "1.60"), (2, 1, "1.40")]


def test_steps_that_are_slow_for_all_ranks_name_nobody() -> None:
    story = started()
    assert not any(gang.stragglers for gang in steps(story, 60, lambda rank, step: SECOND * (5 if step > 30 else 1)))


def test_a_few_slow_steps_of_one_rank_name_nobody() -> None:
    story = started()
    assert not any(gang.stragglers for gang in steps(story, 200, lambda rank, step: SECOND * (4 if rank == 1 and step % 5 == 0 else 1)))


def test_nobody_is_judged_by_a_few_samples() -> None:
    story = started()
    seen = list(steps(story, ENOUGH, lambda rank, step: SECOND * (2 if rank == 1 else 1)))
    assert [bool(gang.stragglers) for gang in seen] == [False] * (ENOUGH - 1) + [True]


def test_a_rank_that_recovers_is_not_named_any_more_and_the_log_says_both() -> None:
    story = started()
    seen = [story.gang, *steps(story, 120, lambda rank, step: SECOND * (1.5 if rank == 1 and step < 60 else 1))]
    assert [straggler.rank for straggler in seen[59].stragglers] == [1]
    assert seen[-1].stragglers == ()
    lines = [line for before, after in itertools.pairwise(seen) for line in log_lines(before, after, story.run)]
    assert (
        lines[0]
        == "rank 1 on node 1 is slow: its own work takes 1.50 times as long as that of the others, over 20 steps, and all ranks wait for it"
    )
    assert lines[-1] == "rank 1 on node 1 is as fast as the others again"
    assert len(lines) <= 3


def test_a_slowdown_that_hardly_changes_is_not_said_anew() -> None:
    draw = random.Random(9)  # noqa: S311 (no secret)
    seen = list(steps(started(), 400, lambda rank, step: noisy(draw, 0.05) * (1.5 if rank == 1 else 1)))
    assert len({gang.stragglers for gang in seen if gang.stragglers}) == 1


def test_stragglers_are_in_the_report_while_ranks_run_and_forgotten_by_the_next_attempt() -> None:
    story = started()
    for step in range(1, ENOUGH + 1):
        for rank in (1, 0):
            pace = Pace(rank, step, 40, SECOND * (2 if rank == 1 else 1))
            story.hears(rank, Progressed(1, (rank_report_to_json(pace),)))
    assert story.report.stragglers == (Straggler(1, 1, "2.00", 40 * ENOUGH),)
    story.exits(0, 1)
    assert story.report.stragglers == ()


@pytest.mark.parametrize(("ranks", "judged"), [(64, [1000.0, 1000.999, 1001.0]), (1064, [1001.0])])
def test_a_gang_of_more_than_64_ranks_is_judged_once_in_a_millisecond_for_each_further_one(ranks: int, judged: list[float]) -> None:
    run = make_run(nodes=ranks)
    gang = replace(new_gang(run), straggled_at=1000.0)
    assert [now for now in (1000.0, 1000.999, 1001.0) if with_stragglers_now_and_then(gang, run, now) is not gang] == judged
