"""The first failure: the cause, not those who lost their peer by it."""

from __future__ import annotations

import re
from dataclasses import replace

from lockstep_gang.contract.fabric import FaultKind
from lockstep_gang.contract.messages import OutOfMemory, RankExit
from lockstep_gang.contract.placewords import PlaceWords, words_of
from lockstep_gang.contract.report import Cause, Failure
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import SILENCE_SECONDS
from lockstep_gang.contract.trouble import LOST_PEER
from lockstep_gang.lifecycle.causes import (
    NO_ROOM,
    blamable,
    is_killed,
    is_of_another_master,
    lacks_processes,
    rank_cause,
    remedy,
    signal_of,
    trainer_cause,
)
from lockstep_gang.lifecycle.fabric.state import explained_by_nccl, fault_kind, hang_explained_by_nccl, refusal
from lockstep_gang.lifecycle.gang import Gang, LostNode, Rank, failed_ranks, silent_success
from lockstep_gang.lifecycle.hang import STOPPED, hang_failure, ranks_apart, stopped_rank
from lockstep_gang.lifecycle.progress import Hang
from lockstep_gang.lifecycle.silences import open_silence_of, open_silences, silence_to_blame, silent_node_failure, with_interruption_said
from lockstep_gang.lifecycle.start import late_ranks_failure
from lockstep_gang.lifecycle.tracebacks import Raised, raised_in
from lockstep_spec.exits import MEANINGS, SAVED
from lockstep_spec.words import binary_size, named, number_of

SEEK_SECONDS = 3.0
"""Time for which a rank is waited for whose peers have failed for want of it."""
_LOST_A_PEER_BY_WORDS = frozenset({Cause.USER_CODE, Cause.INTERNAL, Cause.HANG})
"""Causes of failures that may be nothing but the loss of a peer; all others are causes of their own."""
_UNTELLING = frozenset({None, "RuntimeError", "Exception"})
"""Exceptions that say nothing; the rank's last lines tell why."""
_NO_OWN_MODULE = re.compile(r"^\S+: (Error while finding module specification for .*)?(?P<lack>No module named ['\w.]+)", re.MULTILINE)
"""Words of `python3 -m` for the module that it should run."""
_ARGUMENTS = re.compile(r"[^\s:]+: error: \S|Error: (No such option|Missing (option|argument)|Invalid value|Got unexpected)")
_NOT_FOUND = re.compile(r"FileNotFoundError|No module named")
_BY_A_STOPPED_RANK = frozenset({Cause.FABRIC, Cause.INTERNAL, Cause.HANG})
"""Causes with which the other ranks fail when one doesn't answer any more."""


def first_failure(gang: Gang, run: Run) -> Failure:
    """The failure to name, by the order in which the signs came; whoever only lost a peer comes after everybody else."""
    if gang.late:
        return late_ranks_failure(gang, run)
    if gang.hang is not None:
        hung = with_interruption_said(_hung(gang, run, gang.hang), gang, run)
        return replace(hung, step=gang.trainer.step if gang.trainer is not None else None)
    step = gang.trainer.step if gang.trainer is not None else None
    refused = refusal(gang.fabric, run)
    if refused is not None:
        return replace(refused, step=step)
    lost_peer, failure = _most_telling(gang, run)
    if failure is None:
        return Failure(message="the attempt failed, and no rank or node says why", cause=Cause.INTERNAL, step=step)
    if lost_peer and failure.rank is not None:
        failure = silence_to_blame(gang, run, gang.ranks[failure.rank].progress.since) or _ended_too_early(gang, run, failure) or failure
        failure = with_interruption_said(failure, gang, run)
    stopped = stopped_rank(gang)
    if stopped is not None and (lost_peer or failure.cause in _BY_A_STOPPED_RANK):
        failure = hang_failure(gang, run, Hang(stopped, 0, (stopped,)))
    own = gang.ranks[failure.rank].progress.step if failure.rank is not None else None
    return replace(failure, step=step if own is None else own)  # how far rank 0 came until it was stopped is chance


def _hung(gang: Gang, run: Run, hang: Hang) -> Failure:
    silent = silence_to_blame(gang, run, gang.ranks[hang.rank].progress.since)
    apart = ranks_apart(gang, run)
    if silent is not None and silent.cause is Cause.FABRIC and apart:  # it is over, and these were seen to keep the others waiting
        silent, hang = None, replace(hang, suspects=apart)
    return silent or _left_alone(gang, run, hang) or hang_explained_by_nccl(hang_failure(gang, run, hang), gang.fabric, run)


