"""Stacks of a job's ranks: their answers, and the page that shows them (pure)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.plan.pages.answers import is_count, items
from lockstep_gang.contract.layout import RankLayout

RANKS_MAX, LINES_MAX, LINE_CHARACTERS = 4096, 20_000, 500
FIRST = "most recent call first"
NOWHERE = -1
"""Node of a rank that the job doesn't have."""
NOT_THERE = "no process of it runs: it has ended, or not begun"
_THREAD = re.compile(rf"(?:Current thread|Thread) 0x[0-9a-f]+.*\({FIRST}\):$")


@dataclass(frozen=True)
class Thread:
    """Thread of a rank: its frames, the innermost first, in Python's own words."""

    is_main: bool
    frames: tuple[str, ...]


@dataclass(frozen=True)
class RankAnswer:
    """Answer of a rank's process; `problem` says why it has no threads."""

    rank: int
    node: int
    attempt: int
    state: str
    threads: tuple[Thread, ...] = ()
    problem: str = ""


def read_ranks(answer: Mapping[str, Any]) -> list[RankAnswer]:
    """`rankstacks.look`, without what is none of it: whoever made a job's image decides what it says."""
    return [read for item in items(answer.get("ranks"), RANKS_MAX) if isinstance(item, dict) and (read := _rank(item)) is not None]


def _rank(item: Mapping[str, Any]) -> RankAnswer | None:
    rank, node, attempt = (item.get(name) for name in ("rank", "node", "attempt"))
    if not (is_count(rank) and is_count(node) and is_count(attempt)):
        return None
    lines = [line[:LINE_CHARACTERS] for line in items(item.get("lines"), LINES_MAX) if isinstance(line, str)]
    state, problem = str(item.get("state", ""))[:1], str(item.get("problem", ""))[:LINE_CHARACTERS]
    threads = threads_of(lines)
    return RankAnswer(int(rank), int(node), int(attempt), state, threads, problem or ("" if threads else "it answered with no stack"))


def threads_of(lines: Iterable[str]) -> tuple[Thread, ...]:
    """Threads in faulthandler's text, the main thread first: there it comes last, as the oldest."""
    threads: list[list[str]] = []
    for line in lines:
        if _THREAD.search(line):
            threads.append([])
        elif threads and line.strip():
            threads[-1].append(line.strip())
    return tuple(Thread(index == 0, tuple(frames)) for index, frames in enumerate(reversed(threads)))


def with_silent(answers: Collection[RankAnswer], rank: int | None, of_nodes: Mapping[int, str], layout: RankLayout) -> list[RankAnswer]:
    """Return the answers, and the ranks, of all or this one, that gave none, in their order. `of_nodes`: why nodes didn't answer."""
    answered = {answer.rank for answer in answers}
    silent = [number for number in (range(layout.world_size) if rank is None else [rank]) if number not in answered]
    places = ((number, layout.node_of(number) if number < layout.world_size else NOWHERE) for number in silent)
    without = (RankAnswer(number, node, 0, "", problem=of_nodes.get(node, NOT_THERE)) for number, node in places)
    return sorted([*answers, *without], key=lambda answer: answer.rank)


def stacks_page(answers: Iterable[RankAnswer]) -> Iterator[str]:
    """Page that shows once what several ranks have in common: main threads first, then the others, then who has not answered."""
    listed_answers = list(answers)
    for is_main in (True, False):
        for frames, ranks in _shared(listed_answers, is_main=is_main):
            yield f"{_called(ranks)}: {'main thread' if is_main else 'another thread'} ({FIRST})"
            yield from (f"  {frame}" for frame in frames or ["no Python frame"])
            yield ""
    problems: dict[str, list[int]] = {}
    for answer in listed_answers:
        if answer.problem:
            problems.setdefault(answer.problem, []).append(answer.rank)
    yield from (f"{_called(ranks)}: no answer: {problem}" for problem, ranks in problems.items())


def _shared(answers: Iterable[RankAnswer], *, is_main: bool) -> list[tuple[tuple[str, ...], list[int]]]:
    """(frames, the ranks that are there), by the first of them."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for answer in answers:
        for thread in answer.threads:
            if thread.is_main is is_main and answer.rank not in (ranks := groups.setdefault(thread.frames, [])):
                ranks.append(answer.rank)
    return sorted(groups.items(), key=lambda one: one[1])


def _called(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-6, 9`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' * (len(spans) > 1 or spans[0][0] != spans[0][1])} {listed}"
