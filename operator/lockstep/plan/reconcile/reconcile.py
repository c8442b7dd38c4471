"""Next step of one job: observed, report and now in; objects to write and status out. Pure.

The rules:
- A job starts from zero pods only. What it starts with is frozen into ConfigMap x-run-<hash>; until it is at zero again only that counts.
- Nothing is adopted: an object of a job's name that has another owner is reported and left alone.
- Nothing is sent when nothing has to change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.api.objects import Object, condition, is_true
from lockstep.api.status import ActiveTime, StopStatus
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, ReceivedReport, current_report, is_terminating, owner_uid
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.accept import Accepted, accept, claim_going, missing_service_account, service_account_gone
from lockstep.plan.reconcile.clocks import (
    active_time,
    ended_active_time,
    has_begun,
    held_until,
    is_of_an_earlier_retry,
    is_retried,
    overdue,
    start_overdue,
    until_expired,
    until_overdue,
    until_start_overdue,
)
from lockstep.plan.reconcile.conditions import SILENT_SECONDS, Ending, View, heard_until
from lockstep.plan.reconcile.events import JobEvent, events_between
from lockstep.plan.reconcile.frozenrun import Gang, gang, made_anew
from lockstep.plan.reconcile.interactive import is_stopped
from lockstep.plan.reconcile.measures import with_failures_known
from lockstep.plan.reconcile.placing import Placing, placing
from lockstep.plan.reconcile.podfacts import lost_nodes
from lockstep.plan.reconcile.status import due, is_passing, job_status
from lockstep.plan.reconcile.stopping import commit, last_word, stop_status, stopping
from lockstep.plan.reconcile.writes import (
    Decision,
    absent_claims,
    any_foreign,
    interference,
    is_of_namesake,
    is_started,
    name_taken,
    object_writes,
    repairs,
    with_log,
)
from lockstep.plan.render.objects import GangRun, RenderContext, differs_by_user
from lockstep.plan.waiting.notcreated import until_overdue_pods
from lockstep_gang.contract.report import ENDS, Report, State


@dataclass(frozen=True)
class Plan:
    """Objects to send, in this order. Empty tuples and None: nothing."""

    create: tuple[Object, ...] = ()
    """Objects seen to be absent: POST. An object that is there after all is looked at, never merged into."""
    claims: tuple[Object, ...] = ()
    """Claims to create; one that is there is fine, whoever made it."""
    at_once: bool = False
    """Nothing is known to be in the way of a start: the StatefulSet is created beside what its pods need, and deleted again if any of that
    can't be created.
    """
    half_made: tuple[Object, ...] = ()
    """The StatefulSet of a start that an operator left unfinished. It is deleted, too, if something that its pods need can't be created."""
    taken_back: bool = False
    """Pods of a start that was taken back are on their way out: nothing is sent, and what was in its way still is."""
    apply: tuple[Object, ...] = ()
    """Objects of this job that differ, with the uid and resourceVersion that were seen."""
    delete: tuple[Object, ...] = ()
    force_delete: tuple[Object, ...] = ()
    """Pods on Nodes that are lost, where the job allows it."""
    status: Object | None = None
    passing: bool = False
    """The status may wait SETTLE_SECONDS for what follows."""
    events: tuple[JobEvent, ...] = ()
    again_seconds: float | None = None
    run: GangRun | None = None
    """Run of the pods that are there, or about to be: to be remembered."""