def _ended_too_early(gang: Gang, run: Run, lost_it: Failure) -> Failure | None:
    """A rank that was done, as it says, before the one that lost its peer; the first of them."""
    before = gang.ranks[lost_it.rank or 0].sign
    done = [
        (gang.ranks[index].sign, index) for index in gang.ranks.ended if _is_done(gang.ranks[index]) and gang.ranks[index].sign < before
    ]
    if not done:
        return None
    return _done_too_early(gang, run, min(done)[1], lost_it.message)


def _done_too_early(gang: Gang, run: Run, index: int, why: str) -> Failure:
    node, exit_ = run.node_of(index), gang.ranks[index].exit
    raised = raised_in(exit_.fresh_lines) if exit_ is not None else None
    wrote = (
        f" after it wrote {raised.exception}: {raised.first_line[:300]} (behind a pipe, such as to tee, its exit code is lost: set -o"
        " pipefail)"
        if raised
        else ""
    )
    text = f"rank {index} on node {node} exited with 0{wrote} while others still needed it: {why}"
    lines = exit_.last_lines if exit_ is not None else ()
    return Failure(message=text[:1000], rank=index, node=node, exit_code=0, cause=Cause.USER_CODE, last_lines=lines)


def _left_alone(gang: Gang, run: Run, hang: Hang) -> Failure | None:
    """The rank that was done first, where all others wait for each other or have given up: NCCL waits for ever for whom gloo finds gone."""
    done = [index for index in gang.ranks.ended if _is_done(gang.ranks[index])]
    waiting = gang.ranks[hang.rank]
    if not done or not (gang.dumps or waiting.exit) or not all(dump.waits_for_others and dump.state not in STOPPED for dump in gang.dumps):
        return None
    text = f"rank {hang.rank} on node {run.node_of(hang.rank)} waits: {waiting.progress.doing} has not ended"
    return _done_too_early(gang, run, done[0], text)


def with_cause_sought(gang: Gang, run: Run, now: float) -> Gang:
    """The gang with how long it waits for a cause. A rank that fails for want of its peer may be quicker than the peer, which still writes
    what it died of, and would be killed before it has.
    """
    new = gang.ranks.ended[gang.examined :]
    gang = replace(gang, examined=len(gang.ranks.ended), seeks_until=gang.seeks_until or now + SEEK_SECONDS)
    failed = [index for index in new if not _is_done(gang.ranks[index]) or silent_success(gang, run, index)]
    over = gang.lost or gang.nodes.away or open_silences(gang) or len(gang.ranks.ended) == len(gang.ranks)
    if over or any(_has_own_cause(gang, run, index) for index in failed):
        return replace(gang, seeks_until=min(gang.seeks_until, now))
    return gang


def _has_own_cause(gang: Gang, run: Run, index: int) -> bool:
    return not _blame(_rank_failure(run, index, gang.ranks[index], silent_success(gang, run, index)), gang, run)


def left_running(gang: Gang, run: Run) -> str:
    """Warning that a script's ranks left programs running, as one does that starts its training in the background; empty if none did."""
    left = [(exit_, name) for rank in gang.ranks if (exit_ := rank.exit) is not None for name in exit_.left] if run.training is None else []
    if not left:
        return ""
    ranks, names = sorted({exit_.rank for exit_, _ in left}), sorted({name for _, name in left})
    return (
        f"warning: {named('rank', ranks)} exited with 0 and left {number_of(len(left), 'program')} running ({', '.join(names)[:200]}),"
        " ended with the attempt: a script has to wait for what it starts (no nohup, & or daemon)"
    )


def _is_done(rank: Rank) -> bool:
    return rank.exit is not None and not rank.exit.ordered and rank.exit.exit_code == 0


def is_final(gang: Gang, run: Run) -> bool:
    """Return True if another attempt would end the same way: Lockstep's trainer says that its configuration is at fault, the fabric is
    refused, or ranks never came."""
    if gang.late or refusal(gang.fabric, run) is not None:
        return True
    if run.training is None:
        return False
    return any(_decided(gang.ranks[rank]) is Cause.CONFIGURATION for rank in _ranks_with_signs(gang, run))


def _most_telling(gang: Gang, run: Run) -> tuple[int, Failure | None]:
    """The failure with the least `_blame`, of several the one whose sign came first; None: there is none. In a big gang all may have
    failed.
    """
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
        blame = 0 if isinstance(who, LostNode) else _blame(failure, gang, run)
        if blame < best[0]:
            best = blame, failure
        if blame == 0:
            break
    blame, first = best
    if blame:
        own = _raised_before_it_was_stopped(gang, run)
        blame, first = (0, own) if own is not None else best
    return blame, explained_by_nccl(first, gang.fabric, run) if first is not None and first.rank is not None else first


