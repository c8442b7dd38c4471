"""Answers of `lockstep why`: the first cause, its cost, what the job waits for now, and what to type next (pure)."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from lockstep.api.objects import Object, condition, is_true
from lockstep.api.status import PlacementStatus
from lockstep.plan.observed import Observed
from lockstep.plan.pages.remedies import Step, leave_namespace, next_steps
from lockstep.plan.pages.table import Unheard
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.conditions import View, waits_for
from lockstep.plan.reconcile.placing import holding_words
from lockstep_spec.words import duration, number_of, printable_line

LABEL_COLUMNS = 13
SHOWN_LINES = 10


class Where(StrEnum):
    """State of a job in one word."""

    UNSEEN = "Unseen"  # the operator has not said anything of it
    REFUSED = "Refused"  # as it is written it can't start
    WAITING = "Waiting"  # something keeps its pods from running
    STARTING = "Starting"
    READY = "Ready"  # a dev environment in which nothing runs
    RUNNING = "Running"
    RESTARTING = "Restarting"
    NODE_NOT_HEARD = "NodeNotHeard"  # node 0 waits for another node that says nothing
    RECORD_UNWRITTEN = "RecordUnwritten"  # node 0 can't write the job's record, so nothing starts or ends
    UNREACHABLE = "Unreachable"  # the host of node 0 doesn't answer, so nobody knows how the job does
    SILENT = "Silent"  # its pods run and nothing is heard of them
    STOPPING = "Stopping"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


ENDED_OR_UNSEEN = frozenset({Where.UNSEEN, Where.COMPLETE, Where.FAILED})
IN_ITS_WAY = frozenset({
    Where.UNSEEN, Where.REFUSED, Where.WAITING, Where.NODE_NOT_HEARD, Where.RECORD_UNWRITTEN, Where.UNREACHABLE, Where.SILENT, Where.FAILED,
})  # fmt: skip


class ClusterHome(NamedTuple):
    """Namespace of a cluster's jobs, as its file states it."""

    cluster: str
    namespace: str


@dataclass(frozen=True)
class Answer:
    """All that `lockstep why` says."""

    job: str
    namespace: str
    state: Where
    summary: str
    first_cause: str
    last_lines: tuple[str, ...]
    cost: str
    held: str
    fabric: str
    saves: str
    """Reason why saves fail, and the cost of a failure now."""
    nodes: str
    """Advice about a Node that is lost."""
    changed: str
    """Changes that somebody else made to the job's objects lately."""
    next: tuple[Step, ...]
    not_seen: tuple[str, ...]
    """Parts that could not be looked at, and why."""
    says: tuple[str, ...] = ()
    """Lines about the way to the operator in the logs of pods of which no report comes."""
    stale: str = ""
    """Time since which nobody has kept the status up to date, and why."""
    refused: str = ""
    """Reason why a job whose pods run could not start as it is now."""
    restarted: str = ""
    """Reason of the last restart of a job that runs."""
    slow: str = ""
    """Ranks that the others wait for."""
    accepted: str = ""
    """Additions of condition Accepted while it is True: changes that wait for the next start, warnings."""

    @property
    def is_well(self) -> bool:
        """Nothing keeps the job from what was asked of it."""
        return self.state not in IN_ITS_WAY and not self.stale

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value}


def why(
    observed: Observed,
    not_seen: tuple[str, ...],
    now: float,
    unserved: str = "",
    unheard: Unheard | None = None,
    home: ClusterHome | None = None,
) -> Answer:
    """`observed`: the job with what its asker may see around it. `not_seen`: what they may not, one sentence each. `unserved`: why no
    operator works in its namespace. `home`: where the cluster's jobs are, if that is known.
    """
    status = observed.status
    state = where(observed)
    failure = status.get("failure") or {}
    summary = _summary(state, observed, now)
    strayed = _strayed(observed, home) if state is Where.REFUSED else ""
    has_failed = state in (Where.FAILED, Where.RESTARTING, Where.RECORD_UNWRITTEN)
    stale = unheard is not None and state not in ENDED_OR_UNSEEN
    return Answer(
        job=observed.name,
        namespace=observed.namespace,
        state=state,
        summary=(unserved or summary) if state is Where.UNSEEN else f"{strayed}{summary}",
        first_cause=first_cause(failure, summary, "host" if observed.hosts else "Node") if has_failed else "",
        last_lines=tuple(failure.get("lastLines", [])[-SHOWN_LINES:]) if has_failed else (),
        cost=cost(status),
        held=_message(status, "Held", "True"),
        fabric=_message(status, "FabricVerified", "False"),
        saves=_failing_saves(status),
        slow=_message(status, "Straggling", "True"),
        accepted=_added(status),
        changed=_changed(status),
        nodes=_message(status, "NodesHealthy", "False"),
        next=(
            *(leave_namespace(observed, home.namespace) if home is not None and strayed else ()),
            *next_steps(observed, state, held=is_true(status, "Held"), message=summary, stale=stale),
        ),
        stale=unheard.text(now) if unheard is not None and stale else "",
        refused=_message(status, "Accepted", "False") if observed.pods and state not in ENDED_OR_UNSEEN else "",
        restarted=_last_restart(status) if state in (Where.RUNNING, Where.STARTING, Where.WAITING) else "",
        not_seen=(*not_seen, f"what became of it since: {unserved}") if unserved and state not in ENDED_OR_UNSEEN else not_seen,
    )


