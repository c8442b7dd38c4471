"""Jobs on the hosts of a cluster file, which keep their own files and are asked over ssh."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import HOSTS
from lockstep.api.objects import Object, condition, has_ended, is_true
from lockstep.platforms.output import put, say, tell
from lockstep.platforms.places.backend import Backend, Job
from lockstep.platforms.places.common import CommonJob, show_to_its_end, tell_if_suspended
from lockstep.platforms.places.orders import Order
from lockstep.platforms.places.values import POLL_SECONDS, STOP_SECONDS, JobGone, NamedPlace, Say, Spot, Stale, Use, Volume, Volumes, Words
from lockstep_gang.contract.layout import RankLayout

if TYPE_CHECKING:
    from lockstep.api.cluster import TrainingCluster
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.plan.hosts.record import JobRecord
    from lockstep.plan.hosts.status import Seen
    from lockstep.plan.pages.stacks import RankAnswer
    from lockstep.plan.pages.why import Answer
    from lockstep.platforms.files.copies import Copy, CopyWish
    from lockstep.platforms.files.sending import Sending
    from lockstep.platforms.hosts.fleet import Fleet
    from lockstep.platforms.hosts.place import HostPlace
    from lockstep.platforms.jobs.looks import Looks
    from lockstep.platforms.jobs.shortresults import ShortRuns


LATE_SECONDS = 12.0
"""Seconds after a host's last answer in which a verb waits for the others: more than a slow login, less than the 25 of one that is off."""


class HostVolume(Volume):
    """A host's files, with the Python and the variables of a job's ranks there."""

    place: HostPlace


class HostsBackend(Backend):
    """The hosts of a cluster file."""

    kind = HOSTS

    @classmethod
    def at(cls, where: NamedPlace) -> Self:
        return cls(*where.of_hosts())

    def __init__(self, cluster_file: ClusterFile, named: str) -> None:
        """`named`: the cluster as it was given: its name, or the path of its file."""
        from lockstep.api.hosts import cluster_words

        self.hosts, self.profile, self.name = cluster_file.its_hosts(named), cluster_file.profile, cluster_file.cluster.name
        self.given = named
        self.typed, again = cluster_words(named)
        self.words = Words(again, f"on the hosts of {self.name}", have="they have")
        self._problems: dict[str, str] = {}
        self._unread: list[str] = []
        self._fleet: Fleet | None = None

    @property
    def late_seconds(self) -> float | None:
        """Return how long a host is waited for after another one has answered; None: as long as it takes."""
        return LATE_SECONDS if self.hurried else None

    def fleet(self) -> Fleet:
        """Return connections to the hosts, always the same."""
        from lockstep.platforms.hosts.fleet import Fleet

        self._fleet = self._fleet or Fleet(self.hosts, self.name, self.given, tell=say)
        return self._fleet

    def run(self, order: Order) -> int:
        return run_on_hosts(self, order)

    def short_runs(self, profile: TrainingCluster, seconds: int | None) -> ShortRuns:
        from lockstep.platforms.hosts.shortruns import HostRuns

        return HostRuns(self.fleet(), profile, tell, seconds)

    def looks(self, job: str | None, interval: float, *, live: bool) -> Looks:
        from lockstep.platforms.jobs.top import looks_of_machines

        if job is not None:
            return self.job(job).looks(interval, live=live)
        machines = {host.name: (self.fleet().place(host.name), host.workspace, host.datasets) for host in self.hosts.hosts}
        return looks_of_machines(self.name, machines, interval, say)

    async def copy(self, copy: Copy, wish: CopyWish) -> bool:
        from lockstep.platforms.hosts.copies import copy_on_hosts

        return await copy_on_hosts(copy, self.fleet(), wish)

    async def sync(self, sending: Sending) -> bool:
        from lockstep.platforms.hosts.sync import sync

        return await sync(self.fleet(), sending)

    def volumes_to_fill(self, name: str, order: Order | None, say: Say) -> Volumes:
        from lockstep.plan.hosts.place import chosen
        from lockstep.platforms.hosts.volumes import volumes_of

        hosts = self.job(name).seen.hosts if order is None else [host.name for host in chosen(self.hosts, order.job.spec.nodes)]
        return asyncio.run(volumes_of(self.fleet(), hosts))

    def jobs(self, *, everywhere: bool = False, selector: str | None = None) -> list[Job]:
        seen, self._problems = asyncio.run(self._look(""))
        return [HostsJob(self, one) for one in seen.values()]

    def current(self, jobs: Sequence[Job]) -> tuple[list[Object], Stale | None]:
        away = "; ".join([*self._problems.values(), *self._unread])
        return [job.job for job in jobs], Stale("", f"{away}: what is shown may lack jobs, or be old") if away else None

    def job(self, name: str) -> HostsJob:
        """Return the job of this name. Raises ConfigError, naming the jobs that are there, when there is none."""
        seen, problems = asyncio.run(self._look(name))
        if name not in seen:
            unread = self._unread
            every, _ = asyncio.run(self._look(""))
            away = "".join(f"; {sentence}" for sentence in [*problems.values(), *unread])
            raise ConfigError(f"{self.words.no_such_job(name, every)}{away}")
        return HostsJob(self, seen[name])

    async def _look(self, job: str) -> tuple[dict[str, Seen], dict[str, str]]:
        """Ask all hosts. A job of which no host answers is shown as it was seen last."""
        from lockstep.plan.hosts.leftovers import leftovers
        from lockstep.plan.hosts.status import Seen, host_job, progress_known, seen_jobs, unread_jobs
        from lockstep.platforms.hosts.remembered import Remembered, remember, remembered

        fleet = self.fleet()
        answers, problems = await fleet.look(job=job, late_seconds=self.late_seconds)
        if found := [
            left for left in leftovers(answers, self.hosts, self.name) if not (job and left.deleted)
        ]:  # (who names a deleted job may be about to delete the rest)
            from lockstep.platforms.hosts.start import end_leftovers

            answers = await end_leftovers(fleet, answers, found)
        seen, now = seen_jobs(answers, problems), time.time()
        self._unread = unread_jobs(answers)
        before = {name: one for name, one in remembered(self.name).items() if name == (job or name)}
        away = {
            name: Seen(one.record, {}, {host: problems[host] for host in one.record.hosts}, known=one.known)
            for name, one in before.items()
            if name not in seen and all(host in problems for host in one.record.hosts)
        }
        heard = {name: one for name, one in seen.items() if one.first not in problems}
        known = {name: Remembered(one.record, progress_known(host_job(one, self.words.again, now).job, now)) for name, one in heard.items()}
        remember(self.name, known, [name for name in before if name not in seen and name not in away])
        return {name: replace(one, known=before[name].known) if name in before else one for name, one in seen.items()} | away, problems


