"""Observations: an agent's message, or the loss of its connection, taken into the gang's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep_gang.contract.messages import (
    Activity,
    AgentMessage,
    Checkpoint,
    Dumped,
    End,
    Error,
    Evaluate,
    Exited,
    FabricSeen,
    Hello,
    Leaving,
    Pace,
    Progressed,
    RankExit,
    RankReport,
    RankState,
    Reported,
    SaveFailed,
    Started,
    Step,
    Stopped,
    Wish,
    known_reports,
)
from lockstep_gang.contract.preflight import Checked
from lockstep_gang.contract.report import CheckpointReport, FailedSaves, Metric, TrainerReport
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import stamp
from lockstep_gang.lifecycle.budget import with_downtime_ended, with_resumed_from, with_step_reached
from lockstep_gang.lifecycle.fabric.state import after_step, with_ranks_heard
from lockstep_gang.lifecycle.gang import Gang, LostNode, Node, Phase, Rank, Silence, told_to_start, was_stopped
from lockstep_gang.lifecycle.goodput import accounted_now_and_then, with_step
from lockstep_gang.lifecycle.hang import STOPPED, with_deadlines_of
from lockstep_gang.lifecycle.losses import with_machine_heard
from lockstep_gang.lifecycle.preflight.rounds import with_answer
from lockstep_gang.lifecycle.progress import progress_after, shifted
from lockstep_gang.lifecycle.session import with_wish
from lockstep_gang.lifecycle.silences import open_silence_of, with_silence, with_silence_over, without_silence
from lockstep_gang.lifecycle.stragglers import with_sample, with_stragglers_now_and_then


def observe(gang: Gang, run: Run, node: int, message: AgentMessage, now: float) -> Gang:  # noqa: PLR0911 (one return a kind of message)
    """The gang after `message` of `node`. What belongs to another attempt changes nothing. Raises ContractError for a malformed report."""
    gang = accounted_now_and_then(gang, run, now)
    if isinstance(message, Hello):
        return _hello(gang, run, node, message, now)
    if isinstance(message, Checked):
        return replace(gang, preflight=with_answer(gang.preflight, node, message, now))
    if isinstance(message, Wish):
        return with_wish(gang, run, node, message, now)
    if isinstance(message, Leaving):
        return gang.with_node(node, replace(gang.nodes[node], leaving=True))
    if isinstance(message, Stopped) and message.attempt == gang.nodes[node].attempt:
        return gang.with_node(node, replace(gang.nodes[node], attempt=0, stuck=False))
    if isinstance(message, (Started, Reported, Progressed, FabricSeen, Dumped, Exited)) and message.attempt == gang.attempt:
        return _of_the_attempt(gang, run, node, message, now)
    return gang


def _of_the_attempt(
    gang: Gang, run: Run, node: int, message: Started | Reported | Progressed | FabricSeen | Dumped | Exited, now: float
) -> Gang:
    if isinstance(message, Started):
        return _started(gang, run, node)
    if isinstance(message, Dumped):
        return _dumped(gang, message) if message.rank in run.ranks_of(node) else gang
    if isinstance(message, Progressed):
        return _progressed(gang, run, node, known_reports(message.reports), now)
    if isinstance(message, Exited):
        return _exited(gang, run, node, message.exit)
    if isinstance(message, FabricSeen):
        return replace(gang, fabric=with_ranks_heard(gang.fabric, run, message.ranks, run.ranks_of(node), now))
    for report in known_reports([message.report]):
        gang = _reported(gang, run, node, report, now)
    return gang


def connection_closed(gang: Gang, node: int, now: float, *, unheard: bool = False) -> Gang:
    """The gang after the connection of `node` closed, or was given up since nothing was heard on it."""
    gang = gang if unheard else without_silence(gang, node)
    away = replace(gang.nodes[node], connected=False, closed_at=now, closed_sign=gang.signs + 1, last_order=None)
    return replace(gang.with_node(node, away), signs=gang.signs + 1)


def node_heard_again(gang: Gang, node: int, now: float) -> Gang:
    """The gang after a node that was not heard is heard again. What ranks of all nodes waited for meanwhile gets that time once more."""
    again = with_silence_over(gang, node, now)
    if again is gang or gang.phase is not Phase.ACTIVE:
        return again
    seconds = now - min(silence.since for silence in gang.silences if silence.node == node)
    ranks = {
        index: replace(rank, progress=shifted(rank.progress, seconds, latest=now))
        for index, rank in enumerate(gang.ranks)
        if rank.exit is None
    }
    return again.with_ranks(ranks)


def _hello(gang: Gang, run: Run, node: int, hello: Hello, now: float) -> Gang:
    gang = with_machine_heard(gang, run, replace(hello, node=node), now)
    before = gang.nodes[node]
    same = hello.instance == before.instance
    leaving = hello.leaving or (same and before.leaving)
    here = Node(connected=True, instance=hello.instance, attempt=hello.attempt, stuck=same and before.stuck, leaving=leaving)
    here = replace(here, boot_id=hello.boot_id, slept_seconds=hello.slept_seconds)
    gang = replace(gang.with_node(node, here), known_attempt=max(gang.known_attempt, hello.known_attempt))
    if node and same and before.attempt == gang.attempt and open_silence_of(gang, node) is None:
        broke_at = now if before.closed_at is None else before.closed_at  # one side alone may notice that a connection is gone
        gang = with_silence(gang, Silence(node, broke_at, arrives=True))
    gang = node_heard_again(gang, node, now)
    if hello.unable or (gang.unable is not None and gang.unable[0] == node):
        gang = replace(gang, unable=(node, hello.unable) if hello.unable else None)
    if gang.phase is Phase.WAITING:
        return with_step_reached(gang, hello, now)
    if gang.phase not in (Phase.ACTIVE, Phase.STOPPING):
        return gang
    if hello.known_attempt == gang.attempt:
        for state in hello.ranks:
            gang = _caught_up(gang, run, node, state, now)
    gang = with_deadlines_of(gang, run, run.ranks_of(node))
    exits = [gang.ranks[rank].exit for rank in run.ranks_of(node)]
    if gang.phase is Phase.STOPPING:
        return _stopped_unheard(gang, node, before, exits)
    unfinished = any(exit_ is None or was_stopped(exit_) for exit_ in exits)
    forgot = not same and (before.attempt == gang.attempt or told_to_start(before, gang.attempt))
    stopped = hello.known_attempt >= gang.attempt and hello.attempt != gang.attempt
    return gang.with_lost(node) if unfinished and (forgot or stopped) else gang


def _stopped_unheard(gang: Gang, node: int, before: Node, exits: list[RankExit | None]) -> Gang:
    """Blame a node that was away when the others were stopped, and has stopped its ranks by itself, for their failure."""
    was_away = before.closed_at is not None and before.closed_at <= gang.stop_began
    if not was_away or not any(exit_ is not None and was_stopped(exit_) for exit_ in exits):
        return gang
    lost = tuple(lost for lost in gang.lost if lost.node != node)
    return replace(gang, lost=(*lost, LostNode(before.closed_sign, node, by_itself=True)))


def _caught_up(gang: Gang, run: Run, node: int, state: RankState, now: float) -> Gang:
    """Take in a rank's state from a Hello. What it reported while its node was away is lost, so its time counts from here."""
    if state.rank not in run.ranks_of(node):
        return gang
    reports = known_reports(state.progress)
    step = gang.ranks[state.rank].progress.step
    gang = _progressed(gang, run, node, [each for each in reports if not isinstance(each, Step) or step is None or each.step > step], now)
    rank = gang.ranks[state.rank]
    if rank.progress.heard_at:
        gang = gang.with_rank(state.rank, replace(rank, progress=replace(rank.progress, since=now, heard_at=now)))
    if state.ready:
        gang = gang.with_rank(state.rank, replace(gang.ranks[state.rank], ready=True))
    return _exited(gang, run, node, state.exit) if state.exit is not None else gang


