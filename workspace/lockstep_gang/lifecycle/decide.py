"""Decisions: `decide(gang, run, now)`, called again until the phase stays as it is.

Level-triggered: it looks at where every node stands and says what is still to be said, so a repeated or lost event only costs time.
Records and the end are made durable before any order of the same decision is sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lockstep_gang.contract.messages import Finish, Order, Start, Stop, StopMode
from lockstep_gang.contract.preflight import Stage
from lockstep_gang.contract.report import Cause, State
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import reconnect_seconds
from lockstep_gang.lifecycle import session, stops
from lockstep_gang.lifecycle.budget import is_repeated, is_spent, may_start_at, nodes_that_left, with_failure_charged
from lockstep_gang.lifecycle.fabric.state import fabric_wake_at, judged_by_now, new_fabric, refusal
from lockstep_gang.lifecycle.failures import first_failure, is_final, left_running, with_cause_sought
from lockstep_gang.lifecycle.gang import Gang, LostNode, Node, Phase, Rank, Ranks, has_failed, has_reported_end, told_to_start
from lockstep_gang.lifecycle.goodput import accounted, accounted_now_and_then
from lockstep_gang.lifecycle.hang import hang_failure, overdue_hang, watchdog_hang
from lockstep_gang.lifecycle.losses import doubted_until, is_doubted, with_nodes_that_left, with_unexplained_leave
from lockstep_gang.lifecycle.placement import place_ranks, with_racks_awaited
from lockstep_gang.lifecycle.preflight import rounds
from lockstep_gang.lifecycle.progress import Hang
from lockstep_gang.lifecycle.silences import open_silences
from lockstep_gang.lifecycle.start import is_late, late_nodes_failure, late_ranks_failure, missing_ranks, start_deadline, with_wait
from lockstep_gang.lifecycle.stops import stop_report, with_idle_stop

PORTS = 64
"""Number of ports over which attempts take turns, so that a rank of an old one that nobody could stop doesn't meet the new one."""


@dataclass(frozen=True)
class Decision:
    """The gang as it is now, and what to do about it, in this order."""

    gang: Gang
    begin: bool = False
    """Record the attempt `gang.attempt` durably, before any agent hears of it."""
    end: bool = False
    """Record `gang.ending` durably: no later process starts this job again."""
    close: str | None = None
    """Record how the attempt ended: `Complete`, `Stopped` (as asked) or `Failed`."""
    orders: tuple[tuple[int, Order], ...] = ()
    wake_at: float | None = None
    """Decide again then, even if nothing is heard."""


def decide(gang: Gang, run: Run, now: float) -> Decision:
    """The next step and the orders that follow from it."""
    gang = session.with_idleness(accounted_now_and_then(gang, run, now), run, now)
    step = _next_step(with_wait(with_idle_stop(gang, now), run, now), run, now)
    order = step.gang.placement.order
    gang, orders = _orders(step.gang, run if order == run.order else replace(run, order=order))
    return replace(step, gang=gang, orders=orders, wake_at=_wake_at(gang, run, now))


def _next_step(gang: Gang, run: Run, now: float) -> Decision:
    if gang.phase is Phase.WAITING:
        return _waiting(gang, run, now) if run.interactive is None else _for_a_request(gang, run, now)
    if gang.phase is Phase.ACTIVE:
        return _active(gang, run, now)
    if stops.is_over(gang, run, now):
        return _stopped(stops.with_stop_concluded(accounted(gang, run, now)), run, now)
    return Decision(_hastened(gang, run, now) if gang.phase is Phase.STOPPING else gang)


def _hastened(gang: Gang, run: Run, now: float) -> Gang:
    """Kill ranks that save, because somebody interrupted their run, once it is interrupted again."""
    again = gang.stopping is StopMode.SAVE and session.interrupting(gang) is StopMode.KILL
    return replace(accounted(gang, run, now), stopping=StopMode.KILL, stop_began=now) if again else gang


def _for_a_request(gang: Gang, run: Run, now: float) -> Decision:
    """Start an attempt of a dev environment when somebody has asked for it."""
    gang, may_start = session.prepare_request(gang, run, now)
    return _start(replace(gang, placement=with_racks_awaited(gang.placement, run, now)), run, now) if may_start else Decision(gang)


def _run_over(gang: Gang, outcome: str) -> Decision:
    """End a run of a dev environment, which then waits for the next."""
    return Decision(replace(gang, phase=Phase.WAITING, failure=None, final=False), close=outcome)


