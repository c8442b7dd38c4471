"""The conditions of a job: every one always there, each with a reason from `Reason` and a message that a person can act on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lockstep.api.names import pod_name
from lockstep.api.objects import condition, conditions_of, go_on_words, is_running, is_true
from lockstep.api.status import REASON_PATTERN, Condition, ConditionStatus, ConditionType
from lockstep.api.statuspart import unchecked
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, ReceivedReport, start_anew
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.interactive import is_ready, is_released, ready_words, released_words, resume_command, running_words
from lockstep.plan.reconcile.placing import Placing
from lockstep.plan.reconcile.podfacts import Verdict, images_differ, one_node_claims_shared
from lockstep.plan.times import seconds_of, timestamp
from lockstep.plan.waiting.containers import is_scheduled, why_cut_off, why_not_started
from lockstep.plan.waiting.notcreated import why_not_created, why_not_made, why_still_there
from lockstep.plan.waiting.unscheduled import why_unscheduled
from lockstep_gang.contract.report import CheckpointReport, Report, State, Straggler
from lockstep_spec.words import number_of, printable_line

SILENT_SECONDS = 60.0
NOT_STARTED = "NotStarted"
TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


_ON_ITS_WAY = (Reason.STARTING, Reason.WAITING_FOR_REPORT, Reason.WAITING_FOR_RANKS)


@dataclass(frozen=True)
class Fact:
    """Status, reason and message of a condition now; `with_times` adds since when."""

    status: ConditionStatus
    reason: str
    message: str


@dataclass(frozen=True)
class Ending:
    """End of the job, and why it failed."""

    complete: bool = False
    failed: bool = False
    reason: str = Reason.RANKS_FAILED
    message: str = ""

    @property
    def finished(self) -> bool:
        return self.complete or self.failed


@dataclass(frozen=True, kw_only=True)
class View:
    """Input of the conditions: what was observed, and what reconcile has decided about it."""

    observed: Observed
    wanted_pods: int
    now: float
    refusal: Notice | None = None
    received: ReceivedReport | None = None
    """The report of the pod that is node 0 now."""
    suspend: bool = False
    end: Ending = field(default_factory=Ending)
    stopping: Notice | None = None
    """Reason why the present pods are stopped now, and a sentence."""
    stopped: str = ""
    """Result of the newest attempt's stop."""
    last_word: Report | None = None
    """Report of a node 0 whose pod is gone."""
    commit: CheckpointReport | None = None
    """The newest that was reported, also by a node 0 whose pod is gone."""
    held_until: float | None = None
    """The job has failed and its pods stay until then."""
    lost: Verdict = field(default_factory=Verdict)
    listening_since: float = 0.0
    """Time at which this operator began to take reports, seconds since the epoch; 0: it takes none."""
    hears: bool = True
    """True if reports reach this process: a verb that only looks at a job gets none."""
    place: Placing = field(default_factory=Placing)
    made_anew: str = ""
    """Keys of the operator that were made anew since the pods were started."""
    interference: str = ""
    """Recent change that somebody else made to the job's objects, and Lockstep's answer."""
    deprecated: str = ""
    """Deprecated fields and values of the job."""
    pending: bool = False
    """Spec or cluster were changed since, and these pods can't be given them."""

    @property
    def report(self) -> Report | None:
        return None if self.received is None else self.received.report


def facts(view: View) -> dict[ConditionType, Fact]:
    scheduled = pods_scheduled(view)
    ready = ranks_ready(view, scheduled)
    restarting = _restarting(view)
    return {
        ConditionType.ACCEPTED: _accepted(view),
        ConditionType.SUSPENDED: _suspended(view),
        ConditionType.PODS_SCHEDULED: scheduled,
        ConditionType.NODES_HEALTHY: _nodes_healthy(view),
        ConditionType.RANKS_READY: ready,
        ConditionType.FABRIC_VERIFIED: _fabric(view),
        ConditionType.STRAGGLING: _straggling(view),
        ConditionType.SAVES_FAILING: _saves_failing(view),
        ConditionType.PROGRESSING: progressing(view, scheduled, ready, restarting),
        ConditionType.CHECKPOINT_COMMITTED: _checkpoint(view),
        ConditionType.RESTARTING: restarting,
        ConditionType.COMPLETE: _complete(view),
        ConditionType.FAILED: _failed(view),
        ConditionType.HELD: _held(view),
    }


