"""Status of a job on hosts, from what each host says of itself and what its coordinator last reported: as an operator would have written it
(pure).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lockstep.api.objects import Object, condition, go_on_words, typed_command
from lockstep.api.status import ClusterInUse, ConditionStatus, ConditionType, StopStatus
from lockstep.api.statuspart import taken_from, unchecked
from lockstep.plan.hosts.facts import HostFacts, JobOnHost, unread_words
from lockstep.plan.hosts.record import JobRecord
from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.pages.remedies import Step, advice, ask_ranks
from lockstep.plan.pages.why import Where
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.conditions import SILENT_SECONDS, Ending, Fact, View, facts, reported_progress, with_times
from lockstep.plan.reconcile.status import fitted, reported_parts, reported_ranks
from lockstep.plan.times import timestamp
from lockstep_gang.contract.report import ENDS, Report, State, parse_report
from lockstep_spec.codec import ContractError
from lockstep_spec.exits import MEANINGS
from lockstep_spec.words import any_of, duration, named, number_of

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN
UNWRITTEN_SECONDS = 20.0
"""Seconds without a report, which is written every 5, after which that is said."""
UNHEARD = any_of(
    r"^\[lockstep\] (waiting for the (?:coordinator on node 0|run's folder).*|nobody hears this node.*|this agent can't start.*)",
    r"^\[lockstep\] attempt \d+ starts",
)
"""Lines in which an agent says whom it can't reach or why it doesn't run, and the one by which that is over."""

_CAN_T_WRITE = re.compile(r"^\[lockstep\] (cannot write /.*|cannot write the job's record .*)")


@dataclass(frozen=True)
class Seen:
    """All that is known of one job, from everywhere it was started."""

    record: JobRecord
    """That of its newest start."""
    jobs: Mapping[str, JobOnHost]
    """State of the job by host, for those that answered and have a part in this start."""
    problems: Mapping[str, str]
    """Reason by host why one that has a part in it did not answer."""
    missing: tuple[str, ...] = ()
    """Hosts that answered, and have no file of this start."""
    known: str = ""
    """Newest that was seen of its progress before, for when no host tells any; '' where nothing was."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.record.hosts

    @property
    def first(self) -> str:
        """Host of node 0, which has the coordinator."""
        return self.record.hosts[0]

    @property
    def runs(self) -> bool:
        """True if an agent runs anywhere."""
        return any(job.runs for job in self.jobs.values())

    @property
    def stopped(self) -> bool:
        """True if somebody has asked for it to be stopped."""
        return any(job.stopped for job in self.jobs.values())

    @property
    def unkept(self) -> dict[str, str]:
        """Reason by host why its agent does not come back after a reboot."""
        return {host: job.record.unkept or "a session keeps it" for host, job in self.jobs.items() if job.record and job.record.supervised}


def seen_jobs(answers: Mapping[str, HostFacts], problems: Mapping[str, str]) -> dict[str, Seen]:
    """Every job that a host has files of, by its name.

    `problems`: by host, the reason why it did not answer. A start that broke off may have left an older one on some host: the newest
    counts.
    """
    newest: dict[str, JobRecord] = {}
    for facts_of_host in answers.values():
        for name, job in facts_of_host.jobs.items():
            if job.record is not None and (name not in newest or _started(job.record) > _started(newest[name])):
                newest[name] = job.record
    return {name: _seen(record, answers, problems) for name, record in sorted(newest.items())}


def _started(record: JobRecord) -> str:
    return str(record.job["metadata"].get("creationTimestamp", ""))


def _seen(record: JobRecord, answers: Mapping[str, HostFacts], problems: Mapping[str, str]) -> Seen:
    jobs, missing, unread = {}, [], {}
    for host in record.hosts:
        job = answers[host].jobs.get(record.name) if host in answers else None
        if job is not None and job.problem:
            unread[host] = unread_words(host, record.name, job)
        elif job is not None and job.record is not None and job.record.uid == record.uid:
            jobs[host] = job
        elif host in answers:
            missing.append(host)
    away = {host: problems.get(host, f"host {host} is not in the cluster file any more") for host in record.hosts if host not in answers}
    return Seen(record, jobs, {**away, **unread}, tuple(missing))


def unread_jobs(answers: Mapping[str, HostFacts]) -> list[str]:
    """A sentence for every job whose files on a host can't be read."""
    return [
        unread_words(host, name, job) for host, facts_of_host in answers.items() for name, job in facts_of_host.jobs.items() if job.problem
    ]


