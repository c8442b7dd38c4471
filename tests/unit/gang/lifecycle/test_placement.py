"""Ranks of nodes in one rack are neighbors, and everything that names a node names the true one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_gang.agent.ranks import environment as environment_module
from lockstep_gang.agent.ranks.environment import RankPlace, rank_environment
from lockstep_gang.contract.messages import Error, Exited, RankExit, Start, Started, Step, Stop
from lockstep_gang.contract.reply import Reply, parse_reply, reply_json
from lockstep_gang.contract.run import ReportTarget
from lockstep_gang.coordinator.log_lines import log_lines
from lockstep_gang.lifecycle.placement import rank_order, with_racks
from lockstep_gang.lifecycle.summary import summarize
from lockstep_spec.codec import ContractError
from unit.gang.cases import make_run
from unit.gang.story import Story, all_stopped, hello

WAIT_SECONDS = 3.0

TARGET = ReportTarget("https://operator/v1/report", "PEM", "/token")
RACKS = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=64)


@given(RACKS)
def test_every_node_has_its_place_once(racks: list[str]) -> None:
    assert sorted(rank_order(racks)) == list(range(len(racks)))


@given(RACKS)
def test_node_0_stays_first_beside_the_coordinator(racks: list[str]) -> None:
    assert rank_order(racks)[0] == 0


@given(RACKS)
def test_nodes_of_a_rack_are_neighbors_in_the_order_of_their_numbers(racks: list[str]) -> None:
    order = rank_order(racks)
    for rack in set(racks):
        places = [place for place, node in enumerate(order) if racks[node] == rack]
        assert places == list(range(places[0], places[0] + len(places)))
        assert [order[place] for place in places] == sorted(order[place] for place in places)


@given(st.integers(1, 64), st.text())
def test_one_rack_leaves_the_order_as_it_is(nodes: int, rack: str) -> None:
    assert rank_order([rack] * nodes) == tuple(range(nodes))


@given(RACKS, st.permutations(["r0", "r1", "r2", "r3"]))
def test_the_names_of_racks_play_no_part(racks: list[str], names: list[str]) -> None:
    renamed = dict(zip(["", "a", "b", "c"], names, strict=True))
    assert rank_order([renamed[rack] for rack in racks]) == rank_order(racks)


@given(RACKS)
def test_ranks_and_nodes_are_each_other_s_inverse(racks: list[str]) -> None:
    run = make_run(nodes=len(racks), ranks_per_node=2, order=rank_order(racks))
    assert [rank for node in run.order for rank in run.ranks_of(node)] == list(range(run.world_size))
    assert all(run.node_of(rank) == node for node in range(run.nodes) for rank in run.ranks_of(node))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=9).flatmap(
        lambda counts: st.tuples(st.just(counts), st.permutations(range(len(counts))))
    )
)
def test_ranks_and_nodes_with_unlike_numbers_of_them_are_each_other_s_inverse(drawn: tuple[list[int], list[int]]) -> None:
    counts, order = drawn
    run = make_run(nodes=len(counts), ranks_per_node=max(counts), node_ranks=tuple(counts), order=tuple(order))
    assert [rank for node in order for rank in run.ranks_of(node)] == list(range(run.world_size))
    assert all(run.node_of(rank) == node for node in range(run.nodes) for rank in run.ranks_of(node))
    assert [run.layout.local_rank_of(rank) for node in order for rank in run.ranks_of(node)] == [
        r for node in order for r in range(counts[node])
    ]


def test_a_rank_that_is_not_there_has_no_node() -> None:
    with pytest.raises(IndexError, match="rank 4 of 4"):
        make_run(nodes=2, ranks_per_node=3, node_ranks=(1, 3)).node_of(4)


@pytest.mark.parametrize(("counts", "message"), [
    ((2, 1, 1), "nodeRanks is .2, 1, 1., but must be empty, or a list of 2"),
    ((2, 0), "1 to ranksPerNode each, and 2 the largest"),
    ((3, 1), "1 to ranksPerNode each, and 2 the largest"),
    ((1, 1), "1 to ranksPerNode each, and 2 the largest"),
])  # fmt: skip
def test_counts_of_ranks_that_do_not_fit_are_refused(counts: tuple[int, ...], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        make_run(nodes=2, ranks_per_node=2, node_ranks=counts)


def test_a_node_learns_its_first_rank_with_the_start_when_ranks_follow_the_racks() -> None:
    story = four(("a", "b", "a", "b"), node_ranks=(2, 1, 1, 2))
    firsts = {node: (order.group_rank, order.first_rank) for node, order in story.orders if isinstance(order, Start)}
    assert firsts == {0: (0, 0), 2: (1, 2), 1: (2, 3), 3: (3, 4)}


def test_an_order_that_leaves_a_node_out_is_refused() -> None:
    with pytest.raises(ContractError, match="order"):
        make_run(nodes=3, order=(0, 2, 2))


def four(racks: tuple[str, ...] = (), **changes: object) -> Story:
    """Four nodes of two ranks on a cluster with racks; the operator has told `racks`."""
    story = Story(make_run(nodes=4, ranks_per_node=2, rack_grouped=True, report=TARGET, **changes))
    story.gang = replace(story.gang, placement=with_racks(story.gang.placement, racks))
    for node in range(4):
        story.hears(node, hello(node))
    return story


def starts(story: Story) -> dict[int, int | None]:
    """Each node's place; None: its number."""
    return {node: order.group_rank for node, order in story.orders if isinstance(order, Start)}


