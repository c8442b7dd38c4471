"""What the gang's tests share: a run, and real agents of it as processes on loopback."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep_gang.contract.run import JobIdentity, ReportTarget, RestartPolicy, Run, WhenDone, run_text
from lockstep_machine.network import free_ports
from support.checkout import ROOT

WORKSPACE = ROOT / "workspace"
KEY_TEXT = "5a" * 32
KEY = bytes.fromhex(KEY_TEXT)


def make_run(**changes: Any) -> Run:
    """A two-node run of one rank each; for tests that start nothing."""
    values: dict[str, Any] = {
        "job": JobIdentity("x", "ns", "uid-1"),
        "nodes": 2,
        "ranks_per_node": 1,
        "gpus_per_node": 0,
        "coordinator_port": 29400,
        "master_port": 29500,
        "run_dir": "/workspace/runs/x",
        "key_file": "/etc/lockstep/agents/key",
        "command": ("python3", "rank.py"),
        "working_directory": "/workspace",
        "restart": RestartPolicy(0, 0),
        "when_done": WhenDone.EXIT,
    }
    values |= changes
    values.setdefault("addresses", ("127.0.0.1",) * values["nodes"])
    return Run(**values)


def free_port() -> int:
    """Return a free port on which an agent will listen."""
    return int(free_ports(1)[0])


class Gang:
    """Agents of one run, as processes; everything they start is gone when the test is over."""

    def __init__(self, folder: Path, python_options: tuple[str, ...]) -> None:
        self.folder = folder
        self.python_options = python_options
        self.program: tuple[str, ...] = ("-m", "lockstep_gang.agent.main")
        self.run_path = folder / "run.json"
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self._lines: dict[int, list[str]] = {}
        self._readers: list[threading.Thread] = []
        self._news = threading.Condition()
        self.private = tempfile.TemporaryDirectory(prefix="lockstep-", dir="/tmp")
        """Where agents have their sockets, whose paths may have 107 characters; tmp_path is longer."""
        (folder / "key").write_text(KEY_TEXT)

    def write(self, script: str, report: ReportTarget | None = None, **changes: Any) -> Run:
        """run.json for ranks that run `script` (Python)."""
        (self.folder / "rank.py").write_text(script)
        values: dict[str, Any] = {
            "command": (sys.executable, "-S", "rank.py"),  # -S: no site-packages, so a rank starts in 20 ms
            "working_directory": str(self.folder),
            "run_dir": str(self.folder / "run"),
            "key_file": str(self.folder / "key"),
            "coordinator_port": free_port(),
            "master_port": free_port(),
            "environment": {"FOLDER": str(self.folder)},
            "report": report,
        }
        run = make_run(**values | changes)
        self.run_path.write_text(run_text(run))
        return run

    def start(self, *nodes: int, run_path: Path | None = None, arguments: tuple[str, ...] = (), umask: int = -1) -> None:
        for node in nodes:
            if node in self.processes:
                self.processes[node].wait(180)  # the agent before this one
            environment = {**os.environ, "PYTHONPATH": str(WORKSPACE), "LOCKSTEP_NODE": str(node), "TMPDIR": self.private.name}
            command = [sys.executable, *self.python_options, *self.program, "--run", str(run_path or self.run_path)]
            command += arguments
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen(command, **streams, env=environment, start_new_session=True, umask=umask)
            self.processes[node] = process
            self._lines[node] = []
            reader = threading.Thread(target=self._read, args=(node, process), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, node: int, process: subprocess.Popen[str]) -> None:
        with process.stdout as stream:
            for line in stream:
                with self._news:
                    self._lines[node].append(line.rstrip("\n"))
                    self._news.notify_all()

    def codes(self, seconds: float = 180) -> list[int]:
        """Exit codes of all agents, in order of nodes, once they have ended."""
        return [self.processes[node].wait(seconds) for node in sorted(self.processes)]

    def run(self, *, codes: list[int], seconds: float = 180) -> None:
        """Start an agent of each node, and let them end: with these exit codes."""
        self.start(*range(len(codes)))
        assert self.codes(seconds) == codes, self._lines

    def log(self, node: int = 0) -> str:
        """All that the agent of this node has written; complete once it has ended."""
        for reader in self._readers:
            if self.processes[node].poll() is not None:
                reader.join(5)
        with self._news:
            return "\n".join(self._lines[node])

    def until(self, text: str, node: int = 0, seconds: float = 180) -> str:
        """The first line of the node's log that has `text`."""
        return self.wait(lambda: next((line for line in self._lines[node] if text in line), None), seconds, f"{text!r} on node {node}")

    def wait(self, found: Callable[[], str | None], seconds: float, what: str) -> str:
        with self._news:
            assert self._news.wait_for(lambda: found() is not None, seconds), f"no {what} in {seconds} s: {self._lines}"
            result = found()
        assert result is not None
        return result

    def record(self, name: str) -> Any:
        text = (self.folder / "run" / "gang" / name).read_text()
        return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)

    def signal(self, node: int, number: signal.Signals) -> None:
        self.processes[node].send_signal(number)

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in self._readers:
            reader.join(5)
        self.private.cleanup()


@contextmanager
def gang(folder: Path, python_options: tuple[str, ...] = ("-S",)) -> Iterator[Gang]:
    """-S: without site-packages an agent starts sooner."""
    agents = Gang(folder, python_options)
    try:
        yield agents
    finally:
        agents.end()


def gone(pid: int, seconds: float) -> bool:
    """Whether the process ends within this time. A zombie has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def now() -> float:
    return time.monotonic()
