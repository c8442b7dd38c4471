"""Which failure was the first: the cause, not those who lost their peer by it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from lockstep_gang.contract.exits import MEANINGS, SILENCE_SECONDS
from lockstep_gang.contract.fabric import FaultKind
from lockstep_gang.contract.messages import Error, OutOfMemory, RankExit
from lockstep_gang.contract.report import Cause, Failure
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.causes import (
    ANY_EXCEPTION_LINE,
    EXCEPTION_LINE,
    FRAME_LINE,
    INSIDE_TRACEBACK,
    rank_cause,
    remedy,
    trainer_cause,
)
from lockstep_gang.lifecycle.fabric import explained, explained_hang, fault_kind, refusal
from lockstep_gang.lifecycle.gang import Gang, LostNode, Rank, failed_ranks, silent_success
from lockstep_gang.lifecycle.hang import hang_failure, stopped_rank
from lockstep_gang.lifecycle.progress import Hang
from lockstep_gang.lifecycle.silences import instead, named, of_node
from lockstep_gang.lifecycle.silences import lost as lost_in_silence
from lockstep_gang.lifecycle.start import late_ranks_failure

# What gloo, NCCL and TCPStore say in a rank that lost its peer.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process (exited|has terminated)|remote end closed"
    r"|unhandled system error|ncclRemoteError|ncclSystemError|failed to recv, got 0 bytes|peer .*(closed|gone)",
    re.IGNORECASE,
)
_BY_A_STOPPED_RANK = frozenset({Cause.FABRIC, Cause.INTERNAL, Cause.HANG})
"""What the other ranks fail with when one doesn't answer any more."""


def first_failure(gang: Gang, run: Run) -> Failure:
    """The failure to name. By the order in which the signs came; whoever only lost a peer comes after everybody else."""
    if gang.late:
        return late_ranks_failure(gang, run)
    if gang.hang is not None:
        since = gang.ranks[gang.hang.rank].progress.since
        hung = instead(gang, run, since) or explained_hang(hang_failure(gang, run, gang.hang), gang.fabric, run)
        return replace(hung, step=gang.trainer.step if gang.trainer is not None else None)
    step = gang.trainer.step if gang.trainer is not None else None
    refused = refusal(gang.fabric, run)
    if refused is not None:
        return replace(refused, step=step)
    lost_peer, failure = _most_telling(gang, run)
    if failure is None:
        return Failure(message="the attempt failed, and no rank or node says why", cause=Cause.INTERNAL, step=step)
    if lost_peer and failure.rank is not None:
        failure = instead(gang, run, gang.ranks[failure.rank].progress.since) or _ended_too_early(gang, run, failure) or failure
    stopped = stopped_rank(gang)
    if stopped is not None and (lost_peer or failure.cause in _BY_A_STOPPED_RANK):
        failure = hang_failure(gang, run, Hang(stopped, 0, (stopped,)))
    return replace(failure, step=step)


def _ended_too_early(gang: Gang, run: Run, lost_it: Failure) -> Failure | None:
    """A rank that was done, as it says, before the one that lost its peer; the first of them."""
    before = gang.ranks[lost_it.rank or 0].sign
    done = [
        (gang.ranks[index].sign, index) for index in gang.ranks.ended if _is_done(gang.ranks[index]) and gang.ranks[index].sign < before
    ]
    if not done:
        return None
    index = min(done)[1]
    text = f"rank {index} on node {run.node_of(index)} exited with 0 while others still needed it: {lost_it.message}"
    return Failure(
        message=text[:1000], rank=index, node=run.node_of(index), exit_code=0, cause=Cause.USER_CODE, last_lines=lost_it.last_lines
    )


def _is_done(rank: Rank) -> bool:
    return rank.exit is not None and not rank.exit.ordered and rank.exit.exit_code == 0