def test_every_node_is_told_its_place_with_the_start() -> None:
    assert starts(four(("a", "b", "a", "b"))) == {0: 0, 2: 1, 1: 2, 3: 3}


def test_a_failure_names_the_true_node() -> None:
    story = four(("a", "b", "a", "b"))
    for node in range(4):
        story.hears(node, Started(1))
    error = Error(3, "ValueError", "no")
    story.hears(2, Exited(1, RankExit(3, 1, None, ordered=False, error=error)))
    assert [type(order) for _, order in story.orders] == [Stop] * 4
    all_stopped(story)
    assert (story.report.failure.node, story.report.failure.rank) == (2, 3)
    assert story.report.failure.message == "rank 3 on node 2 exited with 1: ValueError: no"


def test_a_node_cannot_speak_for_the_ranks_that_its_number_would_have() -> None:
    story = four(("a", "b", "a", "b"))
    before = story.gang
    story.hears(1, Exited(1, RankExit(2, 1, None, ordered=False)))
    assert story.gang == before


def test_rank_0_is_heard_wherever_the_others_are() -> None:
    assert four(("a", "b", "a", "b")).reports(0, Step(0, 7, 10)).report.trainer.step == 7


def test_the_report_has_the_order_of_the_ranks() -> None:
    story = four(("b", "a", "b", "a"))
    assert summarize(story.gang, story.run).order == (0, 2, 1, 3)
    assert summarize(four().gang, story.run).order == ()


def test_without_a_word_of_the_operator_a_start_waits_shortly_and_goes_by_numbers() -> None:
    story = four()
    assert (starts(story), story.wake_at) == ({}, story.now + WAIT_SECONDS)
    assert starts(story.waits(WAIT_SECONDS)) == dict.fromkeys(range(4))


def test_a_word_that_comes_during_the_wait_is_taken() -> None:
    story = four()
    story.gang = replace(story.gang, placement=with_racks(story.gang.placement, ("a", "b", "b", "a")))
    assert starts(story.decide()) == {0: 0, 3: 1, 1: 2, 2: 3}


def test_nobody_waits_where_no_word_can_come() -> None:
    story = Story(make_run(nodes=2))
    assert starts(story.hears(0, hello(0)).hears(1, hello(1))) == dict.fromkeys(range(2))


def test_the_order_is_decided_anew_for_the_next_attempt() -> None:
    story = four(("a", "b", "a", "b"), restart=replace(make_run().restart, max_restarts=1))
    story.hears(2, Exited(1, RankExit(2, 1, None, ordered=False)))
    story.gang = replace(story.gang, placement=with_racks(story.gang.placement, ("a", "a", "b", "b")))
    assert starts(all_stopped(story)) == dict.fromkeys(range(4))


