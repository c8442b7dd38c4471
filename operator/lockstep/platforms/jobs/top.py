"""The nodes of a job, asked again and again: one program on each of them, in its pod or on its host, that lives as long as somebody looks.

Rates and memory change with every look, so they are no part of the job's status, which would be written for nobody: they are read when
they are asked for, and cost nothing otherwise.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from lockstep.api.errors import Failed
from lockstep.api.names import LABEL_JOB
from lockstep.api.objects import Object
from lockstep.kube.cluster import FORBIDDEN, Cluster, tolerated
from lockstep.kube.exec import NotRunning, looks_again
from lockstep.plan.pages.answers import read_node
from lockstep.plan.pages.hosts import hosts_page, hosts_view, read_host
from lockstep.plan.pages.top import snapshot
from lockstep.platforms.clusters.listings import list_kind
from lockstep.platforms.files.reader import Say, beside, running_pods
from lockstep.platforms.inpod import hostload, runfolder, source_of
from lockstep.platforms.jobs.looks import Curve, Look, Looks, page_lines, width
from lockstep.platforms.jobs.runs import measured
from lockstep.programs import Place, Program, lines_in, next_answer, python_program
from lockstep_spec.words import number_of

OPEN_MAX = 64
"""Programs that run at once, each with a connection of its own. The nodes of a larger job are asked in turn."""
STARTING_MAX = 32
"""Programs that are started at once."""
ANSWER_SECONDS = 10.0
FIRST_SECONDS = 1.0
"""Seconds between the start of a program and its first answer, so that it has rates."""
Find = Callable[[], Awaitable[Mapping[int, Place]]]


async def pods_of(cluster: Cluster, namespace: str, job: str) -> list[Object]:
    """Pods of the job; [] if your account may not list them."""
    return [*(await list_kind(cluster, "Pod", namespace, {"labelSelector": f"{LABEL_JOB}={job}"})).items]


async def curve_on_volume(cluster: Cluster, namespace: str, job: str, points: int, say: Say) -> Object:
    """Loss curve of a job whose pods are gone, read by a short-lived one; {} if it can't be read, and `say` gets the reason."""
    began = time.monotonic()
    while True:
        try:
            async with beside(cluster, namespace, job, seconds=600, say=say) as place:
                return await measured(place, job, points)
        except (Failed, OSError) as error:
            if isinstance(error, NotRunning) and await looks_again(began):
                continue
            say(f"the loss curve of {job} can't be read: {error}")
            return {}


def window_of(nodes: Sequence[int], turn: int, most: int) -> list[int]:
    """Nodes to ask in this turn: all of them, or so many that each is asked in its turn, and the first one always."""
    if len(nodes) <= most:
        return list(nodes)
    first, *others = nodes
    start = turn * (most - 1)
    return sorted([first, *(others[(start + number) % len(others)] for number in range(most - 1))])


def nodes_in_pods(cluster: Cluster, namespace: str, job: str) -> Find:
    """Search for the pods of a job, which are the places of its nodes; it finds none if your account may not list pods."""

    async def find() -> Mapping[int, Place]:
        with tolerated(FORBIDDEN):
            return await running_pods(cluster, namespace, job)
        return {}

    return find


def nodes_at(places: Sequence[Place] | Mapping[int, Place]) -> Find:
    """Nodes that are always at these places, by number, or numbered in their order: hosts."""
    by_number = dict(places) if isinstance(places, Mapping) else dict(enumerate(places))

    async def find() -> Mapping[int, Place]:
        return by_number

    return find


@dataclass(frozen=True)
class Question:
    """Program that measures a node, and what it is asked."""

    subject: str
    """Name of the measured thing, such as `job demo`."""
    source: bytes
    request: Callable[[int], Object]
    """Its argument, by node."""
    read: Callable[[Mapping[str, Any]], Object]


def of_job(job: str, root: str | Mapping[int, str], *, machine: bool = False) -> Question:
    """Question about the nodes of a job. `root`: the run's folder there, or that of each node. `machine`: nodes are machines, not
    containers.
    """

    def request(node: int) -> Object:
        return {"what": "watch", "root": root if isinstance(root, str) else root[node], "machine": machine, "node": node}

    return Question(f"job {job}", source_of(runfolder), request, read_node)


def of_hosts(cluster: str, folders: Sequence[tuple[str, str]]) -> Question:
    """Question about hosts without a job. `folders`: the workspace and the datasets of each, by number."""
    return Question(
        f"cluster {cluster}",
        source_of(hostload),
        lambda node: {"workspace": folders[node][0], "datasets": folders[node][1]},
        read_host,
    )