def is_final(gang: Gang, run: Run) -> bool:
    """Another attempt would end the same way: Lockstep's trainer says that its configuration is at fault, the fabric is
    refused, or ranks never came."""
    if gang.late or refusal(gang.fabric, run) is not None:
        return True
    if run.training is None:
        return False
    return any(_decided(gang.ranks[rank]) is Cause.CONFIGURATION for rank in _ranks_with_signs(gang, run))


def exception_of(lines: tuple[str, ...]) -> Error | None:
    """The exception of the last Python traceback, where a rank said nothing else."""
    return next(reversed([*exceptions_of(lines)]), None)


def exceptions_of(lines: tuple[str, ...]) -> Iterator[Error]:
    """Those of all tracebacks, in their order: an exception's cause comes before it."""
    inside = False
    for line in lines:
        if FRAME_LINE.match(line):
            inside = True
        elif not (inside and INSIDE_TRACEBACK.match(line)):
            match = (ANY_EXCEPTION_LINE if inside else EXCEPTION_LINE).match(line.strip())
            inside = False
            if match:
                yield Error(rank=0, exception=match[1], message=match[2] or "")


def _most_telling(gang: Gang, run: Run) -> tuple[int, Failure | None]:
    """The failure with the least `_blame`, of several the one whose sign came first; None: there is none. In a big gang all may have failed."""
    ranks = [(gang.ranks[index].sign, index) for index in _ranks_with_signs(gang, run)]
    lost = {lost.node: lost for lost in gang.lost}
    away = {index: LostNode(gang.nodes[index].closed_sign, index) for index in gang.nodes.away}
    signs: list[tuple[int, int | LostNode]] = [*ranks, *((how.sign, how) for how in {**away, **lost}.values())]
    best: tuple[int, Failure | None] = (len(FaultKind) + 1, None)
    for _, who in sorted(signs, key=lambda entry: entry[0]):
        failure = (
            _node_failure(gang, run, who)
            if isinstance(who, LostNode)
            else _rank_failure(run, who, gang.ranks[who], silent_success(gang, run, who))
        )
        blame = 0 if isinstance(who, LostNode) else _blame(failure, gang)
        if blame < best[0]:
            best = blame, failure
        if blame == 0:
            break
    blame, first = best
    if blame:
        own = _raised_before_it_was_stopped(gang, run)
        blame, first = (0, own) if own is not None else best
    return blame, explained(first, gang.fabric, run) if first is not None and first.rank is not None else first


def _raised_before_it_was_stopped(gang: Gang, run: Run) -> Failure | None:
    """Of the rank that had written its own exception when it was stopped: it takes longer to end than its peers take to notice."""
    for index in sorted(gang.ranks.ended):
        rank = gang.ranks[index]
        if rank.exit is not None and rank.exit.ordered and exception_of(rank.exit.fresh_lines) is not None:
            failure = _rank_failure(run, index, rank, silent=False)
            if not _blame(failure, gang):
                return failure
    return None


def _ranks_with_signs(gang: Gang, run: Run) -> list[int]:
    """Ranks that failed, and those that reported an error and were stopped before their own exit."""
    failed = set(failed_ranks(gang, run))
    return [index for index, rank in enumerate(gang.ranks) if index in failed or rank.error is not None]


def _decided(rank: Rank) -> Cause | None:
    """What Lockstep's trainer says of its end on this rank."""
    exit_code = rank.exit.exit_code if rank.exit is not None and not rank.exit.ordered else None
    return trainer_cause(exit_code, rank.error.exception if rank.error is not None else None)


