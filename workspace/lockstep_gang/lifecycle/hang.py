"""Hangs of ranks, and which rank the others wait for (pure). Never by utilization: ranks that wait for others spin.

A rank is judged by its own limit where it tells one (Lockstep's trainer does, and ends itself; this is for one that can't any more: it is
frozen, or its interpreter is held by native code), else by the run's limit for its activity, from its first reported step on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from lockstep_gang.contract.messages import Dumped
from lockstep_gang.contract.report import Cause, Failure
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import progress_seconds
from lockstep_gang.lifecycle.gang import Gang, Rank
from lockstep_gang.lifecycle.progress import Hang, Progress, shifted
from lockstep_spec.words import listed, named

SLACK_SECONDS = (5.0, 15.0)
"""Least and most time beyond its limit for a rank with a watchdog of its own; half the limit in between. It knows more than we do."""
SILENT_SECONDS = 12.0
"""Silence from which on a rank doesn't run any more. It beats every 5 s, and its agent reports that within 5 s, or somewhat later in a big
gang.
"""
STOPPED = frozenset({"T", "t"})
_AT_ITS_END = "_shutdown (threading.py:"
"""Place of the main thread, which waits for the other ones, once the script has ended, whether it failed or not."""


def overdue_hang(gang: Gang, run: Run, now: float) -> tuple[Gang, Hang | None]:
    """The hang of the rank whose time was up first. All ranks are looked at only when the time of one of them may be up, which the gang
    remembers.
    """
    if now < gang.in_time_until:
        return gang, None
    at, rank = min(((at, rank) for rank, at in deadlines(gang, run, range(len(gang.ranks)))), default=(math.inf, 0))
    if at > now:
        return replace(gang, in_time_until=at), None
    return gang, Hang(rank, _limit(gang.ranks[rank].progress, run) or 0, suspects(gang, now))


def with_deadlines_of(gang: Gang, run: Run, ranks: Iterable[int]) -> Gang:
    """The gang after these ranks have moved, or their node has come back: the limit of what they are in now may be shorter."""
    at = min((at for _, at in deadlines(gang, run, ranks)), default=math.inf)
    return gang if at >= gang.in_time_until else replace(gang, in_time_until=at)


def watchdog_hang(gang: Gang, rank: int, now: float) -> Hang:
    """The hang that a rank's own watchdog has ended it for."""
    error, progress = gang.ranks[rank].error, gang.ranks[rank].progress
    return Hang(rank, progress.limit_seconds or 0, suspects(gang, now), error.message if error is not None else "")


def with_pause(gang: Gang, seconds: float) -> Gang:
    """The gang after this process itself didn't run for so long: what ranks said in that time is still to be read."""
    ranks = {index: replace(rank, progress=shifted(rank.progress, seconds)) for index, rank in enumerate(gang.ranks)}
    paused = max(seconds, gang.paused_seconds)
    return replace(with_reconnects_extended(gang, seconds).with_ranks(ranks), stop_began=gang.stop_began + seconds, paused_seconds=paused)


def with_reconnects_extended(gang: Gang, seconds: float) -> Gang:
    """The gang with so much longer for nodes whose connection has closed: nobody could have been heard in that time."""
    away = {index: gang.nodes[index] for index in gang.nodes.away}
    nodes = {index: replace(node, closed_at=node.closed_at + seconds) for index, node in away.items() if node.closed_at is not None}
    return gang.with_nodes(nodes) if nodes else gang


def suspects(gang: Gang, now: float) -> tuple[int, ...]:
    """Ranks that the others wait for: those not heard of any more, else those furthest back. Empty when all are equally far."""
    running = dict(_running(gang))
    if len(running) == 1:
        return tuple(running)
    heard = {rank: state.progress for rank, state in running.items() if state.progress.heard_at}
    return _silent(heard, now, len(gang.ranks)) or _furthest_back(heard)


def deadlines(gang: Gang, run: Run, ranks: Iterable[int]) -> Iterator[tuple[int, float]]:
    """(rank, when its time is up) for those of `ranks` that are judged."""
    if run.interactive is not None:
        return  # somebody watches, or debugs
    late = progress_seconds(run.world_size)
    for rank in ranks:
        progress = gang.ranks[rank].progress
        limit = _limit(progress, run) if gang.ranks[rank].exit is None else None
        if limit is not None and gang.nodes[run.node_of(rank)].connected:  # else the node is what is judged
            yield rank, progress.since + limit + _slack(progress, late)


def _running(gang: Gang) -> Iterator[tuple[int, Rank]]:
    return ((rank, state) for rank, state in enumerate(gang.ranks) if state.exit is None)


def _limit(progress: Progress, run: Run) -> int | None:
    if progress.position is not None:
        return progress.limit_seconds
    return run.timeouts.of_activity(progress.activity) if progress.step is not None else None


def _slack(progress: Progress, late: float) -> float:
    """Seconds beyond the limit. `late`: how long its reports may wait for each other."""
    if progress.position is None or progress.limit_seconds is None:
        return 0.0 if late <= SLACK_SECONDS[0] else late
    return max(SLACK_SECONDS[0], late, min(progress.limit_seconds / 2, SLACK_SECONDS[1]))


