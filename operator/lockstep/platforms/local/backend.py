"""Runs of `lockstep run --local`: folders of a workspace on this machine."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import DELETED
from lockstep.api.objects import Object, go_on_words, typed_command
from lockstep.platforms.local.environment import in_full_environment
from lockstep.platforms.output import say
from lockstep.platforms.places.backend import Backend, Job
from lockstep.platforms.places.backends import DEFAULT_WORKSPACE, words_to
from lockstep.platforms.places.common import CommonJob
from lockstep.platforms.places.orders import LOCAL, Order
from lockstep.platforms.places.values import POLL_SECONDS, STOP_SECONDS, NamedPlace, Say, Stale, Use, Volume, Volumes, Words
from lockstep_spec.exits import CONFIGURATION, FAILED, USAGE

if TYPE_CHECKING:
    from lockstep.api.cluster import TrainingCluster
    from lockstep.plan.pages.stacks import RankAnswer
    from lockstep.plan.pages.why import Answer
    from lockstep.plan.reconcile.clocks import Earlier
    from lockstep.platforms.jobs.looks import Looks
    from lockstep.platforms.jobs.shortresults import ShortRuns
    from lockstep_gang.contract.layout import RankLayout


class LocalBackend(Backend):
    """A workspace of this machine."""

    kind = LOCAL

    @classmethod
    def at(cls, where: NamedPlace) -> Self:
        root, *also = where.workspaces()
        return cls(root, also)

    def __init__(self, root: Path, also: Sequence[Path] = ()) -> None:
        """`also`: workspaces that are looked into where this one hasn't a job."""
        self.root, self._also = root, also
        again = "--local" if root == DEFAULT_WORKSPACE else f"--cluster {shlex.quote(str(words_to(root)['--cluster']))}"
        self.words = Words(again, f"in workspace {root}", str(root), elsewhere="--cluster names another one")
        self._unread: list[str] = []

    def ready(self, order: Order) -> None:
        """Go on in a Python that has torch, once it is known that the job can start."""
        in_full_environment(check=lambda: self._check(order))

    def _check(self, order: Order) -> None:
        """Raise ConfigError where this machine lacks what the job reads, or where nothing has failed that is to be retried."""
        from lockstep.plan.render.resolve import resolve
        from lockstep.platforms.jobs.machine import check_inputs
        from lockstep.platforms.local.placement import local_defaults

        if order.retry:
            self._earlier(order)
        with saying_where_the_script_is(order):
            check_inputs(resolve(order.job, order.cluster.profile, local_defaults(self.root, uid="")))

    def _earlier(self, order: Order) -> Earlier | None:
        """Return the start to go on from, if the order is a retry. Raises ConfigError where the job has ended otherwise, unless it is to
        train anew.
        """
        from lockstep.plan.ahead.submission import refuse_ended
        from lockstep.platforms.local.records import failed_run, run_names

        name, retry = order.job.metadata.name, f"lockstep retry -f {shlex.quote(order.typed.file)} {self.words.again}"
        if order.retry:
            return failed_run(name, self.root)
        if order.typed.file and not order.typed.is_fresh and name in run_names(self.root):
            job = LocalJob(self, name)
            refuse_ended(order.job, job.job, job.at, retry, order.typed)
        return None

    def run(self, order: Order) -> int:
        """Run it as processes of this one, which end with it."""
        from lockstep.platforms.local.run import preview_local, run_local

        if order.samples is not None:
            code = preview_local(order.job, order.cluster.profile, self.root, order.samples)
            return {0: 0, CONFIGURATION: USAGE}.get(code, FAILED)
        with saying_where_the_script_is(order):
            return run_local(order, self.root, self._earlier(order))

    def short_runs(self, profile: TrainingCluster, seconds: int | None) -> ShortRuns:
        from lockstep.platforms.local.run import LocalRuns

        in_full_environment()
        return LocalRuns(profile, self.root)

    def looks(self, job: str | None, interval: float, *, live: bool) -> Looks:
        from lockstep.platforms.jobs.processes import LocalPlace
        from lockstep.platforms.jobs.top import looks_of_machines

        if job is not None:
            return self.job(job).looks(interval)
        machine = (LocalPlace(), str(self.root / "workspace"), str(self.root / "datasets"))
        return looks_of_machines("local", {socket.gethostname(): machine}, interval, lambda line: None)

    @property
    def files(self) -> Volume:
        """Return the workspace's files."""
        from lockstep.platforms.jobs.processes import LocalPlace

        folder = self.root.resolve()
        return Volume(LocalPlace(), str(folder / "workspace"), str(folder / "datasets"))

    def volumes_to_fill(self, name: str, order: Order | None, say: Say) -> Volumes:
        return {"node 0": nullcontext(self.files)}

    def jobs(self, *, everywhere: bool = False, selector: str | None = None) -> list[Job]:
        from lockstep.platforms.local.records import run_names

        jobs, self._unread = list[Job](), list[str]()
        for place, name in [(backend, name) for backend in self._backends() for name in run_names(backend.root)]:
            try:
                jobs.append(LocalJob(place, name))
            except ConfigError as error:
                self._unread.append(str(error))
        return jobs

    def current(self, jobs: Sequence[Job]) -> tuple[list[Object], Stale | None]:
        return [job.job for job in jobs], Stale("", "; ".join(self._unread)) if self._unread else None

    def _backends(self) -> list[LocalBackend]:
        return [self, *map(LocalBackend, self._also)]

    def job(self, name: str) -> LocalJob:
        """Return the run of this name. Raises ConfigError, naming those that are here, when there is none."""
        from lockstep.platforms.local.records import run_names

        for backend in self._backends():
            folder = backend.root / "workspace/runs" / name
            if folder.is_dir() and not (folder / DELETED).exists():
                return LocalJob(backend, name)
        raise ConfigError(self.words.no_such_job(name, run_names(self.root)))