def progress_known(job: Object, now: float) -> str:
    """Sentence about a job's progress that stays true when nobody can be asked any more."""
    status = job.get("status") or {}
    step = (status.get("trainer") or {}).get("step", (status.get("checkpoint") or {}).get("lastCommittedStep"))
    state = condition(status, "Progressing").get("reason", "Unknown")
    return f"{state}, {'no step yet' if step is None else f'step {step}'}, at {timestamp(now)}"


def host_job(seen: Seen, again: str, now: float) -> Observed:
    """The job with its status. `again`: words that name its cluster on a command line. `now`: this machine's clock, seconds since 1970."""
    received = _newest_report(seen, now)
    report, commit = None if received is None else received.report, _newest_commit(seen)
    known = {"checkpoint": {"lastCommittedStep": commit[0], "lastCommitTime": timestamp(commit[1])}} if report is None and commit else {}
    observed = Observed(job={**seen.record.job, "status": known}, hosts=seen.hosts)
    end = _ending(seen, report)
    view = View(observed=observed, wanted_pods=len(seen.hosts), now=now, received=received, suspend=seen.stopped, end=end, hears=False)
    conditions = _conditions(seen, view, again)
    own = {
        "nodes": len(seen.hosts),
        "runningNodes": sum(job.runs for job in seen.jobs.values()),
        "cluster": unchecked(ClusterInUse, name=seen.record.cluster, hash="", transport="TCP").to_dict(),
        "conditions": [one.to_dict() for one in with_times(observed, conditions, now)],
        **({"startTime": _started(seen.record)} if _started(seen.record) else {}),
    }
    reported: Object = known if report is None else reported_parts(observed, report, now).to_dict()
    if report is not None:
        own["ranks"] = reported_ranks(report, runs=seen.runs and not end.finished)
        own |= {} if report.stop is None else {"stop": taken_from(report.stop, StopStatus).to_dict()}
    status = fitted({**reported, **own})
    return Observed(job={**seen.record.job, "status": status}, hosts=seen.hosts)


def report_of(written: object, uid: str) -> Report | None:
    """A coordinator's report, as it is written to the run's folder; None for what isn't one of this start: a job's name may have been
    another's.
    """
    try:
        report = parse_report(json.dumps(written).encode())
    except ContractError:
        return None
    return report if report.job.uid == uid else None


def _newest_report(seen: Seen, now: float) -> ReceivedReport | None:
    """The coordinator's newest report on any volume."""
    newest: ReceivedReport | None = None
    for job in seen.jobs.values():
        report = report_of(job.report, seen.record.uid)
        if report is not None and (newest is None or report.sequence > newest.report.sequence):
            newest = ReceivedReport(report, "", now - job.report_seconds)
    return newest


def _newest_commit(seen: Seen) -> tuple[int, float] | None:
    commits = [
        (job.newest_step, job.newest_time) for job in seen.jobs.values() if job.newest_step is not None and job.newest_time is not None
    ]
    return max(commits, default=None)


def _ending(seen: Seen, report: Report | None) -> Ending:
    """The end of the job by the coordinator's record, which outlives its report."""
    for job in seen.jobs.values():
        if job.records_end(seen.record.uid, job.retry):
            state, message = job.ended.get("state"), str(job.ended.get("message", ""))
            return Ending(complete=state == State.COMPLETE.value, failed=state == State.FAILED.value, message=message)
    retry = max((job.retry for job in seen.jobs.values()), default=0)
    if report is not None and report.retry >= retry and report.state in ENDS:
        return Ending(complete=report.state is State.COMPLETE, failed=report.state is State.FAILED, message=report.message)
    return Ending()


def _conditions(seen: Seen, view: View, again: str) -> dict[ConditionType, Fact]:
    """All conditions but Held, which is about pods; others about pods speak of hosts."""
    given = facts(view)
    progress = _not_running(seen, view, again) or _running(seen, view)
    suspended = (
        Fact(TRUE, Reason.SUSPENDED, progress.message)
        if progress.reason == Reason.SUSPENDED
        else Fact(FALSE, Reason.NOT_SUSPENDED, "no stop was requested")
    )
    return {
        **{kind: fact for kind, fact in given.items() if kind is not ConditionType.HELD},
        ConditionType.ACCEPTED: Fact(TRUE, Reason.ACCEPTED, "the job fits its hosts"),
        ConditionType.SUSPENDED: Fact(FALSE, Reason.STOPPING, progress.message) if progress.reason == Reason.STOPPING else suspended,
        ConditionType.PODS_SCHEDULED: _reached(seen),
        ConditionType.NODES_HEALTHY: _reached(seen),
        ConditionType.RANKS_READY: _ranks_ready(seen, view, progress),
        ConditionType.PROGRESSING: progress,
    }