def reconcile(observed: Observed, received: ReceivedReport | None, context: RenderContext, now: float) -> Plan:
    """The next step of one job. `context` holds what only the operator knows of it."""
    if is_terminating(observed.job):
        return Plan()
    accepted = accept(observed, context)
    pods_now = gang(observed, accepted.frozen if isinstance(accepted, Accepted) else None, context)
    has_failed = is_true(observed.status, "Failed") and not is_retried(observed, pods_now.run)  # unless a retry was asked for since
    word, active = last_word(observed, received), active_time(observed, now)
    stopped = stop_status(observed, received, ended=_has_ended(observed, received, has_failed=has_failed), now=now)
    last_received, received = received, _newest(observed, received)
    late = None if context.clock_off else overdue(observed, active, now)
    stuck = None if context.clock_off else start_overdue(observed, now)
    end = _ending(observed, received, stopped, late, stuck, has_failed=has_failed)
    expires = until_expired(observed, now) if end.finished and not context.clock_off else None
    if expires is not None and expires <= 0 and observed.at_zero:
        return Plan(delete=(observed.job,))
    hold_end = held_until(observed, received, now)
    if end.finished and hold_end is None:
        active = ended_active_time(ActiveTime.stored(observed.status.get("active")), now)
    lost = lost_nodes(observed, received, now, context.listening_since)
    place = Placing() if end.finished or _foreign(observed) is not None else placing(observed, now)
    begun = end.finished or has_begun(observed, last_received, now)
    decision = _decide(observed, accepted, pods_now, late, place, finished=end.finished, pods_stay=hold_end is not None, begun=begun)
    is_placing = decision.stopping is None or decision.stopping.reason is Reason.NODES_RELEASED
    create, apply, delete = object_writes(observed, decision, context)
    if end.finished:
        create, apply = with_log(observed, received, create, apply)
    taken_back = not begun and observed.obstacle is not None and observed.stateful_set is None and not observed.at_zero
    if taken_back:
        create, apply, delete = (), (), ()
    own = observed.own_stateful_set
    is_half_made = not begun and not decision.starts and not is_started(observed, decision.running)
    mended = () if is_half_made else repairs(observed, decision, create, delete)
    meddling, until_forgotten = (None, None) if end.finished else interference(observed, mended, now)
    view = View(
        observed=observed,
        refusal=None if end.finished else decision.refusal,
        received=received,
        wanted_pods=decision.replicas,
        suspend=is_stopped(observed),
        end=end,
        now=now,
        stopping=decision.stopping,
        stopped=_stop_message(observed, word, stopped),
        last_word=word,
        commit=commit(observed, last_received),
        held_until=hold_end,
        lost=lost,
        listening_since=context.listening_since,
        place=place,
        made_anew="" if end.finished else made_anew(observed, pods_now.run, context),
        interference="" if meddling is None else meddling.message,
        deprecated="" if decision.accepted is None else decision.accepted.deprecated,
        pending=_is_pending(decision, end),
    )
    accepted_run = decision.accepted
    is_current = accepted_run is not None and decision.running is not None and accepted_run.frozen.hash == decision.running.hash
    status = job_status(
        view,
        decision.running,
        cluster=accepted_run.cluster if accepted_run is not None and is_current else None,
        pending=decision.running is not None and accepted_run is not None and not is_current,
        stop=stopped,
        active=active,
        placement=place.status if is_placing else None,
        interference=meddling,
    )
    write, again = due(observed.status, status, now)
    looks = (
        again,
        _next_look(view),
        until_overdue(observed, active, now),
        until_start_overdue(observed, now) if not end.finished else None,
        None if end.finished else until_overdue_pods(observed, now),
        lost.again_seconds,
        place.again_seconds,
        until_forgotten,
        expires if expires and expires > 0 else None,
    )
    return Plan(
        create=create,
        claims=() if taken_back else absent_claims(observed, decision),
        taken_back=taken_back,
        at_once=decision.starts and observed.obstacle is None and not any_foreign(observed, create),
        half_made=(own,) if is_half_made and own is not None and not is_terminating(own) else (),
        apply=apply,
        delete=delete,
        force_delete=() if context.clock_off else lost.replace,
        status=status if write else None,
        passing=write and is_passing(observed.status, status),
        events=(*mended, *(events_between(observed.status, status) if write else ())),
        again_seconds=min((max(look, 0.1) for look in looks if look is not None), default=None),
        run=None if decision.running is None else GangRun(decision.running, decision.proven),
    )


def _newest(observed: Observed, received: ReceivedReport | None) -> ReceivedReport | None:
    """An end counts for ever; anything else while its pod is there."""
    received = None if received is None else replace(received, report=with_failures_known(observed.status, received.report))
    ended = received is not None and received.report.state in ENDS
    if received is not None and ended and not is_of_an_earlier_retry(observed, received):
        return received
    return current_report(observed, received)


def _has_ended(observed: Observed, received: ReceivedReport | None, *, has_failed: bool) -> bool:
    reported = received is not None and received.report.state in ENDS
    return reported or is_true(observed.status, "Complete") or has_failed


def _ending(
    observed: Observed,
    received: ReceivedReport | None,
    stopped: StopStatus | None,
    late: Notice | None,
    stuck: Notice | None,
    *,
    has_failed: bool,
) -> Ending:
    """Return the end in status, which is final; else the one that the gang reports; else the deadline, once the stop it asked for is
    over.
    """
    failed = condition(observed.status, "Failed") if has_failed else {}
    state = received.report.state if received is not None else None
    if is_true(observed.status, "Complete") or (not failed and state is State.COMPLETE):
        return Ending(complete=True)
    if failed and failed["reason"] == Reason.DEADLINE_EXCEEDED:
        return Ending(failed=True, reason=Reason.DEADLINE_EXCEEDED, message=failed["message"])
    if failed or state is State.FAILED:
        return Ending(failed=True, reason=_failure_reason(failed, received), message=_failure_message(observed, received))
    if late is not None and observed.at_zero:
        how = stopped.message if stopped is not None else "no rank ever ran"
        return Ending(failed=True, reason=Reason.DEADLINE_EXCEEDED, message=f"{late.message}; {how}")
    return Ending(failed=True, reason=Reason.START_TIMEOUT, message=stuck.message) if stuck is not None else Ending()