def _silent(heard: Mapping[int, Progress], now: float, ranks: int) -> tuple[int, ...]:
    if any(progress.position is None for progress in heard.values()):
        return ()
    longest = SILENT_SECONDS + max(0.0, progress_seconds(ranks) - SLACK_SECONDS[0])
    silent = tuple(rank for rank, progress in heard.items() if now - progress.heard_at > longest)
    return silent if len(silent) < len(heard) else ()


def _furthest_back(heard: Mapping[int, Progress]) -> tuple[int, ...]:
    with_beats = all(progress.position is not None for progress in heard.values())
    reached = {rank: p.position if with_beats else p.step for rank, p in heard.items()}
    places = {rank: at for rank, at in reached.items() if at is not None}
    least = min(places.values(), default=0)
    last = tuple(rank for rank, at in places.items() if at == least)
    return last if len(last) < len(places) else ()


def stopped_rank(gang: Gang) -> int | None:
    """A rank whose process was found stopped: the others could only lose it or wait for it."""
    return next((dump.rank for dump in gang.dumps if dump.state in STOPPED), None)


def ranks_apart(gang: Gang, run: Run) -> tuple[int, ...]:
    """Ranks that were seen stopped, or elsewhere than in a collective operation, unless all ranks were: these keep the others waiting."""
    stopped = tuple(dump.rank for dump in gang.dumps if dump.state in STOPPED or dump.state == "D")
    apart = tuple(dump.rank for dump in gang.dumps if dump.at and not dump.waits_for_others)
    seen = gang.dumps if run.gpus_per_node else gang.ranks  # the main thread of a backward pass on GPUs is in no collective operation
    return stopped or (apart if len(apart) < len(seen) else ())


def hang_failure(gang: Gang, run: Run, hang: Hang) -> Failure:
    """The failure in words; what was seen of the ranks before they were killed has the last one."""
    dumps = {dump.rank: dump for dump in gang.dumps}
    blamed = _blamed(hang, dumps)
    shown = blamed[0] if blamed else hang.rank
    progress, dump = gang.ranks[shown].progress, dumps.get(shown)
    limit = f" within {hang.limit_seconds} s" if hang.limit_seconds else ""
    text = f"{_who(blamed, run, dumps)}: {progress.doing} has not ended{limit}{dump_text(dump)}"
    if hang.words and not blamed:
        text += f"; rank {hang.rank} says: {hang.words}"
    stacks, exit_ = dump.stacks if dump is not None else None, gang.ranks[shown].exit if blamed else None
    where = f"; stacks of all its threads are in {stacks}" if stacks else ""
    return Failure(
        message=f"{text[:800]}{where}"[:1000],
        rank=blamed[0] if blamed else None,
        node=run.node_of(blamed[0]) if blamed else None,
        activity=progress.doing,
        stacks=stacks,
        cause=Cause.HANG,
        last_lines=exit_.last_lines if exit_ is not None else (),
    )


def _blamed(hang: Hang, dumps: Mapping[int, Dumped]) -> tuple[int, ...]:
    """A stopped process, else those furthest back, else the ones not in a collective operation while others are."""
    stopped = tuple(rank for rank, dump in dumps.items() if dump.state in STOPPED)
    alone = tuple(dumps) == hang.suspects and len(dumps) == 1 and dumps[hang.suspects[0]].waits_for_others  # as those that gave up did
    if stopped or (hang.suspects and not alone):
        return stopped or hang.suspects
    located = {rank: dump for rank, dump in dumps.items() if dump.at}
    apart = tuple(rank for rank, dump in located.items() if not dump.waits_for_others)
    return apart if len(apart) < len(located) else ()


def _who(blamed: tuple[int, ...], run: Run, dumps: Mapping[int, Dumped]) -> str:
    if not blamed and dumps and all(dump.waits_for_others for dump in dumps.values()):
        network = f"what hangs is {'a GPU or ' if run.gpus_per_node else ''}the network between them"
        places = [f"rank {dump.rank} in {dump.at}" for dump in dumps.values()]
        if len({dump.at for dump in dumps.values()}) > 1:
            return (
                f"every rank waits for the others, at different places ({listed(places)}): they don't make the same calls in the same"
                f" order, or {network}"
            )
        return f"every rank waits for the others, so {network}"
    if not blamed:
        return "no rank makes progress, and none is behind the others"
    nodes = sorted({run.node_of(rank) for rank in blamed})
    return f"{named('rank', blamed)} on {named('node', nodes)} {'hangs' if len(blamed) == 1 else 'hang'}"


def dump_text(dump: Dumped | None) -> str:
    """Words about what was seen of a rank, to follow its progress."""
    if dump is None:
        return ""
    kernel = f", in the kernel's {dump.kernel_function}" if dump.kernel_function else ""
    if dump.state in STOPPED:
        return f"; its process is stopped (state {dump.state}): somebody sent it SIGSTOP, or a debugger holds it"
    if dump.state == "D":
        return f"; its process can't be interrupted (state D{kernel}): a device or a volume doesn't answer"
    if dump.at.startswith(_AT_ITS_END):
        return f"; its script has ended, and one of its threads that is not a daemon keeps the process (it is in {dump.at})"
    return f"; it is in {dump.at}" if dump.at else ""
