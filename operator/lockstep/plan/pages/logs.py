"""Node whose log has a rank's lines, and failures of ranks that node 0's log tells of (pure)."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Object
from lockstep.plan.pages.answers import is_count
from lockstep_gang.contract.layout import RankLayout

LAST_LINES = 20
SHOWN_RANKS = 8
OWN_RANKS_MAX, FAILURES_MAX, LINE_CHARACTERS = 256, 10_000, 8192
"""Limits of what is remembered of a log that somebody else may have written."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_RANK = re.compile(r"\[rank (\d{1,6})\] (.*)")
_ENDED = re.compile(r"\[lockstep\] rank (\d{1,6}) on node (\d{1,6}) ((?:exited with|was ended by) \S+?)(?:, its last lines:)?$")
"""Line of the coordinator's `log_lines`, with the words of `RankExit.how`. A job may run an older gang, so words once written must still be
read.
"""
_REPEATED = re.compile(r"\[lockstep\] rank (\d{1,6}) \| (.*)")
_BEGINS = re.compile(r"\[lockstep\] attempt (\d{1,6}) starts")


@dataclass(frozen=True)
class RankFailure:
    """End of a rank, as node 0's log tells it."""

    attempt: int | None
    rank: int
    node: int
    how: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class LogSelection:
    """Selection of lines of a node's log."""

    node: int = 0
    rank: int | None = None
    tail: int | None = None
    since_seconds: int | None = None
    attempt: int | None = None
    """Attempt whose lines are meant; None: all."""


def request_of(selection: LogSelection, now: float) -> dict[str, Any]:
    """Arguments of `runfolder.log`. `now`: seconds since 1970."""
    since = None if selection.since_seconds is None else datetime.fromtimestamp(now - selection.since_seconds, UTC)
    return {
        "node": selection.node,
        "rank": -1 if selection.rank is None else selection.rank,
        "attempt": -1 if selection.attempt is None else selection.attempt,
        "since": "" if since is None else f"{since:%Y-%m-%dT%H:%M:%S}",
        "tail": -1 if selection.tail is None else selection.tail,
    }


def nodes_of(job: Object) -> int:
    """Number of nodes that the job's ranks are on; 0 while nobody knows."""
    status = job.get("status", {})
    return int(job["spec"].get("nodes") or len((status.get("ranks") or {}).get("order") or []) or status.get("nodes") or 0)


def ranks_of_run(run: Object) -> Object:
    """Ranks of a run.json in the form of `status.ranks`, with `perNode` where the numbers of the nodes differ; {} for a file that doesn't
    say them.
    """
    nodes, each, differing = (run.get(key) for key in ("nodes", "ranksPerNode", "nodeRanks"))
    if isinstance(differing, list) and differing and all(is_count(count) and count > 0 for count in differing):
        return {"desired": sum(differing), "perNode": differing}
    return {"desired": nodes * each} if is_count(nodes) and is_count(each) and nodes * each else {}


def layout_of(ranks: Object, nodes: int) -> RankLayout:
    """Places of the ranks, by `status.ranks`; no rank while nobody knows."""
    counts = ranks.get("perNode") or _equal_counts(int(ranks.get("desired") or 0), nodes)
    order = ranks.get("order") or []
    return RankLayout(tuple(counts), tuple(order) if sorted(order) == list(range(len(counts))) else ())


