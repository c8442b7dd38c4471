"""A place where jobs run: a process a node on this machine, which outlives the command that started it.

No verb knows of it. It is registered by one line, as `places.backends` registers all, and it shows what a place takes: this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError, Failed
from lockstep.api.job import TrainingJob
from lockstep.api.objects import Object, condition, has_ended, is_true
from lockstep.plan.ahead.submission import refuse_ended
from lockstep.plan.cluster.pairs import PairsMeasured, Way
from lockstep.plan.hosts.facts import JobOnHost
from lockstep.plan.hosts.record import Coordinator, JobRecord, read_record, record_text
from lockstep.plan.hosts.status import Seen, complaints, host_job, next_steps
from lockstep.plan.pages.logs import LogSelection, no_such_node
from lockstep.plan.pages.stacks import RankAnswer, read_ranks, with_silent
from lockstep.plan.pages.top import machine_node
from lockstep.plan.pages.why import Answer, why
from lockstep.plan.render.machine import machine_variables
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.plan.render.run import machine_run, without_ranks
from lockstep.platforms.inpod import rankstacks
from lockstep.platforms.jobs.looks import Looks
from lockstep.platforms.jobs.machine import check_inputs
from lockstep.platforms.jobs.shortresults import Hear, Read, Short, ShortEnd, ShortRuns
from lockstep.platforms.jobs.top import looks_of_job
from lockstep.platforms.onhost.look import last_lines
from lockstep.platforms.output import say
from lockstep.platforms.places.backend import Backend, Job
from lockstep.platforms.places.common import CommonJob, show_to_its_end
from lockstep.platforms.places.orders import Order
from lockstep.platforms.places.values import JobGone, NamedPlace, Say, Use, Volume, Words
from lockstep_gang.contract.layout import RankLayout
from lockstep_gang.contract.run import Run, parse_run, run_text
from lockstep_machine.network import free_ports
from lockstep_spec.files import write_durably
from support.process_place import ProcessPlace

LOOK_SECONDS = 0.2
STARTED: list[subprocess.Popen[bytes]] = []  # (they are not waited for)
KEEP = """
import fcntl, os, signal, subprocess, sys, time
folder, node, *command = sys.argv[1:]
lock = open(f"{folder}/node-{node}.lock", "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(0)  # another keeper has the node
lock.truncate(0)
lock.write(str(os.getpid()))
lock.flush()
log, stops = open(f"{folder}/node-{node}.log", "ab"), []
signal.signal(signal.SIGTERM, lambda *_: (stops.append(1), agent.send_signal(signal.SIGTERM)))
while True:
    agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    if agent.wait() in (0, 1, 75) or stops:
        break
    time.sleep(0.5)
"""
"""Keeps a node's agent: what ends without a word is started again."""


def keep(folder: Path, nodes: int) -> list[subprocess.Popen[bytes]]:
    """Start the keeper of each node that has none, and return once all hold their locks."""
    agent = (sys.executable, "-m", "lockstep_gang.agent.main", "--run", str(folder / "run.json"), "--node")
    words = [
        [sys.executable, "-c", KEEP, str(folder), str(node), *agent, str(node)] for node in range(nodes) if keeper_of(folder, node) is None
    ]
    started = [
        subprocess.Popen(one, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        for one in words
    ]
    while any(keeper_of(folder, int(one.args[4])) is None and one.poll() is None for one in started):  # type: ignore[index]
        time.sleep(LOOK_SECONDS)
    STARTED.extend(started)
    return started


def keeper_of(folder: Path, node: int) -> int | None:
    """Return the pid of a node's keeper; None: it has ended."""
    with contextlib.suppress(OSError), (folder / f"node-{node}.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = lock.read()
            return int(text) if text.isdecimal() else None
    return None


class Processes(Backend):
    """A workspace whose jobs are processes of this machine."""

    kind = "processes"

    @classmethod
    def at(cls, where: NamedPlace) -> Self:
        return cls(where.workspaces()[0])

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        again, where = f"--cluster {shlex.quote(str(root))}", f"in workspace {root}"
        self.words = Words(again, where, elsewhere="--cluster names another one")

    def resolved(self, job: TrainingJob, profile: TrainingCluster) -> Resolved:
        folders = PlatformDefaults(str(self.root / "workspace"), str(self.root / "datasets"), uid=str(uuid.uuid4()), image="processes")
        return resolve(job, profile, folders)

    def run_of(self, resolved: Resolved, folder: Path) -> Run:
        """Return run.json of all nodes, with its key in the folder."""
        coordinator, master = free_ports(2)
        own = {"key_file": str(folder / "key"), "master_port": master, "environment": machine_variables(replace(resolved, nccl={}))}
        run = machine_run(resolved, sys.executable, ("127.0.0.1",) * resolved.nodes, coordinator, **own)
        return replace(run, preflight=run.preflight and replace(run.preflight, rdma=None, all_reduce=None))

    def run(self, order: Order) -> int:
        name, folder = order.job.metadata.name, self.root / "state" / order.job.metadata.name
        if (folder / "job.json").is_file():
            earlier = ProcessJob(self, name)
            if earlier.seen.runs:
                keep(folder, len(earlier.seen.hosts))  # (its start may have broken off between two of them)
                raise ConfigError(f"job {name} runs already: lockstep logs {earlier.at} -f follows it, lockstep stop {earlier.at} stops it")
            if not order.typed.is_fresh:
                refuse_ended(order.job, earlier.job, earlier.at, f"lockstep retry {earlier.at}", order.typed)
            shutil.rmtree(folder)
        resolved = self.resolved(order.job, order.cluster.profile)
        check_inputs(resolved)
        follow = f"lockstep logs {name} {self.words.again} -f"
        try:
            self._write(resolved, order, folder)
            keep(folder, resolved.nodes)
        except KeyboardInterrupt:
            say(f"interrupted while job {name} was being started: {follow} shows it if it runs, and the same command goes on")
            raise
        job = ProcessJob(self, name)
        say(f"job {name} is started; it runs on without this terminal: {follow}")
        return job.until_running() if order.detach else asyncio.run(show_to_its_end(job, LogSelection()))

    def _write(self, resolved: Resolved, order: Order, folder: Path) -> None:
        """Write the files of a start: all of them are there, or none."""
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            new = Path(made) / "job"
            new.mkdir()
            run = self.run_of(resolved, folder)
            written = order.job.written()
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            metadata = {**written["metadata"], "namespace": "", "uid": resolved.uid, "creationTimestamp": when}
            ranks = run.node_ranks or (run.ranks_per_node,) * run.nodes
            record = JobRecord(
                {**written, "metadata": metadata}, "processes", tuple(f"node-{node}" for node in range(run.nodes)), ranks, 0,
                resolved.platform.workspace, resolved.platform.datasets, False, (sys.executable,), {},
                Coordinator("127.0.0.1", run.coordinator_port),
            )  # fmt: skip
            write_durably(new / "key", secrets.token_hex(32).encode(), 0o600)
            (new / "run.json").write_text(run_text(run))
            (new / "job.json").write_text(record_text(record))
            new.rename(folder)

    def short_runs(self, profile: TrainingCluster, seconds: int | None) -> ShortRuns:
        return ProcessRuns(self, profile)

    def looks(self, job: str | None, interval: float, *, live: bool) -> Looks:
        if job is None:
            raise ConfigError("name a job: lockstep top JOB")
        return self.job(job).looks(interval)

    def jobs(self, *, everywhere: bool = False, selector: str | None = None) -> list[Job]:
        return [ProcessJob(self, path.parent.name) for path in sorted((self.root / "state").glob("*/job.json"))]

    def job(self, name: str) -> ProcessJob:
        if not (self.root / "state" / name / "job.json").is_file():
            raise ConfigError(self.words.no_such_job(name, [one.name for one in self.jobs()]))
        return ProcessJob(self, name)


class ProcessJob(CommonJob):
    """A job, by the files in its folder."""

    def __init__(self, backend: Processes, name: str) -> None:
        self.backend: Processes = backend
        self.folder = backend.root / "state" / name
        self.run_folder = str(backend.root / "workspace/runs" / name)
        self._see()

    def _see(self) -> None:
        record = read_record(json.loads((self.folder / "job.json").read_text()))
        gang, run = Path(self.run_folder, "gang"), parse_run((self.folder / "run.json").read_text())
        report, end = (json.loads(path.read_text()) if (path := gang / name).exists() else {} for name in ("report.json", "end.json"))
        age = time.time() - (gang / "report.json").stat().st_mtime if report else 0.0
        jobs = {}
        for node, host in enumerate(record.hosts):
            jobs[host] = JobOnHost(
                record=replace(record, node=node),
                unit="active" if keeper_of(self.folder, node) is not None else "inactive",
                stopped=(self.folder / "stopped").exists(),
                retry=run.restart.retry,
                ended=end,
                report=report.get("report") if node == 0 else None,
                report_seconds=age,
                log=tuple(last_lines(self.folder / f"node-{node}.log")),
            )
        self.seen = Seen(record, jobs, {})
        self.observed = host_job(self.seen, self.backend.words.again, time.time())
        self.job = self.observed.job

    def until_running(self) -> int:
        while not (is_true(self.status, "RanksReady") or is_true(self.status, "Complete")):
            if condition(self.status, "Progressing").get("status") == "False":
                raise Failed(f"job {self.name} does not run: {condition(self.status, 'Progressing').get('message')}")
            time.sleep(LOOK_SECONDS)
            self.look_again()
        return 0

    def layout(self) -> RankLayout:
        return RankLayout(self.seen.record.ranks)

    def stacks(self, rank: int | None) -> list[RankAnswer]:
        answers = read_ranks(rankstacks.look(rank, self.run_folder))
        return with_silent(answers, rank, {}, self.layout())

    def look_again(self, before: Object | None = None) -> Object:
        uid = self.uid
        if not (self.folder / "job.json").is_file():
            raise JobGone(self.name)
        self._see()
        if self.uid != uid:
            raise JobGone(self.name, self.job)
        return self.status

    def answer(self, bundle: Path | None) -> Answer:
        answer = why(self.observed, (), time.time())
        return replace(answer, next=next_steps(self.observed, answer.state, self.backend.words.again), says=complaints(self.seen))

    def suspend(self, *, now: bool = False) -> bool:
        keepers = [pid for node in range(len(self.seen.hosts)) if (pid := keeper_of(self.folder, node)) is not None]
        (self.folder / "stopped").touch()
        for pid in keepers * (1 + now):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return bool(keepers)

    def resume(self) -> bool:
        if not self.seen.stopped and all(one.runs for one in self.seen.jobs.values()):
            return False
        self._start()
        return True

    def _start(self) -> None:
        while self.seen.stopped and self.seen.runs:  # (it still saves)
            time.sleep(LOOK_SECONDS)
            self.look_again()
        (self.folder / "stopped").unlink(missing_ok=True)
        keep(self.folder, len(self.seen.hosts))

    def raise_retry(self) -> int:
        run = parse_run((self.folder / "run.json").read_text())
        number = run.restart.retry + 1
        new = self.folder / "run.json.new"
        new.write_text(run_text(replace(run, restart=replace(run.restart, retry=number))))
        new.rename(self.folder / "run.json")
        self._start()
        return number

    def delete(self) -> str:
        self.suspend()
        while self.seen.runs:
            time.sleep(LOOK_SECONDS)
            self.look_again()
        shutil.rmtree(self.folder)
        return f"what it left in {self.run_folder} stays"

    def looks(self, interval: float) -> Looks:
        layout = self.layout()

        async def look() -> tuple[Object, bool]:
            is_over = has_ended(self.look_again())
            return self.job, is_over

        def nodes(answers: Mapping[int, Object]) -> list[Object]:
            hosts = enumerate(self.seen.hosts)
            return [{**machine_node(host, layout.ranks_of(node), answers.get(node, {})), "node": node} for node, host in hosts]

        folders = {node: (ProcessPlace(), self.run_folder) for node in range(len(self.seen.hosts))}
        return looks_of_job(self.name, folders, look, nodes, interval)

    @asynccontextmanager
    async def volume(self, node: int, say: Say, use: Use = Use.READ, gpus: int = 0) -> AsyncIterator[Volume]:
        if node >= len(self.seen.hosts):
            raise no_such_node(self.name, node, len(self.seen.hosts))
        root = self.backend.root
        yield Volume(ProcessPlace(python=(sys.executable,)), str(root / "workspace"), str(root / "datasets"))


class ProcessRuns(ShortRuns):
    """Short runs, whose folder goes with them."""

    left = "its processes are ended"

    def __init__(self, backend: Processes, profile: TrainingCluster) -> None:
        self._backend, self._profile = backend, profile

    async def run(self, kind: Short, job: TrainingJob, hear: Hear, read: Read | None = None) -> ShortEnd:
        resolved = self._backend.resolved(job, self._profile)
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            write_durably(folder / "key", secrets.token_hex(32).encode(), 0o600)
            run = self._backend.run_of(resolved, folder)
            run = replace(run, run_dir=made) if kind is Short.STEPS else without_ranks(run, run.run_dir)
            (folder / "run.json").write_text(run_text(run))
            keepers = keep(folder, resolved.nodes)
            try:
                await asyncio.to_thread(keepers[0].wait)
            finally:
                for keeper in keepers:
                    keeper.terminate()
                for keeper in keepers:
                    keeper.wait()
            lines = (folder / "node-0.log").read_text(errors="replace").splitlines()
            for line in lines:
                hear(line)
            if read is not None:
                await read(ProcessPlace(), made)
        return ShortEnd(" | ".join(lines[-6:]), resolved.transport.value, resolved.nodes)

    async def pairs(self, job: TrainingJob, way: Way) -> PairsMeasured:
        raise ConfigError("this machine has no pair of nodes")
