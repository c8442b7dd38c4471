"""Run a job on this machine, one agent a node as a process, look at its nodes by preflight, or show what it would learn of its data."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.plan.cluster.pairs import PairsMeasured, Way
from lockstep.plan.reconcile.clocks import Earlier, retried
from lockstep.plan.render.resolve import path_lines, resolve, unkept_lines
from lockstep.plan.render.run import without_ranks
from lockstep.platforms.jobs.machine import END_SECONDS, alone, check_inputs, run_dir, write_private
from lockstep.platforms.jobs.shortresults import LINES, Hear, Read, Short, ShortEnd, ShortRuns
from lockstep.platforms.local.place import LocalPlace
from lockstep.platforms.local.placement import local_defaults, local_run, node_devices
from lockstep.platforms.output import tell
from lockstep_gang.contract.run import run_text
from lockstep_machine.gpus import gpu_devices
from lockstep_machine.network import free_ports
from lockstep_spec.exits import FAILED, INTERRUPTED

ENDINGS = (0, FAILED, 75)
"""An agent's codes at the end of the job, whatever that was: complete, failed, saved and stopped."""


def run_local(job: TrainingJob, profile: TrainingCluster, root: Path, earlier: Earlier | None = None) -> int:
    """Run the job to its end, and return its exit code: 0 complete, 1 failed, 130 interrupted.

    Every call is a job of its own, unless it goes on from an `earlier` one that failed; checkpoints are found by the job's name.

    Raises ConfigError before anything is started when the job can't run here.
    """
    if earlier is not None:
        job = retried(job, earlier)
    resolved = resolve(job, profile, local_defaults(root, uid=earlier.uid if earlier is not None else str(uuid.uuid4())))
    check_inputs(resolved)
    for line in (*path_lines(resolved), *unkept_lines(resolved, "here", "ranks take what this machine has")):
        tell(line)
    devices = node_devices(resolved, os.environ, gpu_devices())
    folder = run_dir(resolved)
    with alone(folder, job), tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        key_file, run_path = Path(private) / "key", Path(private) / "run.json"
        run = local_run(resolved, key_file, free_ports(2), os.environ)
        write_private(key_file, secrets.token_hex(32))
        run_path.write_text(run_text(run), encoding="utf-8")
        return run_agents(run_path, resolved.nodes, folder / "logs", devices=devices)


class LocalRuns(ShortRuns):
    """Short runs as processes of this machine."""

    left = "the run that was measured is removed"

    def __init__(self, profile: TrainingCluster, root: Path) -> None:
        self._profile, self._root = profile, root

    async def run(self, kind: Short, job: TrainingJob, hear: Hear, read: Read | None = None) -> ShortEnd:
        """Raises KeyboardInterrupt after Ctrl-C, which ends the ranks at once, too."""
        resolved = resolve(job, self._profile, local_defaults(self._root, uid=str(uuid.uuid4())))
        with contextlib.ExitStack() as stack:
            private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-")))
            folder, devices = private, tuple[str, ...]()
            if kind is Short.STEPS:
                check_inputs(resolved)
                devices = node_devices(resolved, os.environ, gpu_devices())
                folder = run_dir(resolved).with_name(f".measured-{resolved.name}")
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                stack.enter_context(alone(folder))
            write_private(private / "key", secrets.token_hex(32))
            run = local_run(resolved, private / "key", free_ports(2), os.environ)
            run = replace(run, run_dir=str(folder)) if kind is Short.STEPS else without_ranks(run, run.run_dir)
            (private / "run.json").write_text(run_text(run), encoding="utf-8")
            _run_quietly(private / "run.json", resolved.nodes, folder / "logs", devices)
            lines = (folder / "logs/node-0.log").read_text(encoding="utf-8", errors="replace").splitlines()
            for line in lines:
                hear(line)
            if read is not None:
                await read(LocalPlace(), str(folder))
        return ShortEnd(" | ".join(lines[-LINES:]), resolved.transport.value, resolved.nodes)

    async def pairs(self, job: TrainingJob, way: Way) -> PairsMeasured:
        raise ConfigError("this machine has no pair of nodes: name a cluster or hosts by --cluster")


def _run_quietly(run_path: Path, nodes: int, logs: Path, devices: Sequence[str]) -> None:
    """Run agents to their end, of which the log tells. Raises KeyboardInterrupt once they have ended after a signal."""
    try:
        with interruptible():
            agents = Agents(run_path, nodes, logs, shown=False, devices=devices)
            try:
                agents.wait()
                agents.wait_all(END_SECONDS)
            finally:
                for number in (signal.SIGINT, signal.SIGTERM):  # (`timeout` sends two at once)
                    signal.signal(number, signal.SIG_IGN)
                agents.tell(signal.SIGTERM)  # the first of two: nothing has to be saved
                agents.end()
    except Interrupted:
        raise KeyboardInterrupt from None


