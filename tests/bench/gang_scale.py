""".venv/bin/python tests/bench/gang_scale.py --json: what a gang of up to 1,024 nodes with 8 ranks each costs its coordinator, and how soon
it acts.

Coordinator and port are the real ones, in a process of their own, with a volume (a folder) and reports that are made but go nowhere. The
agents' ends of the connections are real too (their link and their outbox, in two processes): handshake, signatures, frames and pauses over
loopback. Ranks are played: each tells a step, a beat and its pace every 2 s, as Lockstep's trainer does.

all_here        seconds from the start of the agents' processes until every node has proved itself and said Hello
all_ranks_run   from there until every rank has been heard
lag_p99, lag_max        of the coordinator's event loop while ranks run, seconds
cores           CPU of the coordinator's process while ranks run, in cores; agents_cores: of all agents together
all_stopped     seconds from one rank's failure until every node has stopped its ranks
restarted       from there (1 s after the failure at the soonest) until all ranks of the next attempt run
reconnected     seconds from the loss of all connections at once until every node is back; ran_on: no rank was stopped for it
memory          PSS of the coordinator's process, MB
start_cpu       CPU seconds of the coordinator's process from its start until all ranks run
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[0] = __file__.rsplit("/", 2)[0]  # tests/ has what it stands on

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep_gang.agent.link import Handlers, Link
from lockstep_gang.agent.outbox import Outbox
from lockstep_gang.contract.messages import (
    Activity,
    Beat,
    Error,
    Exited,
    Hello,
    Order,
    Pace,
    RankExit,
    RankReport,
    RankState,
    Start,
    Started,
    Step,
    Stop,
    Stopped,
)
from lockstep_gang.contract.run import ReportTarget, RestartPolicy, Run
from lockstep_gang.coordinator import https_post
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.server import Server
from lockstep_gang.lifecycle.gang import Phase
from unit.gang.cases import KEY, WORKSPACE, free_port, make_run

AGENTS = 2
"""Processes that play agents."""
TICK_SECONDS = 0.05
PACE_SECONDS = 2.0
LAST_LINES = tuple(f"RuntimeError: line {number} of what a rank wrote before its end" for number in range(20))


def run_of(nodes: int, ranks_per_node: int, folder: Path, port: int) -> Run:
    report = ReportTarget("https://operator.invalid/report", "", "/dev/null")
    return make_run(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=ranks_per_node,
        restart=RestartPolicy(3, 1),
        training={"played": True},
        run_dir=str(folder),
        coordinator_port=port,
        report=report,
    )


def say(**event: Any) -> None:
    """Print for the process that measures."""
    print(json.dumps({"at": time.monotonic(), "cpu": time.process_time(), **event}), flush=True)


async def coordinate(run: Run) -> None:
    """The coordinator's process: says what it sees of its gang, and at the end of a line on its input how late its loop was since the last
    one.
    """
    https_post.Sender.post = lambda *_: https_post.Answer(200, b"{}")  # type: ignore[assignment,method-assign]
    coordinator = Coordinator(run, KEY, Output(lambda line: say(line=line), tuple, lambda _: None))
    hellos, connected = 0, coordinator.connected

    def counted(*hello: Any) -> bool:
        nonlocal hellos
        hellos += 1
        return connected(*hello)

    coordinator.connected = counted  # type: ignore[method-assign]
    server = Server(run, KEY, coordinator, Output(lambda line: say(line=line), tuple, lambda _: None))
    await server.start()
    hosting = asyncio.ensure_future(coordinator.run())
    late: list[float] = []
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, lambda: (os.read(0, 100), asked.set()))
    before: tuple[object, ...] = ()
    say(event="listens")
    while not hosting.done():
        due = time.monotonic() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        late.append(time.monotonic() - due)
        gang = coordinator.gang
        seen = gang.phase.value, gang.attempt, gang.nodes.counts.here, gang.ranks.counts.missing if gang.phase is Phase.ACTIVE else None
        if (*seen, hellos) != before:
            before = (*seen, hellos)
            say(event="gang", phase=seen[0], attempt=seen[1], here=seen[2], missing=seen[3], counted=gang.budget.counted, hellos=hellos)
        if asked.is_set():
            asked.clear()
            say(event="late", late=late)
            late = []
    hosting.result()


class PlayedAgent:
    """The agent's end of one connection, and its ranks."""

    def __init__(self, run: Run, node: int) -> None:
        self._run, self._node = run, node
        self.link = Link(run, KEY, node, Handlers(self._hello, lambda: None, self._take, lambda _: None))
        self._outbox = Outbox(node, run.world_size, self.link.send)
        self._known = self._running = self._step = 0
        self._exits: dict[int, RankExit] = {}

    async def run(self) -> None:
        await asyncio.gather(self.link.run(), self._outbox.run(), self._train())

    def _hello(self) -> Hello:
        ranks = self._run.ranks_of(self._node) if self._known else ()
        states = tuple(RankState(rank, True, self._exits.get(rank)) for rank in ranks)
        return Hello(self._node, f"agent-{self._node}", self._known, self._running, states)

    def _take(self, order: Order) -> None:
        if isinstance(order, Start) and order.attempt > self._known:
            self._known = self._running = order.attempt
            self._exits = {}
            self._outbox.begin_attempt(order.attempt)
            self.link.send(Started(order.attempt))
            for rank in self._run.ranks_of(self._node):
                self._outbox.put(Activity(rank, "Load"), first=True)
        elif isinstance(order, Stop):
            for rank in self._run.ranks_of(self._node) if self._running else ():
                if rank not in self._exits:
                    self._end(RankExit(rank, None, "SIGKILL", True, None, LAST_LINES))
            self._running = 0
            self.link.send(Stopped(order.attempt))

    def fail(self, rank: int) -> None:
        self._end(RankExit(rank, 1, None, False, Error(rank, "ValueError", "played"), LAST_LINES))

    def _end(self, exit_: RankExit) -> None:
        self._exits[exit_.rank] = exit_
        self._outbox.flush()
        self.link.send(Exited(self._known, exit_))

    async def _train(self) -> None:
        while True:
            await asyncio.sleep(PACE_SECONDS)
            self._step += 1
            for rank in self._run.ranks_of(self._node) if self._running else ():
                for report in self._reports(rank) if rank not in self._exits else ():
                    self._outbox.put(report)

    def _reports(self, rank: int) -> Iterator[RankReport]:
        yield Step(rank, self._step, 10_000, 0, 50, {"loss": "1.0", "learning_rate": "0.0001"} if rank == 0 else {})
        yield Beat(rank, f"Step {self._step + 1}", "forward of micro-batch 1 of 2", self._step * 9, 120)
        yield Pace(rank, self._step, 1, 1_000_000)

    def cut(self) -> None:
        """The connection is lost."""
        if self.link._channel is not None:
            self.link._channel.abort()


