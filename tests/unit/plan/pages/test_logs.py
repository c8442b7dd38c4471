"""Which node has a rank, and what node 0's log says of ranks that failed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from lockstep.api.errors import ConfigError
from lockstep.plan.pages.logs import (
    RankFailure,
    RankFailures,
    error_lines,
    layout_of,
    node_of_rank,
    of_rank,
    parse_duration,
    ranks_of_node,
    ranks_of_run,
)
from lockstep_gang.coordinator.log_lines import log_lines
from unit.gang.cases import make_run
from unit.gang.story import Story, hello

LOG = """\
[lockstep] attempt 1 starts: 4 ranks on 2 nodes
[rank 0] of the first attempt
[lockstep] rank 0 on node 0 exited with 1
[lockstep] stopping all ranks: rank 0 on node 0 exited with 1
[lockstep] attempt 2 starts: 4 ranks on 2 nodes, restart 1 of at most 3
[rank 1] loading
[rank 0] training
[lockstep] rank 3 on node 1 exited with 1, its last lines:
[lockstep] rank 3 | Traceback (most recent call last):
[lockstep] rank 3 | ValueError: no data
[rank 1] lost the connection
[lockstep] rank 1 on node 0 was ended by SIGABRT
[lockstep] stopping all ranks: rank 3 on node 1 exited with 1: ValueError: no data
[lockstep] Failed: rank 3 on node 1 exited with 1: ValueError: no data
""".splitlines()


@pytest.mark.parametrize(("order", "nodes"), [([], [0, 0, 1, 1, 2, 2]), ([0, 2, 1], [0, 0, 2, 2, 1, 1])])
def test_a_rank_is_looked_for_on_the_node_that_has_it(order: list[int], nodes: list[int]) -> None:
    ranks = {"desired": 6, "ready": 6, **({"order": order} if order else {})}
    assert [node_of_rank(layout_of(ranks, 3), rank) for rank in range(6)] == nodes
    assert [rank for node in order or [0, 1, 2] for rank in ranks_of_node(layout_of(ranks, 3), node)] == list(range(6))


def test_ranks_of_nodes_with_unlike_numbers_of_them_come_from_run_json() -> None:
    ranks = ranks_of_run({"nodes": 3, "ranksPerNode": 2, "nodeRanks": [2, 1, 1]})
    assert ranks == {"desired": 4, "perNode": [2, 1, 1]}
    assert [node_of_rank(layout_of(ranks, 3), rank) for rank in range(4)] == [0, 0, 1, 2]
    assert list(ranks_of_node(layout_of(ranks | {"order": [0, 2, 1]}, 3), 1)) == [3]


def test_a_run_json_without_counts_says_nothing() -> None:
    assert ranks_of_run({"nodes": 2, "ranksPerNode": 3, "nodeRanks": []}) == {"desired": 6}
    assert ranks_of_run({}) == ranks_of_run({"nodes": "2", "ranksPerNode": 3}) == {}


def test_a_job_that_is_resized_still_has_its_ranks_where_they_were() -> None:
    ranks = {"desired": 6, "ready": 6}
    assert [node_of_rank(layout_of(ranks, 4), rank) for rank in range(6)] == list(range(6))
    assert list(ranks_of_node(layout_of(ranks, 4), 7)) == []


@pytest.mark.parametrize(("ranks", "words"), [({"desired": 4}, "the job has 4 ranks, 0 to 3"), ({}, "has not started yet")])
def test_a_rank_that_is_not_there_is_refused(ranks: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        node_of_rank(layout_of(ranks, 2), 4)


def test_rank_1_is_not_rank_10() -> None:
    assert [of_rank(line, 1) for line in ("[rank 1] a", "[rank 10] b", "[lockstep] rank 1 | c")] == [True, False, False]
    assert of_rank("[lockstep] anything", None)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("2h30m", 9000), ("1d", 86400)])
def test_times_are_written_as_for_kubectl(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "10 minutes"])
def test_a_time_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 90s"):
        parse_duration(text)


def rank_failures(lines: Iterable[str]) -> list[RankFailure]:
    failures = RankFailures()
    for line in lines:
        failures.add(line)
    return failures.failures


def test_every_failed_rank_is_found_with_its_own_last_lines() -> None:
    found = rank_failures(LOG)
    assert [(one.attempt, one.rank, one.node, one.how) for one in found] == [
        (1, 0, 0, "exited with 1"),
        (2, 3, 1, "exited with 1"),
        (2, 1, 0, "was ended by SIGABRT"),
    ]
    assert found[1].lines == ("Traceback (most recent call last):", "ValueError: no data")
    assert found[2].lines == ("loading", "lost the connection")


def test_the_lines_that_the_coordinator_writes_today_are_read() -> None:
    story = Story(make_run(ranks_per_node=2)).hears(0, hello(0))
    steps = (
        lambda: story.hears(1, hello(1)),
        lambda: story.exits(3, 1, last_lines=("Traceback (most recent call last):", "ValueError: no data")),
        lambda: story.exits(2, None, signal="SIGKILL", last_lines=("loading",)),
        lambda: story.exits(1, None, signal="SIGABRT"),
        lambda: story.exits(0, 134),
    )
    lines: list[str] = []
    for step in steps:
        before = story.gang
        step()
        lines += (f"[lockstep] {line}" for line in log_lines(before, story.gang, story.run))
    assert rank_failures(lines) == [
        RankFailure(1, 3, 1, "exited with 1", ("Traceback (most recent call last):", "ValueError: no data")),
        RankFailure(1, 2, 1, "was ended by SIGKILL", ("loading",)),
        RankFailure(1, 1, 0, "was ended by SIGABRT", ()),
        RankFailure(1, 0, 0, "exited with 134", ()),
    ]


def test_the_failure_that_the_status_names_comes_first_and_then_the_others_of_its_attempt() -> None:
    failure = {"rank": 1, "node": 0, "cause": "UserCode", "message": "rank 1 on node 0 was ended by SIGABRT", "lastLines": ["the cause"]}
    assert list(error_lines(failure, rank_failures(LOG))) == [
        "first: rank 1 on node 0 (UserCode): was ended by SIGABRT",
        "  | the cause",
        "then:  rank 3 on node 1 exited with 1 in attempt 2",
        "  | Traceback (most recent call last):",
        "  | ValueError: no data",
    ]


def test_without_a_status_the_first_that_node_0_heard_of_is_the_first() -> None:
    lines = list(error_lines({}, rank_failures(LOG)))
    assert lines[0] == "first: rank 3 on node 1 exited with 1 in attempt 2" and lines[3].startswith("then:  rank 1 on node 0")


def test_a_failure_of_no_rank_is_told_too_and_nothing_is_told_of_none() -> None:
    assert list(error_lines({"cause": "NodeLost", "message": "node 1 is gone"}, [])) == ["first: (NodeLost): node 1 is gone"]
    assert list(error_lines({}, [])) == []


def test_of_a_thousand_ranks_that_lost_their_peer_few_are_shown() -> None:
    lines = [f"[lockstep] rank {rank} on node {rank // 8} exited with 1" for rank in range(1000)]
    shown = list(error_lines({"rank": 3, "node": 0, "message": "x"}, rank_failures(lines)))
    assert len(shown) == 10 and shown[-1] == "then:  991 more ranks; --rank N has the lines of one"


def test_of_a_rank_its_last_twenty_lines_are_kept_whether_they_came_before_its_end_or_with_it() -> None:
    own = [f"[rank 0] line {number}" for number in range(30)]
    end = "[lockstep] rank 0 on node 0 exited with 1"
    again = [f"[lockstep] rank 0 | line {number}" for number in range(30)]
    expected = tuple(f"line {number}" for number in range(10, 30))
    assert [rank_failures(log)[0].lines for log in ([*own, end], [f"{end}, its last lines:", *again])] == [expected, expected]


def test_of_a_log_that_anybody_may_have_written_256_ranks_and_10_000_failures_are_kept() -> None:
    lines = [f"[rank {rank}] hello" for rank in range(300)]
    found = rank_failures([*lines, *(f"[lockstep] rank {rank % 300} on node 0 exited with 1" for rank in range(10_300))])
    assert len(found) == 10_000 and sum(bool(one.lines) for one in found[:300]) == 256
