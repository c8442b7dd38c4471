"""The gang's state in the words of the report."""

from __future__ import annotations

from lockstep_gang.contract.messages import StopMode
from lockstep_gang.contract.report import NodeReport, RankCount, Report, State
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle import silences
from lockstep_gang.lifecycle.gang import Gang, Phase
from lockstep_gang.lifecycle.goodput import proven_goodput
from lockstep_gang.lifecycle.preflight import rounds
from lockstep_gang.lifecycle.session import interactive_report
from lockstep_gang.lifecycle.start import absent_nodes, listed_nodes, listed_ranks, missing_ranks
from lockstep_gang.lifecycle.stops import busy_nodes, with_stuck_nodes
from lockstep_spec.words import named


def summarize(gang: Gang, run: Run, sequence: int = 0, log: tuple[str, ...] = ()) -> Report:
    """The report of this moment."""
    state = state_of(gang)
    failure = gang.failure if state in (State.BACKING_OFF, State.FAILED) else None
    failure, history = gang.untold or (failure, gang.history)
    return Report(
        job=run.job,
        pod=f"{run.job.name}-0",
        sequence=sequence,
        attempt=gang.attempt,
        restarts=gang.restarts,
        state=state,
        message=message_of(gang, run),
        nodes=tuple(NodeReport(index, node.connected, _ready(gang, run.ranks_of(index))) for index, node in enumerate(gang.nodes)),
        ranks=RankCount(run.world_size, _all_ready(gang)),
        trainer=gang.trainer,
        checkpoint=gang.checkpoint,
        failed_saves=gang.failed_saves,
        failure=failure,
        restarts_counted=gang.budget.counted,
        history=history,
        unwritten=gang.unwritten,
        stragglers=gang.stragglers if gang.phase is Phase.ACTIVE else (),
        stop=gang.stopped,
        result=gang.result if state is State.COMPLETE else None,
        goodput=proven_goodput(gang) if run.interactive is None else None,
        fabric=gang.fabric.verdict,
        log=log,
        retry=run.restart.retry,
        preflight=gang.preflight.result,
        interactive=interactive_report(gang, run),
        order=gang.placement.order,
        unheard=silences.open_silences_text(gang, run) if gang.phase is Phase.ACTIVE else "",
    )


def state_of(gang: Gang) -> State:
    if gang.ending is not None:
        return gang.ending.state
    if gang.phase is Phase.WAITING:
        return State.BACKING_OFF if gang.failure is not None else State.WAITING
    if gang.phase is Phase.ACTIVE and gang.ranks.counts.missing:
        return State.STARTING
    return State.RUNNING


def message_of(gang: Gang, run: Run) -> str:
    """One sentence a person can act on."""
    if gang.ending is not None:
        return gang.ending.message
    trouble = f"; {gang.unwritten.problem}" if gang.unwritten is not None and gang.phase is not Phase.WAITING else ""
    unheard = silences.open_silences_text(gang, run) if gang.phase is not Phase.WAITING else ""
    return _message(gang, run) + (f"; {unheard}" if unheard else "") + trouble


def _message(gang: Gang, run: Run) -> str:
    if gang.phase is Phase.STOPPING:
        how = "saving and stopping" if gang.stopping is StopMode.SAVE else "stopping all ranks"
        return f"{how}: {gang.stop_reason}"
    if gang.phase is Phase.WAITING:
        return _waiting_for(gang, run)
    if state_of(gang) is not State.STARTING:
        ended = f"; {len(gang.ranks.ended)} of {run.world_size} ranks have ended" if gang.ranks.ended else ""
        return f"attempt {gang.attempt} is running{ended}"
    missing = listed_ranks(run, tuple(missing_ranks(gang)))
    return f"{_all_ready(gang)} of {run.world_size} ranks have reported; waiting for {missing}"


def message_facts(gang: Gang) -> tuple[object, ...]:
    """Values that `message_of` is made of. While they are the same, so is the message, which takes a look at every rank."""
    where = gang.phase, gang.attempt, gang.stopping, gang.stop_reason, gang.ending, gang.unwritten, gang.awaited, gang.failure
    checks = gang.preflight.stage, gang.preflight.round, gang.preflight.result, gang.session.request, gang.facts.latest
    return *where, *checks, gang.silences, gang.nodes.counts, gang.ranks.counts.missing, gang.ranks.counts.ready, len(gang.ranks.ended)


def _waiting_for(gang: Gang, run: Run) -> str:
    if gang.unwritten is not None or gang.awaited:
        return gang.unwritten.problem if gang.unwritten is not None else gang.awaited
    missing = absent_nodes(gang) or [index for index, node in enumerate(gang.nodes) if node.connected and node.stuck]
    after = f", after {gang.failure.message}" if gang.failure is not None else ""
    if missing:
        return with_stuck_nodes(f"waiting for {listed_nodes(gang, run, missing)}{after}", gang, run)
    checking = rounds.preflight_message(gang.preflight)
    if checking and (gang.failure is None or not rounds.is_looking(gang.preflight)):  # within a backoff it is too short to be reported
        return checking + after
    request = gang.session.request
    if request is not None and request.looked_at:
        return f"looking for {request.asked.command[0]} on every node"
    if run.interactive is not None and request is None:
        return "ready: nothing runs"
    busy = busy_nodes(gang)
    return (
        f"waiting for ranks of an earlier attempt to stop on {named('node', busy)}"
        if busy
        else f"attempt {gang.attempt + 1} starts soon{after}"
    )


def _all_ready(gang: Gang) -> int:
    return gang.ranks.counts.ready if gang.phase is Phase.ACTIVE else 0


def _ready(gang: Gang, ranks: range) -> int:
    if gang.phase is not Phase.ACTIVE:
        return 0
    return sum(gang.ranks[rank].ready and gang.ranks[rank].exit is None for rank in ranks)
