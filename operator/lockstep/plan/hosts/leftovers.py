"""Agents that wait for a job which is over: their host was off when it ended or was deleted (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.api.hosts import HostsCluster
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
        return (
            f"host {self.host} did not hear that job {self.job} {how}: {what} {'removed' if self.deleted else 'ended, and its key removed'}"
        )


def leftovers(answers: Mapping[str, HostFacts], cluster: HostsCluster, name: str) -> list[LeftAgent]:
    """Every agent that waits in vain, by the answers of the hosts that answered. `name`: of the cluster file.

    A start lets node 0 begin first, so an agent of another node whose node 0 has no files of this start is one of a job that was deleted.
    Where node 0 has the record of the end and no agent any more, the job has ended. A node 0 that waits for others in vain ends by itself.
    """
    found = []
    for host, facts in answers.items():
        for job_name, job in facts.jobs.items():
            record = job.record
            if record is None or not job.runs or host not in record.hosts[1:]:
                continue
            if _is_deleted(record, answers, cluster, name):
                found.append(LeftAgent(host, job_name, record.uid, deleted=True))
            elif _has_ended(job, record, answers):
                found.append(LeftAgent(host, job_name, record.uid, deleted=False))
    return found


def _is_deleted(record: JobRecord, answers: Mapping[str, HostFacts], cluster: HostsCluster, name: str) -> bool:
    """Return True if the host of node 0 is sure to have no files of this start. In another cluster file, or at another address, its name
    may be another machine's.
    """
    first = record.hosts[0]
    if record.cluster != name or first not in answers or len(answers[first].jobs) >= LISTED_MAX:
        return False
    own = {cluster.host(first).address, *(way.address for way in answers[first].routes.values())}
    there = answers[first].jobs.get(record.name, JobOnHost())
    return record.coordinator.address in own and not there.problem and (there.record is None or there.record.uid != record.uid)


def _has_ended(job: JobOnHost, record: JobRecord, answers: Mapping[str, HostFacts]) -> bool:
    first = answers.get(record.hosts[0])
    there = None if first is None else first.jobs.get(record.name)
    return there is not None and not there.runs and not there.problem and there.records_end(record.uid, job.retry)