class NodesWatch:
    """Programs that measure nodes, wherever `find` says that these are.

    Use `async with`: at its end every program has ended. `say` is called before the first answer, which takes a while.
    """

    def __init__(self, find: Find, question: Question, say: Say = lambda line: None) -> None:
        self._find, self._question, self._say = find, question, say
        self._open: dict[int, _NodeProgram] = {}
        self._answers: dict[int, tuple[float, Object]] = {}
        """Map of node to the time of its last answer and that answer."""
        self._turn = 0
        self._starting = asyncio.Semaphore(STARTING_MAX)

    async def __aenter__(self) -> NodesWatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close(self._open)

    async def ask(self, points: int) -> dict[int, Object]:
        """Ask as many nodes as may be asked at once; return for each its answer or `{"problem": …}`, for the others the last one, with its
        age.

        `points`: of the loss curve, which node 0 reads; 0: not now.
        """
        places = await self._find()
        nodes = sorted(places)
        chosen = window_of(nodes, self._turn, OPEN_MAX)
        if chosen and not self._turn:
            some = "" if chosen == nodes else f", {len(chosen)} at a time"
            self._say(
                f"measuring {number_of(len(nodes), 'node')} of {self._question.subject}{some} for {FIRST_SECONDS:.0f} s, for their rates"
            )
        await self._close([node for node in self._open if node not in chosen])
        answers = await asyncio.gather(*(self._one(node, places[node], points if node == 0 else 0) for node in chosen))
        now = time.monotonic()
        self._turn += bool(chosen)
        self._answers = {node: old for node, old in self._answers.items() if node in places}
        self._answers |= {node: (now, answer) for node, answer in zip(chosen, answers, strict=True)}
        return {node: self._last(node, now) for node in nodes}

    async def ask_all(self, points: int) -> dict[int, Object]:
        """Ask every node once."""
        answers = await self.ask(points)
        for _ in range(math.ceil((len(answers) - 1) / (OPEN_MAX - 1)) - 1):
            answers = await self.ask(0) | ({0: answers[0]} if 0 in answers else {})
        return answers

    def _last(self, node: int, now: float) -> Object:
        if node not in self._answers:
            return {"notAsked": True}
        when, answer = self._answers[node]
        return answer if when == now else {**answer, "ageSeconds": round(now - when, 1)}

    async def _one(self, node: int, place: Place, points: int) -> Object:
        try:
            if node not in self._open:
                async with self._starting, asyncio.timeout(ANSWER_SECONDS):
                    self._open[node] = await _NodeProgram.start(place, self._question, node)
                await asyncio.sleep(FIRST_SECONDS)
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._open[node].answer(points)
        except TimeoutError:
            problem = f"it has not answered for {ANSWER_SECONDS:.0f} s"
        except (Failed, OSError) as error:
            problem = str(error)
        await self._close([node])  # the next look begins anew: the pod may be another one
        return {"problem": problem}

    async def _close(self, nodes: Iterable[int]) -> None:
        programs = [self._open.pop(node) for node in list(nodes) if node in self._open]
        await asyncio.gather(*(program.close() for program in programs))


class _NodeProgram:
    def __init__(self, program: Program, question: Question, stack: AsyncExitStack) -> None:
        self._program, self._question, self._stack = program, question, stack
        self._lines = lines_in(program)

    @classmethod
    async def start(cls, place: Place, question: Question, node: int) -> _NodeProgram:
        stack = AsyncExitStack()
        program = await stack.enter_async_context(python_program(place, question.source, json.dumps(question.request(node))))
        return cls(program, question, stack)

    async def answer(self, points: int) -> Object:
        await self._program.write(json.dumps({"points": points}).encode() + b"\n")
        answer = await next_answer(self._program, self._lines)
        return self._question.read(answer)

    async def close(self) -> None:
        await self._stack.aclose()


async def looks_of_machines(name: str, machines: Mapping[str, tuple[Place, str, str]], interval: float, say: Say) -> Looks:
    """Look at the load of machines without a job, and who uses their GPUs. `name`: of all. `machines`: place, workspace, datasets."""
    places, folders = [place for place, *_ in machines.values()], [(workspace, datasets) for _, workspace, datasets in machines.values()]
    async with NodesWatch(nodes_at(places), of_hosts(name, folders), say) as watch:
        while True:
            answers = await watch.ask(0)
            view = hosts_view(name, {machine: answers.get(number, {}) for number, machine in enumerate(machines)})
            yield Look(view, list(hosts_page(view, width())))
            await asyncio.sleep(interval)


async def looks_of_job(
    job: str,
    folders: Mapping[int, tuple[Place, str]],
    look: Callable[[], Awaitable[tuple[Object, bool]]],
    nodes: Callable[[Mapping[int, Object]], list[Object]],
    interval: float,
    say: Say = lambda line: None,
) -> Looks:
    """Look at a job on machines, and at its ranks. `folders`: by node, its place and the run's folder there. `look`: return the job as it
    is now, and whether this look is the last. `nodes`: return the page's nodes, by what each has answered.
    """
    curve, places = Curve(), {node: place for node, (place, _) in folders.items()}
    question = of_job(job, {node: folder for node, (_, folder) in folders.items()}, machine=True)
    async with NodesWatch(nodes_at(places), question, say) as watch:
        while True:
            answers, (seen, over) = await asyncio.gather(watch.ask(curve.points()), look())
            curve.take(answers.get(0, {}))
            page = {**snapshot(seen, (), {0: {"curve": curve.steps}}), "nodes": nodes(answers)}
            yield Look(page, page_lines(page), over)
            await asyncio.sleep(interval)