def test_an_answer_without_racks_forgets_none() -> None:
    story = four(("a", "b", "a", "b"))
    assert with_racks(story.gang.placement, ()).racks == ("a", "b", "a", "b")


def test_the_log_says_so_when_ranks_follow_the_racks() -> None:
    story = four()
    before = story.gang
    story.gang = replace(before, placement=with_racks(before.placement, ("a", "", "a", "")))
    lines = list(log_lines(before, story.decide().gang, story.run))
    assert "ranks follow the racks: node 0, 2 (rack a), then 1, 3 (no rack)" in lines


def test_a_rank_learns_its_place_and_its_pod_s_number() -> None:
    run = make_run(nodes=4, ranks_per_node=2)
    start = Start(1, 0, "x-0", 29500, group_rank=1)
    found = rank_environment(run, start, RankPlace(2, 1, 3, 1, "/run.json", "/socket", "/error"), {})
    wanted = {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "NODE_RANK": "1", "LOCKSTEP_NODE": "2"}
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("changes", "inherited", "threads", "ours"),
    [
        ({"ranks_per_node": 2}, {}, "8", "8"),
        ({"ranks_per_node": 1}, {}, "16", "16"),
        ({"ranks_per_node": 32}, {}, "1", "1"),
        ({"ranks_per_node": 2, "node_ranks": (1, 2)}, {}, "16", "16"),
        ({"ranks_per_node": 2, "addresses": ("127.0.0.1", "127.0.0.1")}, {}, "4", "4"),
        ({"ranks_per_node": 2}, {"OMP_NUM_THREADS": "7"}, "7", None),
        ({"ranks_per_node": 2, "environment": {"OMP_NUM_THREADS": "3"}}, {"OMP_NUM_THREADS": "7"}, "3", None),
        ({"ranks_per_node": 2}, {"OMP_NUM_THREADS": "16", "LOCKSTEP_DEFAULT_THREADS": "16"}, "8", "8"),
        ({"ranks_per_node": 2}, {"OMP_NUM_THREADS": "7", "LOCKSTEP_DEFAULT_THREADS": "16"}, "7", None),
        ({"environment": {"OMP_NUM_THREADS": "16"}}, {"OMP_NUM_THREADS": "16", "LOCKSTEP_DEFAULT_THREADS": "16"}, "16", None),
    ],
)
def test_a_rank_has_its_part_of_the_cores_unless_someone_states_its_threads_and_knows_which(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], inherited: dict[str, str], threads: str, ours: str | None
) -> None:
    monkeypatch.setattr(environment_module, "usable_cores", lambda: 16.5)
    run = make_run(**{"nodes": 2, "addresses": ("x-0", "x-1"), **changes})
    found = rank_environment(run, Start(1, 0, "x-0", 29500), RankPlace(0, 0, 0, 0, "/run.json", "/socket", "/error"), inherited)
    assert (found["OMP_NUM_THREADS"], found.get("LOCKSTEP_DEFAULT_THREADS")) == (threads, ours)


def test_racks_travel_in_the_reply_and_an_older_operator_s_has_none() -> None:
    reply = Reply(racks=("a", "", "b"))
    assert parse_reply(json.dumps(reply_json(reply)).encode()) == reply
    assert parse_reply(b'{"facts": []}').racks == ()


@pytest.mark.parametrize(
    ("gpus", "stated", "expected"),
    [
        (8, {}, "expandable_segments:True"),
        (8, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        (8, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        (0, {}, None),
    ],
)
def test_segments_of_gpu_memory_can_grow_unless_the_user_sets_the_allocator(
    gpus: int, stated: dict[str, str], expected: str | None
) -> None:
    run = make_run(gpus_per_node=gpus, ranks_per_node=max(1, gpus))
    found = rank_environment(run, Start(1, 0, "x-0", 29500), RankPlace(0, 0, 0, 0, "/run.json", "/socket", "/error"), stated)
    assert found.get("PYTORCH_ALLOC_CONF") == expected