def _accepted(view: View) -> Fact:
    if view.refusal is not None:
        return Fact(FALSE, view.refusal.reason, view.refusal.message)
    changed = f"changes made since the start wait for the next one: {start_anew(view.observed)}" if view.pending else ""
    notes = (
        view.made_anew,
        changed,
        one_node_claims_shared(view.observed),
        images_differ(view.observed),
        view.interference,
        view.deprecated,
    )
    message = "; ".join(filter(None, ("the job fits its cluster", *notes)))
    return Fact(TRUE, Reason.CHANGE_PENDING if view.pending else Reason.ACCEPTED, message)


def _suspended(view: View) -> Fact:
    if not view.suspend or view.end.finished:
        return Fact(FALSE, Reason.NOT_SUSPENDED, "spec.suspend is false" if not view.suspend else "the job has finished")
    if view.observed.pods:
        return Fact(FALSE, Reason.STOPPING, _pods_left(view))
    if is_released(view.observed):
        return Fact(TRUE, Reason.IDLE, released_words(view.observed))
    stopped = f"{view.stopped}; " if view.stopped else ""
    return Fact(TRUE, Reason.SUSPENDED, f"{stopped}no pods; to {_go_on(view)}: {resume_command(view.observed)}")


def _pods_left(view: View) -> str:
    count, late = len(view.observed.pods), why_still_there(view.observed, view.now)
    left = f"{number_of(count, 'pod')} {'is' if count == 1 else 'are'} still there" + (f": {late.message}" if late is not None else "")
    return f"ranks save and stop; {left}" if any(map(is_running, view.observed.pods)) else left


def _no_pods(view: View) -> Fact | None:
    if view.end.finished and view.held_until is None:
        return Fact(FALSE, Reason.FINISHED, "the job has finished and needs no pods")
    if view.suspend:
        return Fact(FALSE, Reason.SUSPENDED, "the job is suspended")
    if view.stopping is not None:
        return Fact(FALSE, view.stopping.reason, f"{view.stopping.message}: {_pods_left(view)}")
    if view.refusal is not None and not view.observed.pods:
        return Fact(FALSE, Reason.NOT_ACCEPTED, "condition Accepted says why there are no pods")
    if view.place.is_away:
        return Fact(FALSE, Reason.NODES_RELEASED, view.place.message)
    return None


def pods_scheduled(view: View) -> Fact:
    pods, wanted = view.observed.pods, view.wanted_pods
    absent = _no_pods(view)
    if absent is not None:
        return absent
    if len(pods) < wanted:
        refused = why_not_created(view.observed)
        why = why_not_made(view.observed, view.now) if refused is None else refused
        reason = Reason.PODS_NOT_CREATED if refused is None else Reason.PODS_REFUSED
        return Fact(FALSE, reason, f"{len(pods)} of {wanted} pods created" + (f": {why}" if why else "") + _holding(view))
    scheduled = sum(is_scheduled(pod) for pod in pods)
    if scheduled < len(pods):
        why_not = why_unscheduled(view.observed)
        return Fact(FALSE, why_not.reason, f"{scheduled} of {wanted} pods scheduled: {why_not.message}" + _holding(view))
    return Fact(TRUE, Reason.ALL_SCHEDULED, f"{scheduled} of {wanted} pods scheduled")


def _holding(view: View) -> str:
    return f"; {view.place.message}" if view.place.message else ""