def preview_local(job: TrainingJob, profile: TrainingCluster, root: Path, samples: int) -> int:
    """Print the first `samples` of every source of the data, and return the trainer's exit code. No rank is started, nothing is recorded.

    The trainer runs as a process of its own, which a Ctrl-C ends without a traceback. Raises ConfigError when there is nothing to show.
    """
    if job.spec.training is None:
        raise ConfigError("--preview shows what spec.training would learn of its data, but this job runs a script: leave it out")
    resolved = resolve(job, profile, local_defaults(root, uid=str(uuid.uuid4())))
    check_inputs(resolved)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        run_path = Path(private) / "run.json"
        run = local_run(resolved, Path(private) / "key", free_ports(2), os.environ)
        run_path.write_text(run_text(run), encoding="utf-8")
        command = [*run.command, "--run", str(run_path), "--preview", str(samples)]
        return subprocess.run(command, check=False, env={**os.environ, **run.environment}, process_group=0).returncode


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


class Agents:
    """One agent a node. Node 0's output is this process's, if `shown`; the others' goes to files `node-N.log` in `logs`."""

    def __init__(self, run_path: Path, nodes: int, logs: Path, *, shown: bool = True, devices: Sequence[str] = ()) -> None:
        """`devices`: CUDA_VISIBLE_DEVICES of each node; none: as this process has it."""
        self._logs = logs
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._run_path, self._shown = run_path, shown
        self._own = [{"CUDA_VISIBLE_DEVICES": names} for names in devices] or [{}] * nodes
        self._processes = [self._started(node) for node in range(nodes)]

    def wait(self) -> int:
        """Wait until node 0's agent has ended; 0 when the job is complete. Raises Interrupted.

        An agent that is killed has nobody here to replace it. That of node 0 is started again once, since it keeps the job's record: it
        goes on as restart allows, or writes down how the job ended.
        """
        gone: int | None = None
        killed = False
        while True:
            try:
                node, code = self._ended.get(timeout=None if gone is None else END_SECONDS)
            except queue.Empty:
                tell(f"lockstep: the agent of node {gone} was stopped, but the job goes on without it: stopping the job")
                return FAILED
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            if node == 0 and code < 0 and not killed:
                killed = True
                tell(f"lockstep: the agent of node 0 {how}: it is started again")
                self._processes[0] = self._started(node)
            elif node == 0:
                return 0 if code == 0 else FAILED
            elif code not in ENDINGS:  # killed from outside, or it could not start
                tell(f"lockstep: the agent of node {node} {how}, its log is {self._logs}/node-{node}.log: stopping the job")
                return FAILED
            else:
                gone = node

    def tell(self, number: signal.Signals) -> None:
        """SIGTERM means save and stop; a second one, stop at once."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait_all(self, seconds: float | None) -> bool:
        """Return True if all have ended within this time."""
        try:
            for process in self._processes:
                process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Nothing is left when this returns."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.wait_all(0):
                return
            self.tell(number)
            self.wait_all(END_SECONDS)

    def _started(self, node: int) -> subprocess.Popen[bytes]:
        logs = None if self._shown and node == 0 else self._logs
        process = self._start(self._run_path, node, logs, {**os.environ, **self._own[node]})
        threading.Thread(target=lambda: self._ended.put((node, process.wait())), daemon=True).start()
        return process

    @staticmethod
    def _start(run_path: Path, node: int, logs: Path | None, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "lockstep_gang.agent.main",
            "--run",
            str(run_path),
            "--node",
            str(node),
            "--parent",
            str(os.getpid()),
        ]
        if logs is None:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"node-{node}.log").open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment)


def run_agents(run_path: Path, nodes: int, logs: Path, *, shown: bool = True, devices: Sequence[str] = ()) -> int:
    """The exit code: 0 complete, 1 failed, 130 interrupted. Ctrl-C lets the ranks save; a second one stops them at once."""
    with interruptible():
        agents = Agents(run_path, nodes, logs, shown=shown, devices=devices)
        try:
            code = agents.wait()
            agents.wait_all(END_SECONDS)
            return code
        except Interrupted:
            tell("", "lockstep: stopping, the ranks save first (Ctrl-C again: at once)")
            _save_and_stop(agents)
            return INTERRUPTED
        finally:
            agents.end()


def _save_and_stop(agents: Agents) -> None:
    for _ in range(2):
        agents.tell(signal.SIGTERM)
        try:
            agents.wait_all(None)
            return
        except Interrupted:
            continue


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