def _node_failure(gang: Gang, run: Run, lost: LostNode) -> Failure:
    silence = of_node(gang, lost.node)
    if silence is not None:
        return lost_in_silence(silence, run)
    who, coordinator = named(lost.node, run), named(0, run)
    if not lost.by_itself:
        text = f"{who} was lost: its agent ended or its connection closed, and its ranks with it"
    elif gang.paused_seconds > SILENCE_SECONDS / 2:
        text = (
            f"the coordinator on {coordinator} did not run for {gang.paused_seconds:.0f} s: its agent was stopped, or its machine stood still; "
            f"{who} heard nothing and stopped its ranks"
        )
        return Failure(message=text, node=0, cause=Cause.NODE_LOST)
    else:
        text = (
            f"{who} heard nothing from the coordinator on {coordinator} for {SILENCE_SECONDS:.0f} s and stopped its ranks: the network between "
            "the two was broken, or one of the machines stood still"
        )
    return Failure(message=text, node=lost.node, cause=Cause.NODE_LOST)


def _blame(failure: Failure, gang: Gang) -> int:
    """0: it has a cause of its own; 1: its way to a peer broke; 2: it lost a peer. By NCCL's log, else by the words of its output."""
    kind = fault_kind(failure, gang.fabric)
    if kind is not None:
        return list(FaultKind).index(kind)
    exit_ = gang.ranks[failure.rank].exit if failure.rank is not None else None
    if exit_ is not None and exit_.out_of_memory is not None:
        return 0
    lines = exit_.fresh_lines[-5:] if exit_ is not None else ()
    return 2 * any(_LOST_PEER.search(line) for line in (failure.message, *lines))


def _rank_failure(run: Run, index: int, rank: Rank, silent: bool) -> Failure:
    exit_ = rank.exit if rank.exit is not None and not rank.exit.ordered else None
    lines, fresh = (rank.exit.last_lines, rank.exit.fresh_lines) if rank.exit is not None else ((), ())
    error = rank.error or (exit_.error if exit_ is not None else None) or exception_of(fresh)
    memory = exit_.out_of_memory if exit_ is not None else None
    said = f": {error.exception}: {error.message}" if error is not None else ""
    exit_code, signal = (exit_.exit_code, exit_.signal) if exit_ is not None else (None, None)
    exception = error.exception if error is not None else None
    raised = (
        "\n".join((said, *(f"{cause.exception}: {cause.message}" for cause in exceptions_of(fresh))))
        if error is not None
        else "\n".join(fresh)
    )
    advice = remedy(raised)
    message = f"rank {index} on node {run.node_of(index)} {_how(exit_, run, silent)}{_for_memory(memory)}{said}"[: 1000 - len(advice)]
    return Failure(
        message=(message.removesuffix(".") + advice) if advice else message,
        rank=index,
        node=run.node_of(index),
        exit_code=exit_code,
        signal=signal,
        exception=exception,
        cause=Cause.OUT_OF_MEMORY
        if memory
        else rank_cause(run.training is not None, exit_code, signal, exception, raised, "\n".join((said, *fresh))),
        last_lines=lines,
    )


def _for_memory(memory: OutOfMemory | None) -> str:
    if memory is None:
        return ""
    limit = (
        f"its container has reached its limit of {_gib(memory.limit_bytes)}" if memory.limit_bytes else "the machine's memory was used up"
    )
    had = f", of which this rank had {_gib(memory.rank_bytes)} at its most" if memory.rank_bytes else ""
    return f", since the kernel killed a process for want of host memory: {limit}{had}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


_SIGNAL_HINTS = {
    "SIGKILL": " (by the kernel when memory runs out, or by hand)",
    "SIGBUS": " (shared memory, /dev/shm, is full most often: a larger shm_size of the cluster, or fewer workers)",
}


def _how(exit_: RankExit | None, run: Run, silent: bool) -> str:
    if exit_ is None:
        return "failed"
    if exit_.signal is not None:
        hint = _SIGNAL_HINTS.get(exit_.signal, "") if exit_.out_of_memory is None else ""
        return f"was ended by {exit_.signal}{hint}"
    if silent and exit_.exit_code == 0:
        return "exited with 0 without having reported the end of the training"
    meaning = MEANINGS.get(exit_.exit_code or 0) if run.training is not None else None
    return f"exited with {exit_.exit_code}" + (f" ({meaning})" if meaning else "")