class HostsJob(CommonJob):
    """A job, as its hosts tell of it."""

    def __init__(self, backend: HostsBackend, seen: Seen) -> None:
        self.backend: HostsBackend = backend
        self._reason = ""
        self._see(seen)

    def _see(self, seen: Seen) -> None:
        from lockstep.plan.hosts.status import host_job

        self.seen = seen
        self.observed = host_job(seen, self.backend.words.again, time.time())
        self.job = self.observed.job

    def record_on(self, host: str) -> JobRecord | None:
        """Return the record that a host has of this start; None where it has none, or doesn't answer."""
        job = self.seen.jobs.get(host)
        return None if job is None else job.record

    def layout(self) -> RankLayout:
        return RankLayout(self.seen.record.ranks)

    def stacks(self, rank: int | None) -> list[RankAnswer]:
        from lockstep.platforms.hosts.fleet import ask_ranks

        return asyncio.run(ask_ranks(self.backend.fleet(), self.seen, rank))

    def look_again(self, before: Object | None = None) -> Object:
        return asyncio.run(self.current())

    async def current(self, patience: float = 0.0) -> Object:
        """Read its status again, and return it. Raises JobGone. `patience`: seconds to wait until all of its ranks run."""
        from lockstep.plan.hosts.status import seen_jobs

        answers, problems = await self.backend.fleet().look_for(
            self.name, self.seen.hosts, patience, late_seconds=self.backend.late_seconds
        )
        seen = seen_jobs(answers, problems).get(self.name)
        if seen is None and problems:  # no host of it answers: what was seen last still tells which hosts it has
            seen = replace(self.seen, jobs={}, problems=problems)
        if seen is None or seen.record.uid != self.uid:
            raise JobGone(self.name, seen)
        self._see(seen)
        return self.status

    def answer(self, bundle: Path | None) -> Answer:
        from lockstep.plan.hosts.status import complaints, next_steps, unkept_words
        from lockstep.plan.pages.why import why

        answer = why(self.observed, (), time.time())
        # The last line of every other node that waits, since node 0 can't tell what it doesn't hear, and where a reboot ends the job.
        says = (*complaints(self.seen), *unkept_words(self.seen))
        return replace(answer, next=next_steps(self.observed, answer.state, self.backend.words.again), says=says)

    async def commits(self, verb: str, options: Sequence[str], say: Say) -> tuple[str, int]:
        """Return that of the commits on all of its hosts."""
        from lockstep.platforms.hosts.commits import commits_on_hosts

        volumes: dict[str, Volume] = {}
        away = dict(self.seen.problems)
        for node, host in enumerate(self.seen.hosts):
            try:
                async with self.volume(node, say, Use.TRAINER) as volume:
                    volumes[host] = volume
            except Failed as error:
                away[host] = str(error)
        return await commits_on_hosts(self.backend.fleet(), volumes, self.name, away, verb, options)

    def suspend(self, *, now: bool = False) -> bool:
        from lockstep.platforms.hosts.start import stop

        if self.seen.stopped and not self.seen.runs:
            return False
        asyncio.run(stop(self.backend.fleet(), self.seen, now=now))
        return True

    def resume(self) -> bool:
        from lockstep.platforms.hosts.start import start_again

        if (
            self.seen.runs
            and not self.seen.stopped
            and len(self.seen.jobs) == len(self.seen.hosts)
            and all(job.runs for job in self.seen.jobs.values())
        ):
            return False
        if self.seen.stopped and self.seen.runs:
            say(f"job {self.name} still saves and stops; then it goes on")
            asyncio.run(self._until_ended())
        asyncio.run(start_again(self.backend.fleet(), self.seen))
        self.warn_unkept()
        return True

    def warn_unkept(self) -> None:
        """Say on which hosts a reboot ends the job's part."""
        from lockstep.plan.hosts.status import unkept_words

        for sentence in unkept_words(self.seen):
            say(f"warning: {sentence}")

    async def _until_ended(self) -> None:
        until = time.monotonic() + STOP_SECONDS
        while self.seen.runs:
            if time.monotonic() > until:
                raise Failed(
                    f"job {self.name} was told to stop, and has not saved and ended for {STOP_SECONDS:.0f} s: lockstep stop {self.at} --now"
                    " ends it without a save"
                )
            await asyncio.sleep(POLL_SECONDS)
            await self.current()

    def raise_retry(self) -> int:
        from lockstep.platforms.hosts.start import start_again

        number = max(job.retry for job in self.seen.jobs.values()) + 1
        asyncio.run(start_again(self.backend.fleet(), self.seen, retry=number))
        self.warn_unkept()
        return number

    def delete(self) -> str:
        from lockstep.platforms.hosts.start import remove

        if self.seen.runs:
            say(f"job {self.name} saves and stops first; lockstep stop {self.at} --now ends it without a save")
        asyncio.run(remove(self.backend.fleet(), self.seen))
        return "what it left in the workspaces of its hosts stays"

    async def is_over(self, say: Say) -> bool:
        status = await self.current()
        self._reason = tell_if_suspended(self, status, self._reason, say)
        return has_ended(status)

    def looks(self, interval: float, *, live: bool) -> Looks:
        """Look at it with its ranks. A host that doesn't answer is shown as not seen."""
        from lockstep.plan.pages.top import machine_node
        from lockstep.platforms.jobs.top import looks_of_job

        layout = self.layout()
        folders = {
            node: (self.backend.fleet().place(host), f"{record.workspace}/runs/{self.name}")
            for node, host in enumerate(self.seen.hosts)
            if (record := self.record_on(host)) is not None
        }

        async def look() -> tuple[Object, bool]:
            is_over = has_ended(await self.current())
            return self.job, is_over

        def nodes(answers: Mapping[int, Object]) -> list[Object]:
            problems = {host: {"problem": why} for host, why in self.seen.problems.items()}
            return [
                {**machine_node(host, layout.ranks_of(node), problems.get(host) or answers.get(node, {})), "node": node}
                for node, host in enumerate(self.seen.hosts)
            ]

        return looks_of_job(self.name, folders, look, nodes, interval, (lambda line: None) if live else say)

    def nodes_with_volumes(self) -> list[int]:
        """Return all nodes. Raises Failed for a host that doesn't answer, or has no files."""
        nodes = list(range(len(self.seen.hosts)))
        for node in nodes:
            self._files_of(node)
        return nodes

    @asynccontextmanager
    async def volume(self, node: int, say: Say, use: Use = Use.READ, gpus: int = 0) -> AsyncIterator[HostVolume]:
        """Open the files of a node; for the trainer's packages, with the Python and the variables of the job's ranks there."""
        files, record = self._files_of(node)
        if use.needs_trainer:
            variables = dict(record.environment)
            if use is Use.MODEL:
                variables["CUDA_VISIBLE_DEVICES"] = await self.free_gpus(node, gpus) if gpus else ""
            place = replace(files.place, python=record.command[:1], environment=tuple(variables.items()))
            files = HostVolume(place, files.workspace, files.datasets)
        yield files

    def _files_of(self, node: int) -> tuple[HostVolume, JobRecord]:
        from lockstep.plan.pages.logs import no_such_node

        if node >= len(self.seen.hosts):
            raise no_such_node(self.name, node, len(self.seen.hosts))
        host = self.seen.hosts[node]
        if host in self.seen.problems:
            raise Failed(self.seen.problems[host])
        job = self.seen.jobs.get(host)
        if job is None or job.record is None:
            raise Failed(f"host {host} has no files of job {self.name}")
        return HostVolume(self.backend.fleet().place(host), job.record.workspace, job.record.datasets), job.record

    async def free_gpus(self, node: int, count: int) -> str:
        """Return `count` free GPUs of a node, as CUDA_VISIBLE_DEVICES takes them. Raises ConfigError, which says what uses the others, if
        there are fewer.
        """
        from lockstep.plan.hosts.place import gpus_for

        host = self.seen.hosts[node]
        answers, problems = await self.backend.fleet().look([host], job=self.name)
        if host in problems:
            raise Failed(problems[host])
        return ",".join(gpu.uuid for gpu in gpus_for(self.backend.hosts.host(host), answers[host], count))

    @asynccontextmanager
    async def spot(self, node: int, *, ports: bool) -> AsyncIterator[Spot]:
        from lockstep.platforms.hosts.forward import spot_on_host

        async with self.volume(node, say, Use.TRAINER) as volume:
            yield spot_on_host(volume, volume.place, self.backend.hosts.host(self.seen.hosts[node]))