def _reached(seen: Seen) -> Fact:
    if seen.problems:
        return Fact(FALSE, Reason.HOST_AWAY, "; ".join(seen.problems.values()))
    if seen.missing:
        return Fact(
            FALSE,
            Reason.HOST_AWAY,
            f"{named('host', seen.missing)} has no files of this start: it broke off before they were there, or was deleted there",
        )
    words = "".join(f"; {sentence}" for sentence in unkept_words(seen))
    return Fact(TRUE, Reason.HOSTS_REACHED, f"{number_of(len(seen.hosts), 'host')} answer{words}")


def unkept_words(seen: Seen) -> list[str]:
    """A sentence a reason about hosts on which the job does not come back after a reboot."""
    hosts_of: dict[str, list[str]] = {}
    for host, why in seen.unkept.items():
        hosts_of.setdefault(why, []).append(host)
    return [f"the job does not come back after a reboot of {named('host', hosts)}, since {why}" for why, hosts in hosts_of.items()]


def _ranks_ready(seen: Seen, view: View, progress: Fact) -> Fact:
    if view.end.finished or not seen.runs or view.report is None or progress.status is UNKNOWN:
        return Fact(FALSE, progress.reason, progress.message)
    ranks = view.report.ranks
    if ranks.ready < ranks.desired:
        return Fact(FALSE, Reason.WAITING_FOR_RANKS, f"{ranks.ready} of {ranks.desired} ranks ready: {view.report.message}")
    return Fact(TRUE, Reason.ALL_RANKS_READY, f"{ranks.ready} of {ranks.desired} ranks ready")


def _not_running(seen: Seen, view: View, again: str) -> Fact | None:  # noqa: PLR0911 (a table of cases reads best as one)
    """The summary of a job of which no agent runs, or nobody knows; None for one whose report counts."""
    report, name = view.report, seen.record.name
    go_on = go_on_words(view.observed.job, committed=report is not None and report.checkpoint is not None)
    if view.end.complete:
        return Fact(FALSE, Reason.COMPLETE, "the job is complete")
    if view.end.failed:
        return Fact(FALSE, Reason.FAILED, view.end.message)
    if seen.first in seen.problems and (report is None or view.now - _heard(view) > SILENT_SECONDS):
        return Fact(UNKNOWN, Reason.UNREACHABLE, f"{seen.problems[seen.first]}; {_last_known(seen, view)}")
    if seen.stopped:
        running = [host for host, job in seen.jobs.items() if job.runs]
        if untold := [host for host in running if not seen.jobs[host].stopped]:
            return Fact(FALSE, Reason.STOPPING, f"the stop has not reached {named('host', untold)}: lockstep stop {name} {again}")
        if running:
            return Fact(FALSE, Reason.STOPPING, f"ranks save and stop on {named('host', running)}")
        return Fact(FALSE, Reason.SUSPENDED, f"stopped as asked; to {go_on}: lockstep resume {name} {again}")
    if seen.missing:
        return Fact(
            FALSE,
            Reason.AGENT_ENDED,
            f"{_reached(seen).message}; lockstep delete {name} {again} removes the rest, {typed_command(seen.record.job, again)} starts it"
            " again",
        )
    ended = {host: _how_ended(host, job) for host, job in seen.jobs.items() if not job.runs}
    if ended and not (report is not None and report.state is State.RUNNING and seen.first not in ended):
        return Fact(FALSE, Reason.AGENT_ENDED, "; ".join(ended.values()) + f"; to {go_on}: lockstep resume {name} {again}")
    return None