def _waiting(gang: Gang, run: Run, now: float) -> Decision:
    if gang.failure is not None and (gang.final or is_spent(gang.budget, run)):
        if is_doubted(gang, run, now) and not gang.final:
            return Decision(gang)
        return _ended(gang, State.FAILED, gang.failure.message)
    here = gang.nodes.counts.free == run.nodes
    if is_late(gang, run, now):
        failure = late_nodes_failure(gang, run)
        return _ended(replace(gang, failure=failure, final=True), State.FAILED, failure.message)
    if gang.unable is not None and run.preflight is not None:
        gang = replace(gang, preflight=rounds.refused(gang.preflight, run, *gang.unable, now))
    elif now < gang.not_before - rounds.BEFORE_SECONDS or not here:
        return Decision(replace(gang, preflight=rounds.interrupted(gang.preflight)))
    else:
        gang = replace(gang, preflight=rounds.advance(gang.preflight, run, gang.failure.cause if gang.failure else None, now))
    if not gang.preflight.passed or rounds.ends_with_it(run):
        return _before_the_attempt(gang, run)
    return _start(replace(gang, placement=with_racks_awaited(gang.placement, run, now)), run, now)


def _start(gang: Gang, run: Run, now: float) -> Decision:
    if now < max(gang.not_before, gang.placement.waits_until or 0.0):
        return Decision(gang)
    gang = replace(with_unexplained_leave(gang), placement=place_ranks(gang.placement, run))
    run = replace(run, order=gang.placement.order)
    attempt = _next_attempt(gang)
    ranks = Ranks((Rank(),) * run.world_size)
    fresh = replace(gang, phase=Phase.ACTIVE, attempt=attempt, known_attempt=attempt, restarts=gang.budget.failures, ranks=ranks)
    fabric = new_fabric(run, now, rounds.doubts(gang.preflight))
    fresh = replace(fresh, preflight=rounds.used(gang.preflight), fabric=fabric, began_at=now, in_time_until=math.inf)
    fresh = session.request_started(fresh)
    return Decision(
        replace(
            fresh,
            stopping=None,
            hang=None,
            stragglers=(),
            late=(),
            dumps=(),
            lost=(),
            silences=open_silences(fresh),
            seeks_until=0.0,
            examined=0,
            paused_seconds=0.0,
            worked_at=0.0,
            unproven={},
            trainer=None,
            result=None,
            unwritten=None,
            untold=None,
        ),
        begin=True,
    )


def _before_the_attempt(gang: Gang, run: Run) -> Decision:
    """Wait for the preflight, or end: it was all there is to do, or can't pass any more."""
    if gang.preflight.passed:
        return replace(_ended(gang, State.COMPLETE, "preflight passed"), end=False)
    failure = rounds.preflight_failure(gang.preflight) if gang.preflight.over else None
    if failure is None:
        return Decision(gang)
    failed = _ended(replace(gang, failure=failure, final=True), State.FAILED, failure.message)
    return replace(failed, end=not rounds.ends_with_it(run))


def _active(gang: Gang, run: Run, now: float) -> Decision:
    gang = replace(gang, fabric=judged_by_now(gang.fabric, run, now))
    away = [(index, gang.nodes[index]) for index in sorted(gang.nodes.away)]
    overdue = [LostNode(node.closed_sign, index) for index, node in away if _overdue(node, run, now)]
    if overdue or gang.lost or has_failed(gang, run):
        gang = with_cause_sought(replace(gang, lost=(*gang.lost, *overdue)), run, now)
        return Decision(gang) if now < gang.seeks_until else _stop_failed(gang, run, now)
    refused = refusal(gang.fabric, run)
    if refused is not None:
        return _stop(gang, StopMode.KILL, refused.message, now)
    gang, stuck = _stuck(gang, run, now)
    if stuck is not None:
        return stuck
    if gang.nodes.counts.leaving:
        return _stop(gang, StopMode.SAVE, "a node was asked to stop", now)
    interrupting = session.interrupting(gang)
    if interrupting is not None:
        return _stop(gang, interrupting, "the user who started it stopped it", now)
    return _done(gang, run, now) if _all_done(gang) else Decision(gang)


def _done(gang: Gang, run: Run, now: float) -> Decision:
    if run.interactive is not None:
        return _run_over(session.request_completed(gang, now), "Complete")
    note = (gang.result or {}).get("note") or left_running(gang, run)
    gang = replace(gang, result={**(gang.result or {}), "note": note}) if note else gang
    return replace(_ended(gang, State.COMPLETE, f"all ranks are done; {note}" if note else "all ranks are done"), close="Complete")