def _stop_message(observed: Observed, word: Report | None, stopped: StopStatus | None) -> str:
    """Return what came of the stop of the newest attempt, if that was stopped."""
    attempt = word.attempt if word is not None else observed.status.get("attempts")
    return stopped.message if stopped is not None and stopped.attempt == attempt else ""


def _decide(
    observed: Observed,
    accepted_or_not: Accepted | Notice,
    pods_now: Gang,
    late: Notice | None,
    place: Placing,
    *,
    finished: bool,
    pods_stay: bool,
    begun: bool,
) -> Decision:
    accepted = accepted_or_not if isinstance(accepted_or_not, Accepted) else None
    refusal = accepted_or_not if isinstance(accepted_or_not, Notice) else None
    suspended = is_stopped(observed)
    if observed.at_zero:
        if accepted is not None and not (finished or suspended):
            refusal = missing_service_account(observed, accepted) or _previous(observed) or claim_going(observed, accepted)
        starts = accepted is not None and refusal is None and not (finished or suspended or place.is_away)
        running = accepted.frozen if starts and accepted is not None else None
        replicas = running.nodes if running is not None else 0
        return Decision(accepted, refusal or _obstacle(observed, finished), running, replicas, starts)
    running = pods_now.run
    remains = _foreign(observed) or _previous(observed) if running is None else None
    stop = None if finished else stopping(observed, accepted, running, late, place, begun=begun)
    nodes = running.nodes if running is not None else 0 if remains is not None else observed.replicas
    replicas = 0 if (finished and not pods_stay) or suspended or stop is not None else nodes
    refusal = refusal or remains or pods_now.trouble or _obstacle(observed, finished)
    if refusal is None and not finished:
        gone = service_account_gone(observed, accepted) if accepted is not None else None
        refusal = gone or claim_going(observed, accepted)
    return Decision(accepted, refusal, running, replicas, starts=False, stopping=stop, proven=pods_now.proven)


def _obstacle(observed: Observed, finished: bool) -> Notice | None:
    return None if finished else observed.obstacle


def _previous(observed: Observed) -> Notice | None:
    """Objects of a deleted job of the same name that the garbage collector has not removed yet."""
    remaining = [
        f"{kind} {name}"
        for (kind, name), item in observed.objects.items()
        if owner_uid(item) != observed.uid and is_of_namesake(observed, item) and (is_terminating(item) or kind == "StatefulSet")
    ]
    if observed.stateful_set is None:
        remaining += [f"Pod {pod['metadata']['name']}" for pod in observed.pods]
    if not remaining:
        return None
    return Notice(Reason.PREVIOUS_JOB_REMAINS, f"an earlier job of this name is still being removed: {', '.join(sorted(remaining))}")


def _foreign(observed: Observed) -> Notice | None:
    """A StatefulSet with pods that carries our labels, but is somebody else's: an in-namespace run, say."""
    item = observed.stateful_set
    if item is None or item is observed.own_stateful_set or is_of_namesake(observed, item):
        return None
    return name_taken(observed, "StatefulSet", item)


def _failure_reason(stored: Object, received: ReceivedReport | None) -> str:
    if stored:
        return str(stored["reason"])
    result = received.report.preflight if received is not None else None
    return Reason.PREFLIGHT_FAILED if result is not None and not result.ok else Reason.RANKS_FAILED


def _failure_message(observed: Observed, received: ReceivedReport | None) -> str:
    if received is not None and received.report.failure is not None:
        return received.report.failure.message
    if is_true(observed.status, "Failed"):
        return str(condition(observed.status, "Failed")["message"])
    return received.report.message if received else ""


def _is_pending(decision: Decision, end: Ending) -> bool:
    """Return True if a person's change has to wait until they start the job anew."""
    accepted, running = decision.accepted, decision.running
    if accepted is None or running is None or end.finished or decision.replicas == 0 or accepted.frozen.hash == running.hash:
        return False
    return differs_by_user(running, accepted.frozen)


def _next_look(view: View) -> float | None:
    """A silence, and the end of a hold, are noticed without anything happening."""
    if view.held_until is not None:
        return view.held_until - view.now + 0.1
    since = None if view.end.finished else heard_until(view)
    if since is None:
        return None
    left = since + SILENT_SECONDS - view.now
    return left + 1.0 if left > 0 else None