def _running(seen: Seen, view: View) -> Fact:
    """The summary of a job whose agents run, by the coordinator's report."""
    report = view.report
    away = f"; {'; '.join(seen.problems.values())}" if seen.problems else ""
    away += f"; no reboot recovery on {named('host', list(seen.unkept))}" if seen.unkept else ""
    if report is None:
        return Fact(
            TRUE,
            Reason.STARTING,
            f"its agents run on {sum(job.runs for job in seen.jobs.values())} of {number_of(len(seen.hosts), 'host')}; node 0 has not"
            f" reported yet{away}",
        )
    if view.now - _heard(view) > SILENT_SECONDS:
        return Fact(UNKNOWN, Reason.NO_REPORT, f"node 0 has not reported for {duration(view.now - _heard(view))}; its agent runs{away}")
    if seen.problems and report.state is not State.RUNNING:
        return Fact(FALSE, Reason.HOST_AWAY, f"{'; '.join(seen.problems.values())}; the job goes on when it is back")
    return reported_progress(report, away)


def _heard(view: View) -> float:
    return 0.0 if view.received is None else view.received.received


def _last_known(seen: Seen, view: View) -> str:
    """Newest step that anybody else knows."""
    if view.received is not None and view.received.report.trainer is not None and view.received.report.trainer.step is not None:
        return f"last known: step {view.received.report.trainer.step}, at {timestamp(view.received.received)}"
    commit = _newest_commit(seen)
    if commit is None and seen.known:
        return f"last known: {seen.known}"
    return (
        "nothing is known of its progress" if commit is None else f"last known: the commit of step {commit[0]}, at {timestamp(commit[1])}"
    )


def _how_ended(host: str, job: JobOnHost) -> str:
    gone = (
        "is not running (a session kept it, which a reboot ends)" if job.record is not None and job.record.supervised else "is not running"
    )
    how = gone if job.exit_code is None else f"ended with {MEANINGS.get(job.exit_code, f'exit code {job.exit_code}')}"
    last = next((line for line in reversed(job.log) if line.strip()), "")
    return f"the agent on host {host} {how}" + (f": {last}" if last else "")


def complaints(seen: Seen) -> tuple[str, ...]:
    """Last words of agents about whom they can't reach or why they don't run, by host: node 0's report can't have what it doesn't hear."""
    words = []
    for host, job in seen.jobs.items():
        line = next((match[1] for line in reversed(job.log) if (match := UNHEARD.match(line))), None)
        if line and job.runs and (job.report is None or job.report.get("state") != State.RUNNING.value):
            words.append(f"host {host}: {line}")
    return (*words, *_unwritten(seen))


def _unwritten(seen: Seen) -> Iterator[str]:
    """Say that node 0 has long written nothing to the run's folder: what is known is old, and a save waits."""
    job = seen.jobs.get(seen.first)
    if (
        job is not None
        and job.record is not None
        and job.runs
        and job.report is not None
        and not job.ended
        and job.report_seconds > UNWRITTEN_SECONDS
    ):
        folder = f"{job.record.workspace}/runs/{job.record.name}"
        why = next((match[1] for line in reversed(job.log) if (match := _CAN_T_WRITE.match(line))), "")
        yield (
            f"host {seen.first}: nothing has been written to {folder} for {job.report_seconds:.0f} s: "
            f"{why or 'its file system takes no writes, such as one whose server is away, or the agent hangs'}. "
            "A save waits until that is possible, and the job goes on then"
        )


def next_steps(observed: Observed, state: Where, again: str) -> tuple[Step, ...]:
    """Return what helps in this state, the most likely first. `again`: words that name the cluster."""
    at = f"{observed.name} {again}"
    failure = observed.status_part("failure")
    help_ = f"; {advice(failure, observed.name, again, in_pods=False)}" if state is Where.FAILED and failure else ""
    steps = {
        Where.FAILED: [
            Step(f"lockstep retry {at}", f"{go_on_words(observed.job)}{help_}"),
            Step(f"lockstep logs {at} --errors", "the first failure"),
        ],
        Where.SUSPENDED: [Step(f"lockstep resume {at}", go_on_words(observed.job))],
        Where.RUNNING: [Step(f"lockstep logs {at} -f", "follow it"), *ask_ranks(observed, again)],
        Where.COMPLETE: [Step(f"lockstep describe {at}", "shows where its results are")],
        Where.SILENT: [Step(f"lockstep logs {at}", "what node 0 has printed")],
        Where.NODE_NOT_HEARD: [Step(f"lockstep logs {at}", "what node 0 has printed")],
    }
    return tuple(steps.get(state, []))