def _equal_counts(desired: int, nodes: int) -> list[int]:
    """A job that is being resized has as many ranks as before, on another number of nodes than `nodes`."""
    each = max(1, desired // nodes) if nodes else 1
    return [min(each, desired - first) for first in range(0, desired if nodes else 0, each)]


def node_of_rank(layout: RankLayout, rank: int) -> int:
    """The node that has a rank. Raises ConfigError for a rank that the job hasn't got."""
    if not layout.world_size:
        raise ConfigError("the job has not started yet, so its ranks have no nodes yet: lockstep why says what it waits for")
    if rank >= layout.world_size:
        last = layout.world_size - 1
        raise ConfigError(f"there is no rank {rank}: the job has {f'{last + 1} ranks, 0 to {last}' if last else 'rank 0 only'}")
    return layout.node_of(rank)


def no_such_node(job: str, node: int, count: int) -> ConfigError:
    """Explain a node that a job of so many nodes hasn't got."""
    nodes = f"its {count} nodes are 0 to {count - 1}" if count > 1 else "it has node 0 only"
    return ConfigError(f"job {job} has no node {node}: {nodes}")


def ranks_of_node(layout: RankLayout, node: int) -> range:
    """The ranks that a node has; none while nobody knows."""
    return layout.ranks_of(node) if node < len(layout.counts) else range(0)


def of_rank(line: str, rank: int | None) -> bool:
    return rank is None or line.startswith(f"[rank {rank}] ")


def parse_duration(text: str) -> int:
    """`90s`, `10m`, `2h30m` or `1d`, as kubectl's --since. Raises ConfigError."""
    match = re.fullmatch(r"(\d+[smhd])+", text)
    if match is None:
        raise ConfigError(f"--since {text}: must be a time such as 90s, 10m, 2h30m or 1d")
    return sum(int(count) * _UNITS[unit] for count, unit in re.findall(r"(\d+)([smhd])", text))


class RankFailures:
    """Every rank that ended with an error, in the order in which node 0 heard of it: `failures`. A log of any length is read line by line.

    The last lines of node 0's own ranks stand before their end, those of the others after it.
    """

    def __init__(self) -> None:
        self.failures: list[RankFailure] = []
        self._attempt: int | None = None
        self._last_lines: dict[int, deque[str]] = {}

    def add(self, line: str) -> None:
        if begins := _BEGINS.match(line):
            self._attempt, self._last_lines = int(begins[1]), {}
        elif own := _RANK.match(line):
            rank = int(own[1])
            if rank in self._last_lines or len(self._last_lines) < OWN_RANKS_MAX:
                self._last_lines.setdefault(rank, deque(maxlen=LAST_LINES)).append(own[2][:LINE_CHARACTERS])
        elif ended := _ENDED.match(line):
            if len(self.failures) < FAILURES_MAX:
                rank = int(ended[1])
                self.failures.append(RankFailure(self._attempt, rank, int(ended[2]), ended[3], tuple(self._last_lines.get(rank, ()))))
        elif (repeated := _REPEATED.match(line)) and self.failures:
            last = self.failures[-1]
            if int(repeated[1]) == last.rank:
                lines = (*last.lines, repeated[2][:LINE_CHARACTERS])[-LAST_LINES:]
                self.failures[-1] = RankFailure(self._attempt, last.rank, last.node, last.how, lines)


def error_lines(failure: Object, failures: list[RankFailure]) -> Iterator[str]:
    """The first failure with its last lines, then the others of its attempt. `failure`: status.failure or its like; {}: nothing failed so
    far.
    """
    attempt = failures[-1].attempt if failures else None
    of_it = [one for one in failures if one.attempt == attempt]
    cause = failure.get("rank", of_it[0].rank if of_it else None)
    own = next((one for one in of_it if one.rank == cause), None)
    if failure:
        who = "" if cause is None else f"rank {cause} on node {failure.get('node', '?')} "
        message = str(failure.get("message", "")).removeprefix(who)
        yield f"first: {who}({failure.get('cause', 'Unknown')}): {message}"
    elif own is not None:
        yield f"first: {_how(own)}"
    lines = failure.get("lastLines") or (own.lines if own is not None else ())
    yield from (f"  | {line}" for line in lines)
    others = [one for one in of_it if one.rank != cause]
    for one in others[:SHOWN_RANKS]:
        yield f"then:  {_how(one)}"
        yield from (f"  | {line}" for line in one.lines)
    if len(others) > SHOWN_RANKS:
        yield f"then:  {len(others) - SHOWN_RANKS} more ranks; --rank N has the lines of one"


def _how(one: RankFailure) -> str:
    when = "" if one.attempt is None else f" in attempt {one.attempt}"
    return f"rank {one.rank} on node {one.node} {one.how}{when}"