def ranks_ready(view: View, scheduled: Fact) -> Fact:  # noqa: PLR0911 (a table of cases reads best as one)
    absent = _no_pods(view)
    if absent is not None:
        return absent
    if view.held_until is not None:
        return Fact(FALSE, Reason.FINISHED, "the job has failed; condition Held says how long its pods stay")
    running = sum(is_running(pod) for pod in view.observed.pods)
    cut_off = why_cut_off(view.observed, view.report) if view.hears else None
    trouble = why_not_started(view.observed) or cut_off or why_still_there(view.observed, view.now)
    if trouble is not None:
        return Fact(FALSE, trouble.reason, f"{running} of {view.wanted_pods} pods run: {trouble.message}")
    if scheduled.status is not TRUE:
        return Fact(FALSE, Reason.PODS_NOT_SCHEDULED, "condition PodsScheduled says what is missing")
    if running < view.wanted_pods:
        return Fact(FALSE, Reason.STARTING, f"{running} of {view.wanted_pods} pods run")
    if view.report is None:
        return _remembered(view, ConditionType.RANKS_READY) or Fact(
            FALSE, Reason.WAITING_FOR_REPORT, "all pods run; node 0 has not reported yet"
        )
    ranks = view.report.ranks
    if is_ready(view.report):
        return Fact(FALSE, Reason.READY, "nothing runs, so there are no ranks")
    if preflight_stops(view.report) and view.report.interactive is None:
        return Fact(FALSE, Reason.PREFLIGHT_FAILED, view.report.message)
    if ranks.ready < ranks.desired:
        return Fact(FALSE, Reason.WAITING_FOR_RANKS, f"{ranks.ready} of {ranks.desired} ranks ready: {view.report.message}")
    return Fact(TRUE, Reason.ALL_RANKS_READY, f"{ranks.ready} of {ranks.desired} ranks ready")


def preflight_stops(report: Report) -> bool:
    """Return True if preflight keeps the ranks from being started."""
    failed = report.preflight is not None and not report.preflight.ok
    return failed and report.state in (State.WAITING, State.BACKING_OFF)


def _remembered(view: View, kind: ConditionType) -> Fact | None:
    """Return the condition as status has it, for an operator that has just started and waits for the next report of ranks that ran on."""
    return _stored(view, kind) if is_true(view.observed.status, ConditionType.RANKS_READY) else None


def _stored(view: View, kind: ConditionType) -> Fact | None:
    """Return the condition as status has it; None if it has none yet."""
    stored = condition(view.observed.status, kind)
    return Fact(ConditionStatus(stored["status"]), stored["reason"], stored["message"]) if stored else None


def progressing(view: View, scheduled: Fact, ready: Fact, restarting: Fact) -> Fact:  # noqa: PLR0911
    """The summary. Its reason is the one word that `kubectl get tj` shows."""
    if view.end.complete:
        return Fact(FALSE, Reason.COMPLETE, "the job is complete")
    if view.end.failed:
        return Fact(FALSE, Reason.FAILED, view.end.message)
    if view.suspend:
        return Fact(FALSE, Reason.STOPPING if view.observed.pods else Reason.SUSPENDED, _suspended(view).message)
    if view.stopping is not None:
        again = view.stopping.reason not in (Reason.DEADLINE_EXCEEDED, Reason.NODES_RELEASED)
        return Fact(TRUE if again else FALSE, view.stopping.reason, f"{view.stopping.message}: {_pods_left(view)}")
    if view.refusal is not None and not view.observed.pods:
        return Fact(FALSE, view.refusal.reason, view.refusal.message)
    if scheduled.status is not TRUE:
        also = f"; {ready.message}" if ready.reason not in (scheduled.reason, Reason.PODS_NOT_SCHEDULED, *_ON_ITS_WAY) else ""
        return Fact(FALSE, scheduled.reason, scheduled.message + also)
    if is_silent(view):
        why = f"; {view.made_anew}" if view.made_anew else ""
        return Fact(UNKNOWN, Reason.NO_REPORT, f"node 0 has not reported for more than {SILENT_SECONDS:.0f} s; its pod runs{why}")
    if view.report is not None and (held := _held_up(view.report)) is not None:
        return held
    if restarting.status is TRUE and ready.reason in (Reason.ALL_RANKS_READY, Reason.READY, *_ON_ITS_WAY):
        return Fact(TRUE, Reason.RESTARTING, restarting.message)
    if ready.status is not TRUE and ready.reason != Reason.READY:
        return _without_all_ranks(view, ready)
    if view.report is not None and is_ready(view.report):
        return Fact(TRUE, Reason.READY, ready_words(view.observed, view.report))
    if view.report is None:
        return Fact(TRUE, Reason.RUNNING, "all ranks run")
    return _runs(view.report)


