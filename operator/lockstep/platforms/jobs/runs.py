"""A run, asked in its pods: its folder by `runfolder.py`, which ends when nobody asks any more, and where all its ranks are by
`rankstacks.py`.

Needs the right to run programs in pods, and no more.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from lockstep.api.errors import Failed
from lockstep.api.names import RUN_KEY
from lockstep.api.objects import Object
from lockstep.kube.cluster import Cluster
from lockstep.kube.exec import NotRunning
from lockstep.plan.pages.answers import read_steps
from lockstep.plan.pages.logs import layout_of, ranks_of_run
from lockstep.plan.pages.stacks import RankAnswer, read_ranks, with_silent
from lockstep.platforms.files.reader import running_pods
from lockstep.platforms.files.results import run_folder
from lockstep.platforms.inpod import rankstacks, runfolder, source_of
from lockstep.platforms.output import tell
from lockstep.programs import NotStarted, Place, Program, ProgramFailed, answer_of, lines_in, python_output, python_program
from lockstep_gang.contract.layout import RankLayout

NODE_SECONDS = 15.0
AT_ONCE = 32
POLL_SECONDS = 1.0
"""Seconds between two looks at a log that is followed."""


async def frozen_run(cluster: Cluster, job: dict[str, Any]) -> dict[str, Any]:
    """run.json of the job's newest start, as the cluster keeps it; {} when there is none any more, or none yet."""
    name = (job.get("status", {}).get("run") or {}).get("name")
    config_map = await cluster.get("ConfigMap", job["metadata"]["namespace"], name) if name else None
    try:
        run = {} if config_map is None else json.loads(config_map["data"][RUN_KEY])
    except (ValueError, KeyError, TypeError, RecursionError):  # (whoever may write ConfigMaps may have written anything)
        return {}
    return run if isinstance(run, dict) else {}


@asynccontextmanager
async def runfolder_program(place: Place, **request: Any) -> AsyncIterator[Program]:
    """Start the program with its request."""
    async with python_program(place, source_of(runfolder), json.dumps(request)) as running:
        yield running


async def lines_of(running: Program) -> AsyncIterator[str]:
    """Yield its output line by line. Raises ProgramFailed when it ended with an error."""
    async for line in lines_in(running):
        yield line.decode(errors="replace")
    if running.code != 0:
        raise running.failure()


async def folder_lines(place: Place, folder: str, **request: Any) -> AsyncGenerator[str, None]:
    """Yield lines of a node's log in the run's folder there; `request` as `runfolder.log` takes it."""
    async with runfolder_program(place, what="log", root=folder, **request) as running:
        async for line in lines_of(running):
            yield line


async def followed(place: Place, folder: str, request: dict[str, Any], over: Callable[[], Awaitable[bool]]) -> AsyncGenerator[str, None]:
    """Yield the lines that `request` asks for, then new ones until `over()`. Ask a place that doesn't answer again, and say so."""
    after, seen, is_lost = "", 0, False
    last: deque[str] | None = None if int(request["tail"]) < 0 else deque(maxlen=int(request["tail"]))
    while True:
        ended = await over()  # before the look at the lines: the last ones are there when it has ended
        newest, count = after, seen
        try:
            async with aclosing(_news(place, folder, {**request, "after": after, "seen": seen})) as entries:
                async for stamp, line in entries:
                    newest, count = max(newest, stamp), count + 1 if stamp == newest else 1 if stamp > newest else count
                    if last is None:  # (a log of any length goes by without being held)
                        after, seen = newest, count
                        yield line
                    else:
                        last.append(line)
            is_lost = False
        except (Failed, OSError) as error:
            if ended:
                raise
            if not is_lost:
                tell(f"lockstep: {error}: the output goes on when it answers again")
            is_lost = True
            if last is not None:
                last.clear()  # (they come again)
        else:
            for line in last or ():
                yield line
            after, seen, last = newest, count, None
        if ended:
            return
        await asyncio.sleep(POLL_SECONDS)


async def _news(place: Place, folder: str, request: dict[str, Any]) -> AsyncGenerator[tuple[str, str], None]:
    async with runfolder_program(place, what="news", root=folder, **request) as running:
        async for text in lines_of(running):
            try:
                stamp, line = json.loads(text)
            except (ValueError, TypeError) as error:
                raise ProgramFailed(f"{place.name}: its log comes as {text[:100]!r}, which is not a valid answer") from error
            yield str(stamp), str(line)


async def measured(
    place: Place, job: str, points: int = 1000, *, root: str | None = None, values: Sequence[str] = runfolder.MEASURED
) -> dict[str, Object]:
    """Return these `values` of the run's steps. `root`: its folder there, if it isn't the job's."""
    text = ""
    request = {"root": root or run_folder(job), "points": points, "names": list(values)}
    async with runfolder_program(place, what="summary", **request) as running:
        async for line in lines_of(running):
            text = line
    return read_steps(answer_of(text, place.name))


async def ask_ranks(cluster: Cluster, job: Object, rank: int | None) -> list[RankAnswer]:
    """Ask one rank, or all of them, for their stacks, or why there are none; [] if no pod runs.

    Raises NotStarted if your account may not run programs in pods.
    """
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    places = await running_pods(cluster, namespace, name)
    if not places:
        return []
    limit = asyncio.Semaphore(AT_ONCE)

    async def ask(place: Place) -> list[RankAnswer] | Failed | OSError:
        async with limit:
            try:
                return await _ask_node(place, rank)
            except (Failed, OSError) as error:
                return error

    by_node = dict(zip(places, await asyncio.gather(*map(ask, places.values())), strict=True))
    refused = [answer for answer in by_node.values() if isinstance(answer, NotStarted) and not isinstance(answer, NotRunning)]
    if refused and len(refused) == len(by_node):
        raise refused[0]
    layout = await _layout(cluster, job, len(places))
    problems = {node: f"its pod {name}-{node} doesn't run" for node in range(len(layout.counts)) if node not in places}
    problems |= {node: f"node {node} doesn't answer: {answer}" for node, answer in by_node.items() if not isinstance(answer, list)}
    answers = [one for answer in by_node.values() if isinstance(answer, list) for one in answer]
    return with_silent(answers, rank, problems, layout)


async def _ask_node(place: Place, rank: int | None) -> list[RankAnswer]:
    printed = await python_output(place, source_of(rankstacks), json.dumps({"rank": rank}), seconds=NODE_SECONDS)
    return read_ranks(answer_of(printed, place.name))


async def _layout(cluster: Cluster, job: Object, pods: int) -> RankLayout:
    """Places of the ranks of what runs."""
    run = await frozen_run(cluster, job)
    status = job.get("status", {}).get("ranks") or {}
    running = ranks_of_run(run)
    nodes = int(run.get("nodes", pods)) if running else pods
    return layout_of({"desired": status.get("desired") or pods, "order": status.get("order"), **running}, nodes)