def _raised_before_it_was_stopped(gang: Gang, run: Run) -> Failure | None:
    """Failure of the rank that had written its own exception when it was stopped: it takes longer to end than its peers take to notice."""
    for index in sorted(gang.ranks.ended):
        rank = gang.ranks[index]
        if rank.exit is not None and rank.exit.ordered and raised_in(rank.exit.fresh_lines) is not None:
            failure = _rank_failure(run, index, rank, silent=False)
            if not _blame(failure, gang, run):
                return failure
    return None


def _ranks_with_signs(gang: Gang, run: Run) -> list[int]:
    """Ranks that failed, and those that reported an error and were stopped before their own exit."""
    failed = set(failed_ranks(gang, run))
    return [index for index, rank in enumerate(gang.ranks) if index in failed or rank.error is not None]


def _decided(rank: Rank) -> Cause | None:
    """Cause that Lockstep's trainer gives for its end on this rank."""
    exit_code = rank.exit.exit_code if rank.exit is not None and not rank.exit.ordered else None
    return trainer_cause(exit_code, rank.error.exception if rank.error is not None else None)


def _node_failure(gang: Gang, run: Run, lost: LostNode) -> Failure:
    silence = open_silence_of(gang, lost.node)
    if silence is not None:
        return silent_node_failure(silence, run)
    who, coordinator = run.node_name(lost.node), run.node_name(0)
    if not lost.by_itself:
        text = f"{who} was lost: its agent ended or its connection closed, and its ranks with it"
    elif gang.paused_seconds > SILENCE_SECONDS / 2:
        text = (
            f"the coordinator on {coordinator} did not run for {gang.paused_seconds:.0f} s: its agent was stopped, or its machine froze; "
            f"{who} heard nothing and stopped its ranks"
        )
        return Failure(message=text, node=0, cause=Cause.NODE_LOST)
    else:
        text = (
            f"{who} heard nothing from the coordinator on {coordinator} for {SILENCE_SECONDS:.0f} s and stopped its ranks: the network"
            " between the two was broken, or one of the machines froze"
        )
    return Failure(message=text, node=lost.node, cause=Cause.NODE_LOST)


def _blame(failure: Failure, gang: Gang, run: Run) -> int:
    """Rank of the failure: 0: it has a cause of its own; 1: its way to a peer broke, or a script gave up waiting for one; 2: it lost a
    peer.

    By NCCL's log, else by what it raised, else by its last words. The trainer's ranks have looked for themselves who keeps them waiting.
    """
    kind = fault_kind(failure, gang.fabric)
    if kind is not None:
        return list(FaultKind).index(kind)
    if failure.cause is Cause.HANG and run.training is None:
        return 1
    if failure.cause is Cause.FABRIC:
        return 2
    if failure.cause not in _LOST_A_PEER_BY_WORDS:
        return 0
    exit_ = gang.ranks[failure.rank].exit if failure.rank is not None else None
    lines = exit_.fresh_lines[-5:] if exit_ is not None and failure.exception in _UNTELLING else ()
    return 2 * any(LOST_PEER.search(line) for line in (failure.message, *lines))


def _rank_failure(run: Run, index: int, rank: Rank, silent: bool) -> Failure:
    exit_ = rank.exit if rank.exit is not None and not rank.exit.ordered else None
    lines, fresh = (rank.exit.last_lines, rank.exit.fresh_lines) if rank.exit is not None else ((), ())
    exit_code, signal = (exit_.exit_code, exit_.signal) if exit_ is not None else (None, None)
    raised = _raised(rank, fresh)
    memory, place = exit_.out_of_memory if exit_ is not None else None, words_of(run)
    cause = rank_cause(run.training is not None, exit_code, signal, raised, "\n".join(fresh))
    words = "\n".join(each.words for each in blamable(raised)) if raised is not None else "\n".join(fresh)
    advice = remedy(words, place)
    if raised is not None and is_of_another_master(raised.words, run.addresses):
        cause, advice = Cause.SETUP, "; that is not the MASTER_ADDR of this job: leave the variable as Lockstep sets it"
    elif exit_ is not None and lacks_processes(words, "\n".join(fresh)):
        limit = f"{exit_.process_limit}: " if exit_.process_limit else ""
        advice = f"; no more processes or threads could be made there: {limit}{place.more_processes}"
    elif exit_ is not None and exit_.no_room and NO_ROOM.search(f"{words} {exit_.how} {signal_of(exit_code)}"):
        cause, advice = Cause.OUT_OF_MEMORY if "/dev/shm" in exit_.no_room else cause, f"; {exit_.no_room}"  # noqa: S108 (a word)
    elif exit_ is not None and exit_.elsewhere and _NOT_FOUND.search(words if raised is not None else "".join(fresh[-1:])):
        cause, advice = Cause.CONFIGURATION, f"; {exit_.elsewhere}"
    elif raised is None and (module := _NO_OWN_MODULE.search(words)):
        advice = (
            f": {module['lack']}: python3 -m looks in {run.working_directory}, where ranks work (script.folder), in PYTHONPATH and in what"
            " is installed"
        )
    text = (
        f"rank {index} on node {run.node_of(index)}"
        f" {_how(exit_, run, silent)}{_for_memory(memory, place)}{_exception_words(raised) or _argument_words(exit_, fresh)}"
    )
    return Failure(
        message=text[: 1000 - len(advice)].removesuffix("." if advice else "") + advice,
        rank=index,
        node=run.node_of(index),
        exit_code=exit_code,
        signal=signal,
        exception=raised.exception if raised is not None else None,
        cause=Cause.OUT_OF_MEMORY if memory else cause,
        last_lines=lines,
    )