def _strayed(observed: Observed, home: ClusterHome | None) -> str:
    """Question to put before the refusal of a job that lacks its service account, and is in another namespace than its cluster's jobs; ''
    for any other.
    """
    if home is None or home.namespace == observed.namespace:
        return ""
    if condition(observed.status, "Accepted").get("reason") != Reason.SERVICE_ACCOUNT_NOT_FOUND:
        return ""
    return f"cluster {home.cluster}'s jobs run in namespace {home.namespace}: was -n {home.namespace} forgotten? "


def is_awaited(observed: Observed) -> bool:
    """True if its pods run and no report comes from them: then only their logs say why."""
    reasons = {condition(observed.status, kind).get("reason") for kind in ("RanksReady", "Progressing")}
    return bool(reasons & {Reason.WAITING_FOR_REPORT, Reason.NO_REPORT})


def where(observed: Observed) -> Where:  # noqa: PLR0911 (a table of cases reads best as one)
    """State by the conditions; Progressing's reason is their summary."""
    status = observed.status
    progress = condition(status, "Progressing") or {"status": "", "reason": ""}
    if not status.get("conditions"):
        return Where.UNSEEN
    for name, state in (("Complete", Where.COMPLETE), ("Failed", Where.FAILED)):
        if is_true(status, name):
            return state
    if progress["reason"] in (Reason.SUSPENDED, Reason.STOPPING, Reason.NODE_NOT_HEARD, Reason.RECORD_UNWRITTEN, Reason.UNREACHABLE):
        return Where(progress["reason"])
    if condition(status, "Accepted").get("status") == "False" and not observed.pods:
        return Where.REFUSED
    if progress["status"] == "Unknown":
        return Where.SILENT
    if is_true(status, "Restarting"):
        return Where.RESTARTING
    if progress["reason"] in (Reason.RUNNING, Reason.READY):
        return Where(progress["reason"])
    return Where.STARTING if progress["status"] == "True" else Where.WAITING


def _message(status: Object, kind: str, value: str | None = None) -> str:
    """Message of a condition; '' if its status is another than `value`, or there is no such condition."""
    stored = condition(status, kind)
    return str(stored.get("message", "")) if value in (None, stored.get("status")) else ""


def _added(status: Object) -> str:
    return _message(status, "Accepted", "True").partition("; ")[2]


def _changed(status: Object) -> str:
    lately = str((status.get("interference") or {}).get("message", ""))
    return "" if lately in _added(status) else lately


def _failing_saves(status: Object) -> str:
    """Message of condition SavesFailing with the steps that a failure would repeat now."""
    if not is_true(status, "SavesFailing"):
        return ""
    step, commit = (status.get("trainer") or {}).get("step"), (status.get("checkpoint") or {}).get("lastCommittedStep", 0)
    steps = f" ({number_of(step - commit, 'step')} by now)" if step is not None and step > commit else ""
    return _message(status, "SavesFailing") + steps


def _summary(state: Where, observed: Observed, now: float) -> str:
    if state is Where.UNSEEN:
        return "the operator has not looked at it yet: is it running? (lockstep doctor)"
    if state is Where.REFUSED:
        return _message(observed.status, "Accepted")
    if state in (Where.WAITING, Where.STARTING) and observed.pods:
        holding = holding_words(PlacementStatus.stored(observed.status.get("placement")), now)
        seen = View(observed=observed, wanted_pods=observed.replicas, now=now, hears=False)  # whoever asks may see more than the operator
        return "; ".join(filter(None, (waits_for(seen) or _message(observed.status, "Progressing"), holding)))
    if state is Where.RUNNING:
        ready = condition(observed.status, "RanksReady")
        if ready.get("reason") != Reason.WAITING_FOR_RANKS:
            return _progress(observed.status)
        steps = _progress(observed.status) if "step" in observed.status.get("trainer", {}) else ""
        return "; ".join(filter(None, (steps, ready["message"])))
    return _message(observed.status, {Where.COMPLETE: "Complete", Where.FAILED: "Failed"}.get(state, "Progressing"))