def _started(gang: Gang, run: Run, node: int) -> Gang:
    if run.training is not None:
        return gang  # Lockstep's trainer says itself when it is there
    return gang.with_ranks({rank: replace(gang.ranks[rank], ready=True) for rank in run.ranks_of(node)})


def _dumped(gang: Gang, dump: Dumped) -> Gang:
    """Keep what was seen of a rank. What is left of it after SIGKILL is reported again and again: that is its state, unless it was a
    stopped process.
    """
    rank = gang.ranks[dump.rank]
    if not rank.dumped:
        return replace(gang.with_rank(dump.rank, replace(rank, dumped=True)), dumps=(*gang.dumps, dump))
    place = next(index for index, other in enumerate(gang.dumps) if other.rank == dump.rank)
    before = gang.dumps[place]
    if before.state not in STOPPED:
        before = replace(before, state=dump.state, kernel_function=dump.kernel_function)
    return replace(gang, dumps=(*gang.dumps[:place], before, *gang.dumps[place + 1 :]))


def _exited(gang: Gang, run: Run, node: int, exit_: RankExit) -> Gang:
    if exit_.rank not in run.ranks_of(node) or gang.ranks[exit_.rank].exit is not None:
        return gang
    gang, sign = _sign(gang, exit_.rank)
    rank = gang.ranks[exit_.rank]
    if gang.phase is Phase.ACTIVE and was_stopped(exit_) and not gang.nodes[node].leaving:
        gang = gang.with_lost(node, by_itself=True)  # nobody has ordered it: while an attempt is active, none of it is stopped
    return gang.with_rank(exit_.rank, replace(rank, exit=exit_, error=rank.error or exit_.error, sign=sign))


