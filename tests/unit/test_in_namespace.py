"""The log of a run without an operator, whose containers may be started again at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from lockstep.platforms.kubernetes.cluster import ApiError, Cluster
from lockstep.platforms.kubernetes.in_namespace import _Log
from lockstep.platforms.kubernetes.in_namespace_run import Run

DAY = "2026-11-21T09:00:0"
ENDED = [f"{DAY}1Z rank 1 raised ValueError", f"{DAY}2Z Failed"]
STARTED_AGAIN = [f"{DAY}3Z this job has failed already"]


class RestartedAfterFirstLook:
    """A kubelet that starts the container again after the first request for its log."""

    def __init__(self) -> None:
        self.requests = 0

    async def log(self, namespace: str, pod: str, container: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        self.requests += 1
        if "previous" not in query:
            lines = STARTED_AGAIN
        elif self.requests == 1:
            raise ApiError(400, "BadRequest", "previous terminated container not found")
        else:
            lines = ENDED
        for line in lines:
            yield line


class _Run:
    name, namespace = "x", "ns"


def told(cluster: Any, *, previous: bool) -> list[str]:
    said: list[str] = []
    asyncio.run(_Log(cast(Cluster, cluster), cast(Run, _Run()), said.append).rest(previous=previous))
    return said


def test_lines_of_a_container_that_is_started_again_while_they_are_read_are_not_lost() -> None:
    said = told(RestartedAfterFirstLook(), previous=False)
    assert {"rank 1 raised ValueError", "Failed"} <= set(said)
    assert len(said) == len(set(said))


def test_only_the_ended_container_is_read_when_it_was_started_again_before() -> None:
    cluster = RestartedAfterFirstLook()
    cluster.requests = 1
    assert told(cluster, previous=True) == ["rank 1 raised ValueError", "Failed"]


class NotThereYet:
    """A kubelet that complains in the stream itself when it is asked before the log's file is there, and ends the stream."""

    def __init__(self) -> None:
        self.requests = 0

    async def log(self, namespace: str, pod: str, container: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        self.requests += 1
        for line in ["failed to try resolving symlinks in path: no such file"] if self.requests == 1 else ENDED:
            yield line


def test_a_log_that_breaks_off_before_its_first_line_is_asked_for_again() -> None:
    said: list[str] = []

    async def follow() -> None:
        complete = asyncio.Event()

        def say(line: str) -> None:
            said.append(line)
            if len(said) == len(ENDED):
                complete.set()

        log = _Log(cast(Cluster, NotThereYet()), cast(Run, _Run()), say)
        following = asyncio.create_task(log.follow())
        await asyncio.wait_for(complete.wait(), 10)
        log.ended = True
        await following

    asyncio.run(follow())
    assert said == ["rank 1 raised ValueError", "Failed"]