def _raised(rank: Rank, fresh: tuple[str, ...]) -> Raised | None:
    """Exception in the rank's own report, with what its output says led to it. A rank that somebody killed has not ended by what it wrote
    before.
    """
    exit_ = rank.exit
    error = rank.error or (exit_.error if exit_ is not None and not exit_.ordered else None)
    written = raised_in(fresh)
    if error is not None:
        led_by = written.led_by if written is not None and written.exception == error.exception else ()
        return Raised(error.exception, error.message, led_by)
    return None if exit_ is not None and not exit_.ordered and is_killed(exit_.signal) and not _interrupted(written) else written


def _interrupted(written: Raised | None) -> bool:
    """Return True for SIGINT, whose exception is Python's own."""
    return written is not None and written.exception == "KeyboardInterrupt"


def _exception_words(raised: Raised | None) -> str:
    """Words of the exception, and of those that it is judged by: `: RuntimeError: no batch; from OSError: [Errno 5] …`."""
    if raised is None:
        return ""
    led_by = [each for each in blamable(raised) if each is not raised and not each.is_of_a_child]
    others = [each for each in led_by if each.words != raised.words and each.message not in raised.message]
    by = [f"; {'from' if each.explicit else 'while handling'} {each.exception}: {each.first_line[:300]}" for each in others[:2]]
    return f": {raised.exception}: {raised.first_line[: 300 if raised.is_of_a_child else None]}{''.join(by)}"


def _argument_words(exit_: RankExit | None, fresh: tuple[str, ...]) -> str:
    """Words of argparse and its like about arguments that the script doesn't take: `: train.py: error: unrecognized arguments:
    --no-such=1`.
    """
    last = fresh[-1].strip() if exit_ is not None and exit_.exit_code == 2 and fresh else ""
    return f": {last}" if _ARGUMENTS.match(last) else ""


def _for_memory(memory: OutOfMemory | None, place: PlaceWords) -> str:
    if memory is None:
        return ""
    limit = f"{place.memory_limit} {binary_size(memory.limit_bytes)}" if memory.limit_bytes else "the machine's memory was used up"
    had = f", of which this rank used {binary_size(memory.rank_bytes)} at its peak" if memory.rank_bytes else ""
    return f": the kernel killed a process because host memory ran out: {limit}{had}"


def _signal_hints(place: PlaceWords) -> dict[str, str]:
    return {
        "SIGKILL": " (by the kernel when memory runs out, or by hand)",
        "SIGBUS": (
            f" (most often because shared memory, /dev/shm, is full: {place.more_shared_memory}; a mapped file that became shorter ends a"
            " rank so, too)"
        ),
        "SIGILL": " (an instruction that this CPU doesn't have: a library was built for another one)",
        "SIGXCPU": " (a limit of CPU time: ulimit -t)",
        "SIGXFSZ": " (a limit of a file's size: ulimit -f)",
        "SIGSYS": " (a system call that a seccomp profile forbids)",
    }


def _how(exit_: RankExit | None, run: Run, silent: bool) -> str:
    if exit_ is None:
        return "failed"
    hints = _signal_hints(words_of(run)) if exit_.out_of_memory is None and not exit_.no_room else {}
    if exit_.signal is not None:
        return f"{exit_.how}{hints.get(exit_.signal, '')}"
    if silent and exit_.exit_code == 0:
        return "exited with 0 without reporting the end of training"
    how = exit_.how
    if run.training is not None:
        meaning = MEANINGS.get(exit_.exit_code or 0)
        if exit_.exit_code == SAVED:
            meaning = "saved and stopped after a SIGTERM that Lockstep did not send"
        return f"{how} ({meaning})" if meaning else how
    signal = signal_of(exit_.exit_code)
    return f"{how}, as a script does after its program was ended by {signal}{hints.get(signal, '')}" if signal else how