def ended_as_ordered(gang: Gang, run: Run, ends: Sequence[tuple[int, Exited]]) -> Gang:
    """The gang after these ends (node, how its rank ended), while it is being stopped: as `observe` of each, with one copy of the gang for
    all.
    """
    ranks: dict[int, Rank] = {}
    signs = gang.signs
    for node, message in ends:
        rank = gang.ranks[message.exit.rank] if message.attempt == gang.attempt and message.exit.rank in run.ranks_of(node) else None
        if rank is not None and rank.exit is None and message.exit.rank not in ranks:
            signs += not rank.sign
            ranks[message.exit.rank] = replace(rank, exit=message.exit, error=rank.error or message.exit.error, sign=rank.sign or signs)
    return replace(gang.with_ranks(ranks), signs=signs) if ranks else gang


def _sign(gang: Gang, rank: int) -> tuple[Gang, int]:
    sign = gang.ranks[rank].sign
    return (gang, sign) if sign else (replace(gang, signs=gang.signs + 1), gang.signs + 1)


def rank_after_report(rank: Rank, report: RankReport, now: float) -> Rank:
    """The rank after one of its reports. Written out, since `replace` takes several times as long, and a big gang says thousands of these a
    second.
    """
    paces = with_sample(rank.paces, report) if isinstance(report, Pace) else rank.paces
    return Rank(True, rank.exit, rank.error, rank.sign, progress_after(rank.progress, report, now), paces, rank.dumped)


def _progressed(gang: Gang, run: Run, node: int, reports: list[RankReport], now: float) -> Gang:
    """Take in reports with one copy of the gang for all: a big one hears of its ranks all the time."""
    ranks: dict[int, Rank] = {}
    of_node = run.ranks_of(node)
    own = [report for report in reports if report.rank in of_node]
    for report in own:
        ranks[report.rank] = rank_after_report(ranks.get(report.rank) or gang.ranks[report.rank], report, now)
    gang = with_deadlines_of(gang.with_ranks(ranks), run, ranks)
    if any(isinstance(report, Step) for report in own):
        gang = replace(gang, fabric=after_step(gang.fabric, run, now))
    for report in own:
        if report.rank == 0:
            gang = with_stragglers_now_and_then(gang, run, now) if isinstance(report, Pace) else _told_by_rank_zero(gang, report, now)
    return gang


def _reported(gang: Gang, run: Run, node: int, report: RankReport, now: float) -> Gang:
    gang = _progressed(gang, run, node, [report], now)
    if isinstance(report, Error) and report.rank in run.ranks_of(node):
        gang, sign = _sign(gang, report.rank)
        return gang.with_rank(report.rank, replace(gang.ranks[report.rank], error=report, sign=sign))
    return gang


def _told_by_rank_zero(gang: Gang, report: RankReport, now: float) -> Gang:
    trainer = gang.trainer or TrainerReport()
    if isinstance(report, Activity):
        if report.step is not None and not gang.worked_at:  # (told again after a connection was made anew)
            trainer = replace(trainer, step=report.step, total_steps=report.total_steps)
            gang = with_resumed_from(gang, report.step, report.path)
        return replace(gang, trainer=replace(trainer, activity=report.activity))
    if isinstance(report, Step):
        step = replace(trainer, step=report.step, total_steps=report.total_steps, metrics=_merged(trainer.metrics, report.metrics))
        gang = replace(with_step(with_downtime_ended(gang, now), report), worked_at=now)
        return replace(gang, trainer=replace(step, estimated_remaining_seconds=report.estimated_remaining_seconds))
    if isinstance(report, Evaluate):
        return replace(gang, unproven={}, trainer=replace(trainer, metrics=_merged(trainer.metrics, report.metrics)))
    if isinstance(report, Checkpoint):
        return replace(gang, checkpoint=CheckpointReport(report.step, report.path, stamp(now)), failed_saves=None)
    if isinstance(report, SaveFailed):
        before = gang.failed_saves
        since, count = (before.since, before.count + 1) if before is not None else (stamp(now), 1)
        return replace(gang, failed_saves=FailedSaves(report.step, report.problem[:1000], since, count))
    return replace(gang, result=report.result) if isinstance(report, End) else gang


def _merged(metrics: tuple[Metric, ...], new: dict[str, str]) -> tuple[Metric, ...]:
    values = {metric.name: metric.value for metric in metrics} | new
    return tuple(Metric(name[:64], value[:64]) for name, value in list(values.items())[-32:])