async def agents(run: Run, nodes: range) -> None:
    """A process of agents: `fail RANK` and `cut` on its input."""
    played = {node: PlayedAgent(run, node) for node in nodes}

    def take() -> None:
        for line in os.read(0, 4096).decode().splitlines():
            if line == "cut":
                for agent in played.values():
                    agent.cut()
            elif line == "cpu":
                say(event="cpu")
            else:
                played[run.node_of(int(line))].fail(int(line))

    asyncio.get_running_loop().add_reader(0, take)
    await asyncio.gather(*(agent.run() for agent in played.values()))


class Process:
    """One of the bench's own, and what it says."""

    def __init__(self, role: str, run: Run, *nodes: int) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--role", role, "--run-dir", run.run_dir]
        command += ["--nodes", str(run.nodes), "--ranks", str(run.ranks_per_node), "--port", str(run.coordinator_port), *map(str, nodes)]
        environment = {**os.environ, "PYTHONPATH": str(WORKSPACE)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next of its words for which that holds."""
        for text in self._process.stdout:
            event: dict[str, Any] = json.loads(text)
            if "line" in event:
                self.lines.append(event["line"])
            elif holds(event):
                return event
        raise RuntimeError(f"process {self._process.args} ended with {self._process.wait()}; its last lines: {self.lines[-5:]}")

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(nodes: int, ranks_per_node: int, seconds: float) -> dict[str, Any]:
    """The figures of one gang, after `seconds` in which ranks run. Raises RuntimeError when a process ends, AssertionError when the gang
    doesn't do as it should.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gang-scale-")))
        run = run_of(nodes, ranks_per_node, folder, free_port())

        def started(*what: Any) -> Process:
            process = Process(*what)
            stack.callback(process.end)
            return process

        coordinator = started("coordinator", run)
        coordinator.until(lambda event: event.get("event") == "listens")
        began = time.monotonic()
        players = [started("agents", run, nodes * place // AGENTS, nodes * (place + 1) // AGENTS) for place in range(AGENTS)]
        return _play(run, coordinator, players, (began, seconds))


def _play(run: Run, coordinator: Process, players: list[Process], times: tuple[float, float]) -> dict[str, Any]:
    began, seconds = times
    here = coordinator.until(lambda event: event.get("here") == run.nodes)
    runs = coordinator.until(_runs(run, 1))
    coordinator.ask("")
    before = coordinator.until(lambda event: "late" in event)
    agents_before = [_cpu(player) for player in players]
    time.sleep(seconds)
    coordinator.ask("")
    after = coordinator.until(lambda event: "late" in event)
    late = sorted(after["late"])
    agents_cpu = sum(_cpu(player) for player in players) - sum(agents_before)

    failed = time.monotonic()
    rank = run.world_size - 1
    players[-1].ask(str(rank))
    stopped = coordinator.until(lambda event: event.get("phase") == "waiting" or event.get("attempt") == 2)
    again = stopped if stopped.get("missing") == 0 else coordinator.until(_runs(run, 2))
    reasons = [line for line in coordinator.lines if line.startswith("stopping all ranks")]
    assert reasons == [f"stopping all ranks: rank {rank} on node {run.nodes - 1} exited with 1: ValueError: played"], reasons

    lost = time.monotonic()
    for player in players:
        player.ask("cut")
    greeted = again["hellos"] + run.nodes  # all may be gone and back between two looks
    back = coordinator.until(lambda event: event.get("here") == run.nodes and event["hellos"] >= greeted)
    return {
        "nodes": run.nodes,
        "ranks": run.world_size,
        "all_here": round(here["at"] - began, 2),
        "all_ranks_run": round(runs["at"] - here["at"], 2),
        "start_cpu": round(runs["cpu"], 2),
        "lag_p99": round(late[int(len(late) * 0.99)], 3),
        "lag_max": round(late[-1], 3),
        "cores": round((after["cpu"] - before["cpu"]) / (after["at"] - before["at"]), 3),
        "agents_cores": round(agents_cpu / (after["at"] - before["at"]), 3),
        "all_stopped": round(stopped["at"] - failed, 2),
        "restarted": round(again["at"] - stopped["at"], 2),
        "reconnected": round(back["at"] - lost, 2),
        "ran_on": (back["phase"], back["attempt"]) == (again["phase"], again["attempt"]),
        "attempts": again["attempt"],
        "failures": again["counted"],
        "memory": megabytes(coordinator.pid),
    }


def _runs(run: Run, attempt: int) -> Callable[[dict[str, Any]], bool]:
    return lambda event: (event.get("attempt"), event.get("missing"), event.get("here")) == (attempt, 0, run.nodes)


def _cpu(player: Process) -> float:
    player.ask("cpu")
    return float(player.until(lambda event: event.get("event") == "cpu")["cpu"])


def megabytes(pid: int) -> float:
    match = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return round(int(match[1]) / 1024, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--nodes", default="64,256,1024", help="numbers of nodes, separated by commas")
    parser.add_argument("--ranks", type=int, default=8, help="ranks a node")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long ranks run")
    for name in ("--role", "--run-dir"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("played", nargs="*", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role is not None:
        run = run_of(int(given.nodes), given.ranks, Path(given.run_dir), given.port)
        asyncio.run(coordinate(run) if given.role == "coordinator" else agents(run, range(*given.played)))
        return
    results = []
    for nodes in map(int, given.nodes.split(",")):
        results.append(measure(nodes, given.ranks, given.seconds))
        if not given.json:
            print(results[-1], flush=True)
    if given.json:
        print(json.dumps({"gangs": results}, indent=1))


if __name__ == "__main__":
    main()