@contextmanager
def saying_where_the_script_is(order: Order) -> Iterator[None]:
    """Add to the ConfigError about a script that isn't there how to run it where it is: in the folder of the command or of the job's
    file.
    """
    try:
        yield
    except ConfigError as error:
        path = (script := order.job.spec.script) and script.path
        is_script = str(error).startswith("spec.script.path: there is no") and script and script.folder is None
        folders = [Path.cwd(), Path(order.typed.file).absolute().parent] if is_script and path and not path.startswith("/") else []
        for folder in folders:
            if (folder / str(path)).is_file():
                there = f"to run it there, add --set {shlex.quote(f'script.folder={folder}')}, or script.folder to the job"
                raise ConfigError(f"{error}; {folder} has {path}: {there}") from None
        raise


class LocalJob(CommonJob):
    """A run on this machine, by the records in its folder."""

    def __init__(self, backend: LocalBackend, name: str) -> None:
        self.backend: LocalBackend = backend
        self._read(name)

    def _read(self, name: str) -> None:
        from lockstep.platforms.local.records import observed_run

        self.observed = observed_run(name, self.backend.root, self.backend.words.again)
        self.job = self.observed.job

    def layout(self) -> RankLayout:
        from lockstep.plan.pages.logs import layout_of, ranks_of_run
        from lockstep.platforms.onhost.readings import object_in

        return layout_of(ranks_of_run(object_in(Path(self._folder, "logs/output/run.json"))), self._nodes)

    @property
    def _nodes(self) -> int:
        return int(self.job["spec"].get("nodes", 0))

    @property
    def _folder(self) -> str:
        return str(self.backend.root / "workspace/runs" / self.name)

    def stacks(self, rank: int | None) -> list[RankAnswer]:
        from lockstep.plan.pages.stacks import read_ranks, with_silent
        from lockstep.platforms.inpod import rankstacks
        from lockstep_gang.contract.layout import equal_layout

        answer = rankstacks.look(rank, str(Path(self._folder).absolute()))
        answers = read_ranks(answer)
        per_node = max(answer["ranksPerNode"], 1)
        return with_silent(answers, rank, {}, equal_layout(answer["worldSize"] // per_node, per_node))

    def look_again(self, before: Object | None = None) -> Object:
        self._read(self.name)
        return self.status

    def answer(self, bundle: Path | None) -> Answer:
        from lockstep.plan.hosts.status import next_steps
        from lockstep.plan.pages.remedies import NO_MODULE_HERE, Step, advice
        from lockstep.plan.pages.why import Where, why
        from lockstep.platforms.local.records import process_of

        answer = why(self.observed, (), time.time())
        failure = self.observed.status_part("failure")
        words = advice(failure, self.name, self.backend.words.again, in_pods=False, no_module=NO_MODULE_HERE)
        help_ = f"; {words}" if answer.state is Where.FAILED and failure else ""
        again = Step(typed_command(self.job, self.backend.words.again), f"{go_on_words(self.job)}{help_}")
        if answer.state in (Where.STARTING, Where.RUNNING, Where.COMPLETE):
            state = Where.COMPLETE if answer.state is Where.COMPLETE else Where.RUNNING
            return replace(answer, next=next_steps(self.observed, state, self.backend.words.again))
        if answer.state in (Where.SILENT, Where.RECORD_UNWRITTEN) and process_of(Path(self._folder)) is not None:
            again = Step(
                f"df -h {shlex.quote(self._folder)}",
                "shows what room its file system has, and df -i how many inodes; it goes on when it can write",
            )
        return replace(answer, next=(again,))

    def suspend(self, *, now: bool = False) -> bool:
        from lockstep.platforms.local.records import process_of

        pid = process_of(Path(self._folder))
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            return False  # it has ended meanwhile, or its agents end by themselves
        except PermissionError:
            raise ConfigError(f"process {pid}, which runs {self.name}, is another user's: ask them to stop it") from None
        if now:
            time.sleep(0.2)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return True

    def resume(self) -> bool:
        raise self.backend.lack("resume", **self.words)

    def raise_retry(self) -> int:
        raise self.backend.lack("retry", **self.words)

    def delete(self) -> str:
        """Delete it: no verb finds it any more, and a new run of its name goes on from its checkpoints."""
        from lockstep.platforms.local.records import process_of

        if self.suspend():
            say(f"job {self.name} saves and stops first; lockstep stop {self.at} --now ends it without a save")
        until = time.monotonic() + STOP_SECONDS
        while process_of(Path(self._folder)) is not None:
            if time.monotonic() > until:
                raise Failed(f"job {self.name} was told to stop, and has not saved and ended for {STOP_SECONDS:.0f} s: it is not deleted")
            time.sleep(POLL_SECONDS)
        if Path(self._folder).is_dir():  # (--files has removed it)
            (Path(self._folder) / DELETED).touch()
        return f"what it left in {self._folder} stays"

    def looks(self, interval: float) -> Looks:
        """Look at it, and at its ranks while it runs."""
        from lockstep.plan.pages.top import LOCAL, machine_node
        from lockstep.platforms.jobs.top import looks_of_job
        from lockstep.platforms.local.records import runs

        async def look() -> tuple[Object, bool]:
            await asyncio.to_thread(self.look_again)
            return {**self.job, "metadata": {**self.job["metadata"], "namespace": LOCAL}}, not runs(Path(self._folder))

        def nodes(answers: Mapping[int, Object]) -> list[Object]:
            desired = (self.status.get("ranks") or {}).get("desired", 0)
            return [machine_node(socket.gethostname(), range(desired), answers.get(0, {}))] if runs(Path(self._folder)) else []

        files = self.backend.files  # (as its ranks name them)
        return looks_of_job(self.name, {0: (files.place, files.run_folder(self.name))}, look, nodes, interval)

    log_uid = ""

    async def is_over(self, say: Say) -> bool:
        from lockstep.platforms.local.records import runs

        return not runs(Path(self._folder))

    @asynccontextmanager
    async def volume(self, node: int, say: Say, use: Use = Use.READ, gpus: int = 0) -> AsyncIterator[Volume]:
        """Open the files of a node. For the trainer's packages, the verb goes on in a Python that has them."""
        from lockstep.plan.pages.logs import no_such_node

        if use.needs_trainer:
            in_full_environment()
        if node >= self._nodes > 0:
            raise no_such_node(self.name, node, self._nodes)
        yield self.backend.files