def _overdue(node: Node, run: Run, now: float) -> bool:
    return bool(node.attempt) and node.closed_at is not None and now >= node.closed_at + reconnect_seconds(run.nodes)


def _all_done(gang: Gang) -> bool:
    """Return True if every rank ended with 0 by itself or reported its end: many scripts also end with 0 when they are told to stop."""
    if gang.ranks.counts.done < len(gang.ranks):
        return False
    is_asked = gang.stopping in (StopMode.SAVE, StopMode.KILL)
    return not is_asked or has_reported_end(gang) or not any(rank.exit is not None and rank.exit.ordered for rank in gang.ranks)


def _stop(gang: Gang, mode: StopMode, reason: str, now: float) -> Decision:
    return Decision(replace(gang, phase=Phase.STOPPING, stopping=mode, stop_reason=reason, stop_began=now))


def _stuck(gang: Gang, run: Run, now: float) -> tuple[Gang, Decision | None]:
    """Stop for ranks that have not come, or don't move any more. While a node is not heard nobody knows that."""
    if open_silences(gang):
        return gang, None
    if is_late(gang, run, now):
        gang = replace(gang, late=tuple(missing_ranks(gang)))
        return gang, _stop(gang, StopMode.DUMP, late_ranks_failure(gang, run).message, now)
    gang, hang = overdue_hang(gang, run, now)
    return gang, _stop_hung(gang, run, hang, now) if hang is not None else None


def _stop_failed(gang: Gang, run: Run, now: float) -> Decision:
    open_ = replace(gang, silences=open_silences(gang))  # those that are over count once it was seen where the ranks are
    failure = first_failure(open_, run)
    if failure.cause is Cause.HANG and failure.rank is not None:  # by the watchdog of that rank
        hung = watchdog_hang(gang, failure.rank, now)
        without_blame = first_failure(replace(open_, hang=hung), run)
        if without_blame.cause is not Cause.HANG:
            return _stop(replace(gang, hang=hung), StopMode.KILL, without_blame.message, now)
        return _stop_hung(gang, run, hung, now)
    return _stop(gang, StopMode.KILL, failure.message, now)


def _stop_hung(gang: Gang, run: Run, hang: Hang, now: float) -> Decision:
    """Write down where every rank is, then stop: after the restart nobody could tell."""
    gang = replace(gang, hang=hang)
    return _stop(gang, StopMode.DUMP, hang_failure(gang, run, hang).message, now)


def _stopped(gang: Gang, run: Run, now: float) -> Decision:
    """Conclude a stop. No rank is left on any node that can be reached, but for those that can't be ended; a node that can't be reached
    stops its own after its silence, and is fenced by its number.
    """
    if _all_done(gang) and not has_failed(gang, run):
        return _done(gang, run, now)
    if run.interactive is not None:
        leaving = gang.nodes.counts.leaving > 0
        gang = replace(gang, stopped=stop_report(gang, run, now)) if leaving and gang.stopping is StopMode.SAVE else gang
        return _run_over(*session.request_stopped(gang, run, now))
    if gang.stopping is StopMode.SAVE:
        waiting = replace(gang, phase=Phase.WAITING, failure=None, stopped=stop_report(gang, run, now))
        return Decision(with_nodes_that_left(waiting, nodes_that_left(gang, now)), close="Stopped")
    failure = first_failure(gang, run)
    final = is_final(gang, run) or is_repeated(gang, failure)
    failure = replace(failure, message=stops.with_stuck_nodes(failure.message, gang, run))
    failed = replace(with_failure_charged(gang, failure, now), phase=Phase.WAITING, final=final)
    if final or (is_spent(failed.budget, run) and not is_doubted(failed, run, now)):
        return replace(_ended(failed, State.FAILED, failure.message), close="Failed")
    return Decision(replace(failed, not_before=may_start_at(failed, run, gang.stop_began)), close="Failed")


def _ended(gang: Gang, state: State, message: str) -> Decision:
    return Decision(replace(gang, phase=Phase.ENDED, ending=Finish(state, message)), end=True)


