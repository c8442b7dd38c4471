"""Machines of a launched job: each with a folder of its own, on loopback or in a network namespace, and what is typed on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

WAIT_SECONDS = 240.0
SAVES = """
import os, signal, sys, time
from pathlib import Path

def save(*_):
    Path(f"saved-{os.environ['RANK']}").touch()
    sys.exit(0)  # as many trainers end after a save

signal.signal(signal.SIGTERM, save)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "in attempt", os.environ["LOCKSTEP_ATTEMPT"], flush=True)
while not Path("go").exists():
    time.sleep(0.05)
"""
"""Ends when the file `go` is in its folder; saves when it is asked to."""


def wait_until(holds: Callable[[], object], what: str | Callable[[], str]) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < give_up, what if isinstance(what, str) else what()
        time.sleep(0.05)


@dataclass
class Typed:
    """A command line that runs on a machine, and what it has printed."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def sees(self, text: str, times: int = 1) -> None:
        """Wait until the output has this text so often."""
        wait_until(
            lambda: self.output.count(text) >= times or self.process.poll() is not None, lambda: f"never {text!r} in:\n{self.output}"
        )
        assert self.output.count(text) >= times, f"ended with {self.process.poll()} without {text!r}:\n{self.output}"

    def ends(self, seconds: float = WAIT_SECONDS) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end:\n{self.output}") from None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Machine:
    """A place where lockstep is typed."""

    folder: Path
    address: str = "127.0.0.1"
    namespace: str = ""
    interface: str = "lo"
    environment: dict[str, str] = field(default_factory=dict)
    typed: list[Typed] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "workspace").mkdir(parents=True)
        (self.folder / "datasets").mkdir()

    def write(self, name: str, text: str) -> None:
        (self.folder / "workspace" / name).write_text(text)

    def has(self, name: str) -> bool:
        return (self.folder / "workspace" / name).exists()

    def type(self, *words: str, given: str | None = None, **variables: str) -> Typed:
        """Run `lockstep WORDS --cluster FOLDER`; `given`: on standard input."""
        log = self.folder / f"typed-{len(self.typed)}.log"
        enter = ("ip", "netns", "exec", self.namespace) if self.namespace else ()
        state = {"XDG_STATE_HOME": str(self.folder / "state"), "NO_COLOR": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*enter, sys.executable, "-m", "lockstep.cli.main", *words, "--cluster", str(self.folder)],
                stdin=subprocess.DEVNULL if given is None else subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **state, **self.environment, **variables},
                start_new_session=True,
                cwd=self.folder,
            )
        if given is not None and process.stdin is not None:
            process.stdin.write(f"{given}\n".encode())
            process.stdin.close()
        self.typed.append(Typed(process, log))
        return self.typed[-1]

    def processes(self) -> list[int]:
        """All that run in the namespace."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    def lose_power(self) -> None:
        """Nothing of it says a last word; its network is there again afterwards, its processes are not."""
        _ip("-n", self.namespace, "link", "set", self.interface, "down")
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none is to see another one die, and say so once the network is there again
            for pid in self.processes():
                os.kill(pid, number)
        for one in self.typed:
            if one.process.poll() is None:
                one.process.wait()
        wait_until(lambda: not self.processes(), "processes outlive SIGKILL")
        _ip("-n", self.namespace, "link", "set", self.interface, "up")

    def end(self) -> None:
        """Nothing of it runs when this returns."""
        for one in self.typed:
            if one.process.poll() is None:
                one.process.terminate()
        for one in self.typed:
            try:
                one.process.wait(30)
            except subprocess.TimeoutExpired:
                one.kill()


def write_job(folder: Path, **spec: Any) -> Path:
    """A job file of two nodes on CPUs."""
    base = {"nodes": 2, "gpusPerNode": 0, "restart": {"maxRestarts": 5, "backoffSeconds": 0}}
    job = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": base | spec}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


@contextmanager
def machines_on_loopback(root: Path, count: int = 2) -> Iterator[list[Machine]]:
    machines = [Machine(root / f"machine-{number}") for number in range(count)]
    try:
        yield machines
    finally:
        for machine in machines:
            machine.end()


@contextmanager
def machines_in_namespaces(root: Path, count: int = 2) -> Iterator[list[Machine]]:
    """Machines with a network of their own each, and a cable to a switch. Needs root."""
    mark = f"ls{os.getpid() % 100_000}"
    names = [f"{mark}-{number}" for number in range(count)]
    switch = f"{mark}-s"
    machines: list[Machine] = []
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", f"nic{number}", "netns", name)
            _ip("-n", switch, "link", "set", f"port{number}", "master", "br0", "up")
            _ip("-n", name, "address", "add", f"10.78.3.{10 + number}/24", "dev", f"nic{number}")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", f"nic{number}", "up")
            machines.append(Machine(root / f"machine-{number}", f"10.78.3.{10 + number}", name, f"nic{number}"))
        yield machines
    finally:
        for machine in machines:
            machine.end()
            for pid in machine.processes():
                os.kill(pid, signal.SIGKILL)
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def own_and_descendants(pids: Sequence[int]) -> list[int]:
    """These processes and all that came of them."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sorted(family)