def reported_progress(report: Report, more: str = "") -> Fact:
    """Return the summary of a job that is no pods' and whose agents run, by its coordinator's newest report. `more`: words for its end."""
    restarting = _restart_of(report)
    if (held := _held_up(report)) is not None:
        return held
    if restarting.status is TRUE:
        return Fact(TRUE, Reason.RESTARTING, restarting.message)
    if preflight_stops(report):
        return Fact(FALSE, Reason.PREFLIGHT_FAILED, report.message)
    if report.state is not State.RUNNING:
        return Fact(TRUE, Reason.STARTING, f"{report.ranks.ready} of {report.ranks.desired} ranks ready: {report.message}")
    return _runs(report, more)


def _held_up(report: Report) -> Fact | None:
    """Return what the coordinator says that it waits for; None where it doesn't."""
    if (unwritten := report.unwritten) is not None:
        waits = f"what comes after {report.failure.message}" if report.failure is not None else "the next start or end"
        message = f"{unwritten.problem}; since {unwritten.since} this holds up {waits}. The job goes on by itself when it is written"
        return Fact(FALSE, Reason.RECORD_UNWRITTEN, message)
    return Fact(UNKNOWN, Reason.NODE_NOT_HEARD, report.unheard) if report.unheard else None


def _runs(report: Report, more: str = "") -> Fact:
    saves = "; saves fail: condition SavesFailing says why" if report.failed_saves is not None else ""
    return Fact(TRUE, Reason.RUNNING, running_words(report) + saves + more)


def waits_for(view: View) -> str:
    """Obstacle that keeps pods from running; '' once all of them run."""
    scheduled = pods_scheduled(view)
    ready = ranks_ready(view, scheduled)
    summary = progressing(view, scheduled, ready, Fact(FALSE, Reason.NOT_RESTARTING, ""))
    return "" if ready.reason in (Reason.WAITING_FOR_REPORT, Reason.WAITING_FOR_RANKS, Reason.ALL_RANKS_READY) else summary.message


def _without_all_ranks(view: View, ready: Fact) -> Fact:
    """Ranks that have ended, or are being stopped, are past the start."""
    if ready.reason not in _ON_ITS_WAY:
        return Fact(FALSE, ready.reason, ready.message)
    began = ready.reason == Reason.WAITING_FOR_RANKS and view.report is not None and view.report.state is State.RUNNING
    return Fact(TRUE, Reason.RUNNING if began else Reason.STARTING, ready.message)


def is_silent(view: View) -> bool:
    """Return True if node 0 should have reported and has not, whichever replica led when it last did."""
    since = heard_until(view)
    if since is None:
        return False
    before = condition(view.observed.status, ConditionType.PROGRESSING)
    if view.received is None and before.get("reason") == Reason.NO_REPORT:
        # An earlier leader has waited already. Only a pod that was started since may be about to speak.
        return _last_start(view) <= seconds_of(before["lastTransitionTime"]) or view.now - since > SILENT_SECONDS
    return view.now - since > SILENT_SECONDS


def heard_until(view: View) -> float | None:
    """The newest report's time; where this operator has none, since when it could have had one. None: no report is awaited."""
    pods = view.observed.pods
    if not pods or len(pods) < view.wanted_pods or not all(map(is_running, pods)):
        return None
    if view.received is not None:
        return view.received.received
    return max(view.listening_since, _last_start(view)) if view.listening_since else None


