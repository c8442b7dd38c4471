"""Which failure was the first: the cause, not those who lost their peer by it."""

from __future__ import annotations

import re
from dataclasses import replace

from lockstep_gang.contract.exits import CONFIGURATION, MEANINGS, SILENCE_SECONDS
from lockstep_gang.contract.fabric import FaultKind
from lockstep_gang.contract.messages import Error, RankExit
from lockstep_gang.contract.report import Cause, Failure
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.causes import rank_cause
from lockstep_gang.lifecycle.fabric import explained, explained_hang, fault_kind, refusal
from lockstep_gang.lifecycle.gang import Gang, LostNode, Rank, failed_ranks, silent_success
from lockstep_gang.lifecycle.hang import hang_failure, stopped_rank
from lockstep_gang.lifecycle.progress import Hang
from lockstep_gang.lifecycle.start import late_ranks_failure

# What gloo, NCCL and TCPStore say in a rank that lost its peer.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process (exited|has terminated)|remote end closed"
    r"|unhandled system error|ncclRemoteError|ncclSystemError|failed to recv, got 0 bytes|peer .*(closed|gone)",
    re.IGNORECASE,
)
_BY_A_STOPPED_RANK = frozenset({Cause.FABRIC, Cause.INTERNAL, Cause.HANG})
"""What the other ranks fail with when one doesn't answer any more."""
# torch puts "[rank1]: " before every line of a traceback once a process group exists.
_EXCEPTION_LINE = re.compile(r"^(?:\[rank\d+\]: )?(?:[A-Za-z_][\w]*\.)*([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning))(?:: (.*))?$")


def first_failure(gang: Gang, run: Run) -> Failure:
    """The failure to name. By the order in which the signs came; whoever only lost a peer comes after everybody else."""
    if gang.late:
        return late_ranks_failure(gang, run)
    if gang.hang is not None:
        hung = explained_hang(hang_failure(gang, run, gang.hang), gang.fabric, run)
        return replace(hung, step=gang.trainer.step if gang.trainer is not None else None)
    step = gang.trainer.step if gang.trainer is not None else None
    refused = refusal(gang.fabric, run)
    if refused is not None:
        return replace(refused, step=step)
    lost_peer, failure = _most_telling(gang, run)
    if failure is None:
        return Failure(message="the attempt failed, and no rank or node says why", cause=Cause.INTERNAL, step=step)
    stopped = stopped_rank(gang)
    if stopped is not None and (lost_peer or failure.cause in _BY_A_STOPPED_RANK):
        failure = hang_failure(gang, run, Hang(stopped, 0, (stopped,)))
    return replace(failure, step=step)


def is_final(gang: Gang, run: Run) -> bool:
    """Another attempt would end the same way: Lockstep's trainer says that its configuration is at fault, the fabric is
    refused, or ranks never came."""
    if gang.late or refusal(gang.fabric, run) is not None:
        return True
    exits = (gang.ranks[rank].exit for rank in failed_ranks(gang, run))
    return run.training is not None and any(e is not None and e.exit_code == CONFIGURATION for e in exits)


def exception_of(lines: tuple[str, ...]) -> Error | None:
    """The exception of a Python traceback's last line, where a rank said nothing else."""
    for line in reversed(lines):
        match = _EXCEPTION_LINE.match(line.strip())
        if match:
            return Error(rank=0, exception=match[1], message=match[2] or "")
    return None


def _most_telling(gang: Gang, run: Run) -> tuple[int, Failure | None]:
    """The failure with the least `_blame`, of several the one whose sign came first; None: there is none. In a big gang all may have failed."""
    failed = set(failed_ranks(gang, run))
    ranks = [(rank.sign, index) for index, rank in enumerate(gang.ranks) if index in failed or rank.error is not None]
    lost = {lost.node: lost for lost in gang.lost}
    away = {index: LostNode(gang.nodes[index].closed_sign, index) for index in gang.nodes.away}
    signs: list[tuple[int, int | LostNode]] = [*ranks, *((how.sign, how) for how in {**away, **lost}.values())]
    best: tuple[int, Failure | None] = (len(FaultKind) + 1, None)
    for _, who in sorted(signs, key=lambda entry: entry[0]):
        failure = (
            _node_failure(who) if isinstance(who, LostNode) else _rank_failure(run, who, gang.ranks[who], silent_success(gang, run, who))
        )
        blame = 0 if isinstance(who, LostNode) else _blame(failure, gang)
        if blame < best[0]:
            best = blame, failure
        if blame == 0:
            break
    blame, first = best
    return blame, explained(first, gang.fabric, run) if first is not None and first.rank is not None else first


def _node_failure(lost: LostNode) -> Failure:
    text = f"node {lost.node} was lost: its agent ended or its connection closed, and its ranks with it"
    if lost.by_itself:
        text = f"node {lost.node} heard nothing from the coordinator for {SILENCE_SECONDS:.0f} s and stopped its ranks"
    return Failure(message=text, node=lost.node, cause=Cause.NODE_LOST)


def _blame(failure: Failure, gang: Gang) -> int:
    """0: it has a cause of its own; 1: its way to a peer broke; 2: it lost a peer. By NCCL's log, else by the words of its output."""
    kind = fault_kind(failure, gang.fabric)
    return list(FaultKind).index(kind) if kind is not None else 2 * _lost_peer(failure)


def _lost_peer(failure: Failure) -> bool:
    return bool(_LOST_PEER.search(failure.message) or any(_LOST_PEER.search(line) for line in failure.last_lines[-5:]))


def _rank_failure(run: Run, index: int, rank: Rank, silent: bool) -> Failure:
    exit_ = rank.exit if rank.exit is not None and not rank.exit.ordered else None
    lines = rank.exit.last_lines if rank.exit is not None else ()
    error = rank.error or (exit_.error if exit_ is not None else None) or exception_of(lines)
    said = f": {error.exception}: {error.message}" if error is not None else ""
    exit_code, signal = (exit_.exit_code, exit_.signal) if exit_ is not None else (None, None)
    exception = error.exception if error is not None else None
    return Failure(
        message=f"rank {index} on node {run.node_of(index)} {_how(exit_, run, silent)}{said}"[:1000],
        rank=index,
        node=run.node_of(index),
        exit_code=exit_code,
        signal=signal,
        exception=exception,
        cause=rank_cause(run.training is not None, exit_code, signal, exception, "\n".join((said, *lines))),
        last_lines=lines,
    )


def _how(exit_: RankExit | None, run: Run, silent: bool) -> str:
    if exit_ is None:
        return "failed"
    if exit_.signal is not None:
        hint = " (by the kernel when memory runs out, or by hand)" if exit_.signal == "SIGKILL" else ""
        return f"was ended by {exit_.signal}{hint}"
    if silent and exit_.exit_code == 0:
        return "exited with 0 without having reported the end of the training"
    meaning = MEANINGS.get(exit_.exit_code or 0) if run.training is not None else None
    return f"exited with {exit_.exit_code}" + (f" ({meaning})" if meaning else "")