def _orders(gang: Gang, run: Run) -> tuple[Gang, tuple[tuple[int, Order], ...]]:
    """Orders to nodes that have changed; to all nodes if what their orders follow from has changed."""
    orders: list[tuple[int, Order]] = []
    changes: dict[int, Node] = {}
    everywhere = _ordered_for(gang)
    same = gang.unordered is not None and everywhere == gang.ordered_for
    for index in sorted(gang.unordered or ()) if same else range(run.nodes):
        node = gang.nodes[index]
        order = (_order(gang, run, index) or _question(gang, run, index)) if node.connected else None
        if order is not None and order != node.last_order:
            orders.append((index, order))
            changes[index] = replace(node, last_order=order, attempt=order.attempt if isinstance(order, Start) else node.attempt)
    orders += [(node, answer) for node, answer in gang.session.answers if gang.nodes[node].connected]
    gang = gang.with_nodes(changes) if changes else gang
    session_ = replace(gang.session, answers=()) if gang.session.answers else gang.session
    return replace(gang, session=session_, unordered=frozenset(), ordered_for=everywhere), tuple(orders)


def _ordered_for(gang: Gang) -> tuple[object, ...]:
    """Values that the orders of all nodes follow from; the rest is the node's own state."""
    attempt = gang.phase, gang.attempt, gang.restarts, gang.placement.order, gang.stopping, gang.stop_reason, gang.ending
    return *attempt, gang.preflight.stage, gang.preflight.round, gang.session.request


def _order(gang: Gang, run: Run, index: int) -> Order | None:
    """Order that this node should have got last, as things stand; None: nothing."""
    node = gang.nodes[index]
    if gang.phase is Phase.ENDED:
        return gang.ending
    if gang.phase is Phase.ACTIVE and not told_to_start(node, gang.attempt) and node.attempt != gang.attempt:
        if all(gang.ranks[rank].exit is not None for rank in run.ranks_of(index)):
            return None  # it has had this attempt already
        place, first = (run.layout.position_of(index), run.ranks_of(index).start) if run.order else (None, None)
        request = gang.session.request
        asked = request.asked if request is not None else None
        port = run.master_port + (gang.attempt - 1) % PORTS
        return Start(gang.attempt, gang.restarts, run.addresses[0], port, place, first, asked)
    if gang.phase is Phase.STOPPING and node.attempt:
        return Stop(node.attempt, gang.stopping or StopMode.KILL, gang.stop_reason)
    if gang.phase is Phase.WAITING and node.attempt:
        return Stop(node.attempt, StopMode.KILL, "this attempt is over")
    return None


def _question(gang: Gang, run: Run, node: int) -> Order | None:
    if gang.phase is not Phase.WAITING:
        return None
    check = rounds.preflight_order(gang.preflight, run, node)
    if check is not None and check.stage is Stage.SELF_TEST and not run.rack_grouped and not rounds.ends_with_it(run):
        check = replace(check, attempt=_next_attempt(gang))
    return check or session.question(gang, node)


def _next_attempt(gang: Gang) -> int:
    return max(gang.attempt, gang.known_attempt) + 1


def _wake_at(gang: Gang, run: Run, now: float) -> float | None:
    away = [gang.nodes[index].closed_at for index in gang.nodes.away] if gang.phase is Phase.ACTIVE else []
    times = [closed_at + reconnect_seconds(run.nodes) for closed_at in away if closed_at is not None]
    waits = (gang.in_time_until if gang.phase is Phase.ACTIVE else None, start_deadline(gang, run), stops.stop_deadline(gang, run))
    times += [deadline for deadline in waits if deadline is not None and deadline < math.inf]
    times += [gang.seeks_until] if gang.phase is Phase.ACTIVE and gang.seeks_until > now else []
    if gang.phase is Phase.WAITING:
        times += [at for at in (gang.not_before - rounds.BEFORE_SECONDS, gang.not_before) if at > now]
    doubted = doubted_until(gang, run) if gang.phase is Phase.WAITING and is_spent(gang.budget, run) else None
    if doubted is not None and doubted > now:
        times.append(doubted)
    checked = rounds.preflight_wake_at(gang.preflight) if gang.phase is Phase.WAITING else None
    if checked is not None and checked > now:
        times.append(checked)
    fabric = fabric_wake_at(gang.fabric) if gang.phase is Phase.ACTIVE else None
    times += [fabric] if fabric is not None else []
    times += [at for at in (session.session_wake_at(gang, run),) if at is not None]
    if gang.phase is Phase.WAITING and gang.placement.waits_until is not None and gang.placement.waits_until > now:
        times.append(gang.placement.waits_until)
    return min(times, default=None)