def _progress(status: Object) -> str:
    trainer, session = status.get("trainer") or {}, status.get("interactive") or {}
    if "script" in session:
        return f"{session['script']} runs since {session.get('since', '?')}, asked for by {session.get('by', '?')}"
    if "step" not in trainer:
        return f"all ranks run, attempt {status.get('attempts', 1)}"
    total = f" of {trainer['totalSteps']}" if "totalSteps" in trainer else ""
    left = f", {duration(trainer['estimatedRemainingSeconds'])} to go" if "estimatedRemainingSeconds" in trainer else ""
    commit = (status.get("checkpoint") or {}).get("lastCommittedStep")
    saved = f"; saved up to step {commit}" if commit is not None else "; nothing is saved yet"
    return f"step {trainer['step']}{total}{left}, attempt {status.get('attempts', 1)}{saved}"


def first_cause(failure: Object, summary: str, machine: str = "Node") -> str:
    """First failure: its rank, node, step and error; not again in the words of the summary. `machine`: kind of what the node is on."""
    if not failure:
        return ""
    who = _rank_on_node(failure) or "the job"
    node_name = f" ({machine} {failure['nodeName']})" if "nodeName" in failure else ""
    step = f", after step {failure['step']}" if failure.get("step") is not None else ""
    how = failure.get("exception") or failure.get("signal") or (f"exit code {failure['exitCode']}" if "exitCode" in failure else "")
    kind = " ".join(filter(None, (failure.get("cause", ""), f"({how})" if how else "")))
    message = failure.get("message", "")
    return f"{who}{node_name}{step}: {': '.join(filter(None, (kind, message if message != summary else '')))}"


def _rank_on_node(failure: Object) -> str:
    return " on ".join(f"{kind} {failure[kind]}" for kind in ("rank", "node") if kind in failure)


def _last_restart(status: Object) -> str:
    """Attempt that ended last, with time, cause and place; '' where none did."""
    history = status.get("restartHistory") or []
    if not history:
        return ""
    last = history[-1]
    who = _rank_on_node(last)
    return f"attempt {last['attempt']} ended at {last['time']}{f', {who}' if who else ''}: {last['cause']}: {last['message']}"


def cost(status: Object) -> str:
    """Cost of all failures so far; '' when there were none."""
    history = status.get("restartHistory") or []
    if not history:
        return ""
    overcome = [entry for entry in history if "downtimeSeconds" in entry]  # an attempt after it has come to a step
    steps = [f"{number_of(sum(entry.get('lostSteps', 0) for entry in overcome), 'step')} done again"] if overcome else []
    if len(overcome) < len(history):
        undone = sum(entry.get("lostSteps", 0) for entry in history if entry not in overcome)
        steps.append(f"{number_of(undone, 'step')} {'lost' if is_true(status, 'Failed') else 'to be done again'}")
    down = sum(entry.get("downtimeSeconds", 0) for entry in history)
    causes = ", ".join(f"{count} {cause}" for cause, count in Counter(entry["cause"] for entry in history).most_common())
    gpus = sum(loss.get("gpuSeconds", 0) for loss in (status.get("goodput") or {}).get("losses", []))
    since = " (the last ten of them counted)" if status.get("restarts", 0) > len(history) else ""
    spent = f", {gpus} GPU-seconds in all" if gpus else ""
    without = [f"{duration(down)} without training"] if overcome else []
    return f"{number_of(len(history), 'failure')} ({causes}){since}: {', '.join([*steps, *without])}{spent}"


def answer_page(answer: Answer) -> str:
    """Page of an answer: a label before every part, the next commands last."""
    parts = [printable_line(f"{answer.job}: {answer.state}: {answer.summary}")]
    labeled = (
        *(("says", [line]) for line in answer.says), ("stale", [answer.stale]), ("first cause", [answer.first_cause]),
        ("last lines", [*answer.last_lines]), ("refused", [answer.refused]),
        ("restarted", [answer.restarted]), ("lost", [answer.cost]), ("saves", [answer.saves]), ("slow", [answer.slow]),
        ("accepted", [answer.accepted]), ("held", [answer.held]), ("changed", [answer.changed]), ("nodes", [answer.nodes]),
        ("fabric", [answer.fabric]), ("not seen", [*answer.not_seen]),
        ("next", [f"{step.command}   # {step.what}" for step in answer.next]),
    )  # fmt: skip
    for label, lines in labeled:
        for index, line in enumerate(filter(None, lines)):
            parts.append(f"{'' if index else label:<{LABEL_COLUMNS}}{printable_line(line)}")
    return "\n".join(parts)
