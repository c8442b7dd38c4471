"""The nodes of a job, asked again and again: one program in each pod that lives as long as somebody looks.

Rates and memory change with every look, so they are no part of the job's status, which would be written for nobody: they are read when
they are asked for, and cost nothing otherwise.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from lockstep.api.errors import Failed
from lockstep.api.names import LABEL_JOB
from lockstep.api.objects import Object
from lockstep.kube.cluster import FORBIDDEN, ApiError, Cluster
from lockstep.kube.exec import Place, Program, answer_of
from lockstep.plan.pages.answers import read_node
from lockstep.platforms.files.reader import Say, beside, running_pods
from lockstep.platforms.files.results import run_folder
from lockstep.platforms.jobs.runs import lines_of, runfolder_program, summary
from lockstep_spec.words import number_of

NODES_MAX = 32
"""Nodes of a larger job that are asked; the others' rows have no rates."""
ANSWER_SECONDS = 10.0
FIRST_SECONDS = 1.0
"""Seconds between the start of a program and its first answer, so that it has rates."""


async def pods_of(cluster: Cluster, namespace: str, job: str) -> list[Object]:
    """Pods of the job; [] if your account may not list them."""
    try:
        pods: list[Object] = (await cluster.list("Pod", namespace, {"labelSelector": f"{LABEL_JOB}={job}"}))["items"]
    except ApiError as error:
        if error.status != FORBIDDEN:
            raise
        return []
    return pods


async def curve_on_volume(cluster: Cluster, namespace: str, job: str, points: int, say: Say) -> Object:
    """Loss curve of a job whose pods are gone, read by a short-lived one; {} if it can't be read, and `say` gets the reason."""
    try:
        async with beside(cluster, namespace, job, seconds=600, say=say) as place:
            steps: Object = (await summary(cluster, place, job, points)).get("steps", {})
            return steps
    except (Failed, OSError) as error:
        say(f"the loss curve of {job} can't be read: {error}")
        return {}


class JobNodes:
    """Programs that measure a job's nodes.

    Use `async with`: at its end every program has ended. `say` is called before the first answer, which takes a while.
    """

    def __init__(self, cluster: Cluster, namespace: str, job: str, say: Say = lambda line: None) -> None:
        self._cluster, self._namespace, self._job, self._say = cluster, namespace, job, say
        self._open: dict[int, _NodeProgram] = {}

    async def __aenter__(self) -> JobNodes:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(one.close() for one in self._open.values()))

    async def ask(self, points: int) -> dict[int, Object]:
        """Ask all nodes; return for each its answer or `{"problem": …}`. `points`: of the loss curve, which node 0 reads; 0: not now."""
        try:
            places = await running_pods(self._cluster, self._namespace, self._job)
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            return {}
        chosen = sorted(places)[:NODES_MAX]
        if chosen and not self._open:
            self._say(f"measuring {number_of(len(chosen), 'node')} of job {self._job} for {FIRST_SECONDS:.0f} s, for their rates")
        answers = await asyncio.gather(*(self._one(node, places[node], points if node == 0 else 0) for node in chosen))
        return dict(zip(chosen, answers, strict=True))

    async def _one(self, node: int, place: Place, points: int) -> Object:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if node not in self._open:
                    self._open[node] = await _NodeProgram.start(self._cluster, place, self._job, node)
                return await self._open[node].answer(points)
        except TimeoutError:
            problem = f"it has not answered for {ANSWER_SECONDS:.0f} s"
        except (Failed, OSError) as error:
            problem = str(error)
        broken = self._open.pop(node, None)  # the next look begins anew: the pod may be another one
        if broken is not None:
            await broken.close()
        return {"problem": problem}


class _NodeProgram:
    """The program in one pod."""

    def __init__(self, program: Program, stack: AsyncExitStack) -> None:
        self._program, self._stack = program, stack
        self._lines: AsyncIterator[str] = lines_of(program)

    @classmethod
    async def start(cls, cluster: Cluster, place: Place, job: str, node: int) -> _NodeProgram:
        stack = AsyncExitStack()
        program = await stack.enter_async_context(runfolder_program(cluster, place, what="watch", root=run_folder(job), node=node))
        await asyncio.sleep(FIRST_SECONDS)
        return cls(program, stack)

    async def answer(self, points: int) -> Object:
        await self._program.write(json.dumps({"points": points}).encode() + b"\n")
        async for line in self._lines:
            return read_node(answer_of(line, f"pod {self._program.place.pod}"))
        raise self._program.failure()

    async def close(self) -> None:
        await self._stack.aclose()
