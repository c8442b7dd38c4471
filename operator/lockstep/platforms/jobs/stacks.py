"""Asks all ranks of a job where they are: a short program in each of its pods, at once. Needs the right to run programs in pods, and no more."""

from __future__ import annotations

import asyncio
import json

from lockstep.api.errors import Failed
from lockstep.api.objects import Object
from lockstep.kube.cluster import Cluster
from lockstep.kube.exec import NotStarted, Place, answer_of, python_output
from lockstep.plan.pages.stacks import RankAnswer, missing, read_ranks
from lockstep.platforms.files.reader import running_pods
from lockstep.platforms.inpod import rankstacks, source_of
from lockstep.platforms.jobs.runs import frozen_run

NODE_SECONDS = 15.0
AT_ONCE = 32


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
                return await _ask_node(cluster, place, rank)
            except (Failed, OSError) as error:
                return error

    by_node = dict(zip(places, await asyncio.gather(*map(ask, places.values())), strict=True))
    refused = [answer for answer in by_node.values() if isinstance(answer, NotStarted)]
    if refused and len(refused) == len(by_node):
        raise refused[0]
    nodes, per_node = await _shape(cluster, job, len(places))
    problems = {node: f"its pod {name}-{node} doesn't run" for node in range(nodes) if node not in places}
    problems |= {node: f"node {node} doesn't answer: {answer}" for node, answer in by_node.items() if not isinstance(answer, list)}
    answers = [one for answer in by_node.values() if isinstance(answer, list) for one in answer]
    expected = range(nodes * per_node) if rank is None else [rank]
    return sorted([*answers, *missing(answers, expected, problems, per_node)], key=lambda answer: answer.rank)


async def _ask_node(cluster: Cluster, place: Place, rank: int | None) -> list[RankAnswer]:
    printed = await python_output(cluster, place, source_of(rankstacks), json.dumps({"rank": rank}), seconds=NODE_SECONDS)
    return read_ranks(answer_of(printed, f"pod {place.pod}"))


async def _shape(cluster: Cluster, job: Object, pods: int) -> tuple[int, int]:
    """Number of nodes, and of ranks on each, of what runs."""
    run = await frozen_run(cluster, job)
    nodes, per_node = run.get("nodes"), run.get("ranksPerNode")
    if isinstance(nodes, int) and isinstance(per_node, int) and nodes > 0 and per_node > 0:
        return nodes, per_node
    desired = (job.get("status", {}).get("ranks") or {}).get("desired") or pods
    return pods, max(int(desired) // pods, 1)