START_POLL_SECONDS, PATIENCE_SECONDS = 0.3, 1.0
"""Least seconds between two looks at a job that starts, and those for which node 0's host waits with its answer for the job's ranks."""


def run_on_hosts(backend: HostsBackend, order: Order) -> int:
    """Start the job on its hosts, and return its exit code: 0 complete, 1 failed. Ctrl-C leaves it running.

    A detached order returns once all of its ranks run. Raises Failed where they don't get to run, with the reason.
    """
    from lockstep.plan.pages.logs import LogSelection
    from lockstep.platforms.hosts.ahead import refuse_slow_network
    from lockstep.platforms.hosts.start import start

    fleet = backend.fleet()
    if order.typed.file and not order.anyway:
        asyncio.run(refuse_slow_network(fleet, order))
    patience = PATIENCE_SECONDS if order.detach else 0.0
    try:
        seen = asyncio.run(start(fleet, order, patience=patience))
    except (KeyboardInterrupt, SystemExit):  # SystemExit: by SIGTERM, or a terminal that was closed
        say(f"interrupted while job {order.job.metadata.name} was being started: lockstep get {backend.words.again} shows whether it runs")
        raise
    job = HostsJob(backend, seen)
    say(f"job {job.name} is started on {', '.join(job.seen.hosts)}; it runs on without this terminal: lockstep logs {job.at} -f")
    job.warn_unkept()
    if order.detach:
        return _until_running(job)
    return asyncio.run(show_to_its_end(job, LogSelection()))


def _until_running(job: HostsJob) -> int:
    shown, status, looked = "", job.status, 0.0
    while True:
        progress = condition(status, "Progressing")
        line = f"{progress.get('reason', 'Unknown')}: {progress.get('message', '')}"
        if line != shown:
            shown = line
            put(f"{job.name}: {line}", flush=True)
        if is_true(status, "RanksReady") or is_true(status, "Complete"):
            return 0
        if has_ended(status) or progress.get("status") == "False":
            raise Failed(f"job {job.name} does not run: {progress.get('message', '')}: lockstep why {job.at}")
        time.sleep(max(0.0, looked + START_POLL_SECONDS - time.monotonic()))
        looked = time.monotonic()
        status = asyncio.run(job.current(PATIENCE_SECONDS))
