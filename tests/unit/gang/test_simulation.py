"""Thousands of bad days: simulated agents whose messages are late, lost or cut off, under the real lifecycle."""

from __future__ import annotations

import random
from collections import deque

import pytest

from lockstep_gang.contract.messages import (
    AgentMessage,
    Exited,
    Finish,
    Hello,
    Order,
    RankExit,
    RankState,
    Start,
    Started,
    Stop,
    StopMode,
    Stopped,
)
from lockstep_gang.contract.preflight import Check, Checked, Expected, Looked, Met, Stage
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.lifecycle.decide import decide
from lockstep_gang.lifecycle.gang import Phase, new_gang
from lockstep_gang.lifecycle.observe import connection_closed, observe
from unit.gang.cases import make_run

RECONNECT_SECONDS = 5.0

NODES = 3


class SimulatedAgent:
    """One rank; says and does what the real agent would."""

    def __init__(self, node: int, instance: int) -> None:
        self.node, self.instance = node, f"{node}/{instance}"
        self.known = 0
        self.running = False
        self.exit: RankExit | None = None
        self.finished = False
        self.inbox: deque[Order] = deque()
        self.outbox: deque[AgentMessage] = deque()
        self.connected = False

    def connect(self) -> None:
        self.connected = True
        states = (RankState(self.node, True, self.exit),) if self.known else ()
        self.outbox = deque([Hello(self.node, self.instance, self.known, self.known if self.running else 0, states)])
        self.inbox = deque()

    def obey(self) -> None:
        order = self.inbox.popleft()
        if isinstance(order, Start) and order.attempt > self.known and not self.finished:
            self.known, self.running, self.exit = order.attempt, True, None
            self.outbox.append(Started(order.attempt))
        elif isinstance(order, Stop):
            if self.running:
                self.end(75 if order.mode is StopMode.SAVE else 137, ordered=True)
            else:
                self.outbox.append(Stopped(order.attempt))
        elif isinstance(order, Check):
            looks = order.stage is Stage.LOOK
            self.outbox.append(Checked(order.round, looked=Looked(port=1)) if looks else Checked(order.round, met=Met()))
        elif isinstance(order, Finish):
            self.finished = True

    def end(self, code: int, ordered: bool = False) -> None:
        self.running = False
        self.exit = RankExit(self.node, code, None, ordered)
        self.outbox += [Exited(self.known, self.exit), Stopped(self.known)]


class Day:
    """A gang and its agents; what happens next is drawn."""

    def __init__(self, seed: int, restarts: int) -> None:
        self.draw = random.Random(seed)  # noqa: S311 (no secret: a seed that names the day)
        preflight = Expected() if seed % 2 else None
        self.run = make_run(nodes=NODES, restart=RestartPolicy(restarts, 1), preflight=preflight)
        self.gang = new_gang(self.run)
        self.now = 0.0
        self.agents = [SimulatedAgent(node, 0) for node in range(NODES)]
        self.started: list[int] = []

    def decide(self) -> None:
        while True:
            phase, decision = self.gang.phase, decide(self.gang, self.run, self.now)
            if decision.begin:
                self.started.append(decision.gang.attempt)
                assert not any(agent.running for agent in self.agents if agent.connected), "an attempt began while another ran"
            self.gang = decision.gang
            for node, order in decision.orders:
                self.agents[node].inbox.append(order)
            if self.gang.phase is phase:
                return

    def step(self, trouble: bool) -> None:
        agent = self.draw.choice(self.agents)
        kind = self.draw.choice(["hear", "obey", "hear", "obey", "exit", "time", *(["crash", "cut", "fail", "silence"] if trouble else [])])
        if not agent.connected:
            agent.connect()
        elif kind == "hear" and agent.outbox:
            self.gang = observe(self.gang, self.run, agent.node, agent.outbox.popleft(), self.now)
        elif kind == "obey" and agent.inbox:
            agent.obey()
        elif kind in ("exit", "fail") and agent.running:
            agent.end(0 if kind == "exit" else 1)
        elif kind == "silence" and agent.running:
            agent.end(137, ordered=True)  # it believes that nobody is there, for example because it was frozen
        elif kind == "time":
            self.now += self.draw.choice([0.1, RECONNECT_SECONDS, 300])
        elif kind in ("crash", "cut"):
            self.lose(agent, crash=kind == "crash")
        self.decide()

    def lose(self, agent: SimulatedAgent, crash: bool) -> None:
        self.gang = connection_closed(self.gang, agent.node, self.now)
        if not crash and agent.running and self.draw.random() < 0.3:
            agent.end(137, ordered=True)
        agent.connected, agent.inbox, agent.outbox = False, deque(), deque()
        if crash:
            self.agents[agent.node] = SimulatedAgent(agent.node, self.draw.randrange(1 << 30))


SILENT = 406, 414
"""Days that ended with ranks that nobody had ordered to stop, when that was no loss yet."""


@pytest.mark.parametrize("seed", [*range(150), *SILENT])
def test_whatever_happens_the_job_ends_and_every_node_hears_it(seed: int) -> None:
    day = Day(seed, restarts=seed % 4)
    for _ in range(seed % 120):
        day.step(trouble=True)
    for _ in range(3000):
        if all(agent.finished for agent in day.agents):
            break
        day.step(trouble=False)
    assert day.gang.phase is Phase.ENDED, day.gang
    assert all(agent.finished for agent in day.agents), day.gang
    assert day.started == sorted(set(day.started))
    assert len(day.started) <= 1 + seed % 4