def _last_start(view: View) -> float:
    """Start of the pods' newest container, by its Node's clock; a clock that is ahead doesn't prolong the wait."""
    states = [status["state"] for pod in view.observed.pods for status in pod.get("status", {}).get("containerStatuses") or []]
    starts = [seconds_of(state["running"]["startedAt"]) for state in states if (state.get("running") or {}).get("startedAt")]
    return max((start for start in starts if start <= view.now), default=0.0)


def _restarting(view: View) -> Fact:
    if view.end.finished or view.suspend or view.stopping is not None or view.report is None:
        return Fact(FALSE, Reason.NOT_RESTARTING, "no restart is under way")
    return _restart_of(view.report)


def _restart_of(report: Report) -> Fact:
    """Return whether ranks of a job that goes on are started again, by its coordinator's newest report."""
    starts_again = report.restarts > 0 and report.state in (State.STARTING, State.WAITING)
    if report.state is State.BACKING_OFF or starts_again:
        why = f": {report.failure.message}" if report.failure is not None else ""
        return Fact(TRUE, Reason.RANKS_FAILED, f"restart {report.restarts + (not starts_again)} of all ranks{why}")
    return Fact(FALSE, Reason.NOT_RESTARTING, "no restart is under way")


def _nodes_healthy(view: View) -> Fact:
    if view.lost.reason:
        return Fact(FALSE, Reason(view.lost.reason), view.lost.message)
    if not view.observed.sees_nodes:
        return Fact(UNKNOWN, Reason.NODES_NOT_SEEN, _nodes_not_seen(view.observed))
    return Fact(TRUE, Reason.ALL_NODES_READY, "no pod is on a lost Node")


def _nodes_not_seen(observed: Observed) -> str:
    """Return what the operator can't do without seeing Nodes."""
    replaces = observed.restart.get("lostNodeSeconds") is not None
    return (
        "this namespace's operator has no right to see Nodes: it can't notice lost Nodes, group ranks by rack, or leave out nodes that"
        " preflight finds bad" + ("; restart.lostNodeSeconds has no effect" if replaces else "")
    )


def _fabric(view: View) -> Fact:
    """FabricVerified: what was verified stays true while there is no report, and after the end."""
    report = view.report.fabric if view.report is not None else None
    if report is not None:
        verified = ConditionStatus(report.verified.value) if report.verified.is_known else UNKNOWN
        reason = report.reason.value if re.search(REASON_PATTERN, report.reason.value) else UNKNOWN.value
        return Fact(verified, reason, report.message)
    return _stored(view, ConditionType.FABRIC_VERIFIED) or Fact(UNKNOWN, NOT_STARTED, "no rank has been started")


def _straggling(view: View) -> Fact:
    slow = view.report.stragglers if view.report is not None and not (view.end.finished or view.suspend) else ()
    if not slow:
        return Fact(FALSE, Reason.NO_STRAGGLER, "no rank is slower than the others")
    slowness = "; ".join(_slowness(view, straggler) for straggler in slow)
    return Fact(
        TRUE, Reason.SLOW_RANK, f"{slowness}. All ranks wait for the slowest: compare its node's clocks, temperature, disks and neighbors"
    )


def _saves_failing(view: View) -> Fact:
    before = _stored(view, ConditionType.SAVES_FAILING)
    if view.report is None and not view.end.finished and view.observed.pods and before is not None and before.status is TRUE:
        return before  # as an earlier leader heard it
    failed = view.report.failed_saves if view.report is not None and not view.end.complete else None
    if failed is None:
        return Fact(FALSE, Reason.SAVES_WORK, "no save has failed since the newest commit")
    commit = view.report.checkpoint if view.report is not None else None
    newest = "nothing has been committed" if commit is None else f"the newest commit is step {commit.step}, of {commit.time}"
    often = "the save" if failed.count == 1 else f"{failed.count} saves in a row, the last one"
    return Fact(
        TRUE,
        Reason.SAVE_FAILED,
        f"{often} of step {failed.step} failed, since {failed.since}: {_with_nodes(view, failed.problem)}; {newest}: a failure now loses"
        " all steps since",
    )


