"""Agents that wait for a job which is over: their host was off when it ended, or was deleted (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.plan.hosts.facts import HostFacts, JobOnHost
from lockstep.plan.hosts.record import JobRecord

LISTED_MAX = 256
"""Jobs that a host names at most. One that has so many may have more, and what it doesn't name is not gone."""


@dataclass(frozen=True)
class LeftAgent:
    """A host's part of a job that is over everywhere else."""

    host: str
    job: str
    uid: str
    deleted: bool
    """True if the job was deleted; False: it has ended, and its records stay."""

    def __str__(self) -> str:
        how, what = ("was deleted", "its unit and its files there are") if self.deleted else ("ended", "its unit there is")
        return f"host {self.host} was off when job {self.job} {how}: {what} {'removed' if self.deleted else 'ended, and its key removed'}"


def leftovers(answers: Mapping[str, HostFacts]) -> list[LeftAgent]:
    """Every agent that waits in vain, by the answers of the hosts that answered.

    A start lets node 0 begin first, so an agent of another node whose node 0 has no files of this start is one of a job that was deleted, and so is a
    node 0 that has had an attempt, which begins with all nodes, and misses another node's files. Where node 0 has the record of the end and no agent any
    more, the job has ended.
    """
    found = []
    for host, facts in answers.items():
        for name, job in facts.jobs.items():
            record = job.record
            if record is None or not job.runs or host not in record.hosts:
                continue
            if _is_deleted(host, job, record, answers):
                found.append(LeftAgent(host, name, record.uid, deleted=True))
            elif host != record.hosts[0] and _has_ended(job, record, answers):
                found.append(LeftAgent(host, name, record.uid, deleted=False))
    return found


def _is_deleted(host: str, job: JobOnHost, record: JobRecord, answers: Mapping[str, HostFacts]) -> bool:
    first, *others = record.hosts
    if host != first:
        return _lacks(first, record, answers)
    of, attempt = (job.report or {}).get("job"), (job.report or {}).get("attempt")
    began = isinstance(of, Mapping) and of.get("uid") == record.uid and isinstance(attempt, int) and attempt > 0
    return began and any(_lacks(other, record, answers) for other in others)


def _lacks(host: str, record: JobRecord, answers: Mapping[str, HostFacts]) -> bool:
    """Return True if the host is sure to have no files of this start."""
    if host not in answers or len(answers[host].jobs) >= LISTED_MAX:
        return False
    there = answers[host].jobs.get(record.name, JobOnHost())
    return not there.problem and (there.record is None or there.record.uid != record.uid)


def _has_ended(job: JobOnHost, record: JobRecord, answers: Mapping[str, HostFacts]) -> bool:
    first = answers.get(record.hosts[0])
    there = None if first is None else first.jobs.get(record.name)
    if there is None or there.runs or there.problem:
        return False
    retried = there.ended.get("retry", 0)
    return there.ended.get("jobUid") == record.uid and isinstance(retried, int) and retried >= job.retry