def _with_nodes(view: View, problem: str) -> str:
    """Return the problem with the names of Nodes behind the numbers of the job's nodes."""

    def named(match: re.Match[str]) -> str:
        name = view.observed.node_name(int(match[1]))
        return f"{match[0]} ({name})" if name else match[0]

    return re.sub(r"\bnode (\d{1,4})\b", named, problem)


def _slowness(view: View, slow: Straggler) -> str:
    name = view.observed.node_name(slow.node)
    where = f"node {slow.node} ({name})" if name else f"node {slow.node}"
    return f"rank {slow.rank} on {where} takes {slow.slowdown} times as long as the others, over {slow.steps} steps"


def _checkpoint(view: View) -> Fact:
    report = view.report or view.last_word
    if (report is not None and report.checkpoint is not None) or view.commit is not None or view.observed.status.get("checkpoint"):
        return Fact(TRUE, Reason.COMMITTED, "status.checkpoint names the newest commit")
    return Fact(FALSE, Reason.NO_CHECKPOINT, "no checkpoint has been committed")


def _go_on(view: View) -> str:
    """Return what the job's next start does, as it follows "to"."""
    return go_on_words(view.observed.job, committed=_checkpoint(view).status is TRUE)


def _complete(view: View) -> Fact:
    if view.end.complete:
        result = (view.report.result if view.report is not None else None) or view.observed.status_part("result")
        note = printable_line(str(result["note"])) if result.get("note") else "status.result has the results"
        return Fact(TRUE, Reason.COMPLETE, f"every rank ended well; {note}")
    return Fact(
        FALSE,
        Reason.FAILED if view.end.failed else Reason.NOT_FINISHED,
        "the job has failed" if view.end.failed else "the job has not finished",
    )


def _failed(view: View) -> Fact:
    if view.end.failed:
        return Fact(TRUE, view.end.reason, view.end.message)
    stored = condition(view.observed.status, ConditionType.FAILED)
    if stored.get("status") == TRUE or stored.get("reason") == Reason.RETRIED:
        return Fact(FALSE, Reason.RETRIED, f"restart.retry was raised, to {_go_on(view)}")
    return Fact(FALSE, Reason.NOT_FAILED, "the job has not failed")


def _held(view: View) -> Fact:
    if view.held_until is None:
        return Fact(FALSE, Reason.NOT_HELD, "no pods are kept after a failure")
    observed = view.observed
    sooner = (
        f"kubectl patch tj {observed.name} -n {observed.namespace} --type merge -p"
        ' \'{"spec":{"restart":{"holdOnFailureSeconds":0}}}\''
    )
    stay = f"{len(observed.pods)} pods and their GPUs stay until {timestamp(view.held_until)}"
    look = f"kubectl exec -it {pod_name(observed.name, 0)} -n {observed.namespace} -- sh"
    return Fact(TRUE, Reason.HOLDING, f"{stay} so that you can look into them ({look}); to end the hold sooner: {sooner}")


def with_times(observed: Observed, facts: dict[ConditionType, Fact], now: float) -> list[Condition]:
    """Return metav1.Conditions; lastTransitionTime changes with the status only, as Kubernetes defines it."""
    before = conditions_of(observed.status)
    return [
        unchecked(
            Condition,
            type=kind,
            status=fact.status,
            reason=fact.reason,
            message=printable_line(fact.message),
            last_transition_time=(
                before[kind]["lastTransitionTime"] if before.get(kind, {}).get("status") == fact.status else timestamp(now)
            ),
            observed_generation=observed.generation,
        )
        for kind, fact in facts.items()
    ]
