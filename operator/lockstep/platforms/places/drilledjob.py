"""Job under a drill: how its nodes are reached, and what happens on them, each event with the time at which it was heard here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.api.errors import Failed
from lockstep.api.objects import Object
from lockstep.plan.pages.drill import WATCHED_NODES
from lockstep.platforms.inpod import drill, source_of
from lockstep.platforms.jobs.runs import lines_of
from lockstep.platforms.places.backend import Job
from lockstep.platforms.places.values import Say, Use
from lockstep.programs import ProgramFailed, answer_of, kept_alive, python_output, python_program

T = TypeVar("T")
VERB_SECONDS = 600.0
POLL_SECONDS = 0.2
BEAT_SECONDS = 10.0
"""Seconds between signs of life. A verb on a node that hears nothing for a minute undoes what it did, and ends."""
ANSWERS_MAX = 1000
"""Answers of a verb that goes on; each sends a handful."""


@dataclass(frozen=True)
class DrilledJob:
    """The job that is drilled, and how it is reached. `status` is as it was before that."""

    job: Job
    status: Object
    timeout_seconds: float
    say: Say

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def attempt(self) -> int:
        return int(self.status["attempts"])

    @property
    def nodes(self) -> int:
        return int(self.status["nodes"])

    @property
    def tells_steps(self) -> bool:
        return "step" in (self.status.get("trainer") or {})

    def on_node(self, node: int, verb: str, **arguments: Any) -> Object:
        """Last answer of the node to `verb`. Raises ProgramFailed."""

        async def ask() -> bytes:
            async with self.job.volume(node, self.say, Use.RANKS) as ranks:
                words = (ranks.run_folder(self.name), verb, json.dumps(arguments))
                return await python_output(ranks.place, source_of(drill), *words, seconds=VERB_SECONDS)

        lines = asyncio.run(ask()).strip().splitlines()
        answer = answer_of(lines[-1] if lines else b"", f"node {node}")
        if any(
            not (answer[key] is None or (isinstance(answer[key], int) and not isinstance(answer[key], bool)))
            for key in ("step", "hit")
            if key in answer
        ):
            raise ProgramFailed(f"python3 on node {node} answers {verb} with {str(answer)[:100]}: check the python3 there")
        return answer

    def until(self, what: str, look: Callable[[], T | None]) -> T:
        """First result of `look` that is neither None nor False. Raises Failed after the time that was given."""
        end = time.monotonic() + self.timeout_seconds
        while time.monotonic() < end:
            result = look()
            if result:
                return result
            time.sleep(POLL_SECONDS)
        raise Failed(f"waited {self.timeout_seconds:.0f} s (--timeout) for {what}, which did not come: lockstep why {self.job.at}")


class VerbStream:
    """A verb that runs on a node and answers meanwhile, each answer with the time at which it was heard here."""

    def __init__(self, drilled: DrilledJob, node: int, verb: str, **arguments: Any) -> None:
        self._drilled, self._node, self._arguments = drilled, node, (verb, json.dumps(arguments))
        self._heard: list[tuple[float, Object]] = []
        self.ended = False
        self.problem = ""
        self._thread = threading.Thread(target=self._listen, name=f"drill {node}", daemon=True)
        self._cancel: Callable[[], object] = lambda: None

    def __enter__(self) -> VerbStream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(5.0)

    def close(self) -> None:
        """End the verb, whatever it still has to answer."""
        with contextlib.suppress(RuntimeError):  # (it has ended just now)
            self._cancel()
        self._thread.join(5.0)

    def heard_at(self, key: str) -> float | None:
        """Time at which the verb first answered with `key`; None if it has not."""
        return next((when for when, answer in list(self._heard) if key in answer), None)

    def wait(self, key: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.heard_at(key) is None and not self.ended and time.monotonic() < end:
            time.sleep(0.02)
        return self.heard_at(key) is not None

    def _listen(self) -> None:
        try:
            asyncio.run(self._follow())
        except (Failed, OSError) as error:
            self.problem = str(error)
        except asyncio.CancelledError:
            self.problem = "nobody listens any more"
        self.ended = True

    async def _follow(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101 (this is one)
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        async with (
            self._drilled.job.volume(self._node, self._drilled.say, Use.RANKS) as ranks,
            python_program(ranks.place, source_of(drill), ranks.run_folder(self._drilled.name), *self._arguments, pings=True) as running,
            kept_alive(running, b".\n", BEAT_SECONDS),
        ):
            async for line in lines_of(running):
                if len(self._heard) >= ANSWERS_MAX:
                    raise ProgramFailed(f"node {self._node}: python3 prints more than {ANSWERS_MAX} answers: check the python3 there")
                self._heard.append((time.monotonic(), answer_of(line, f"node {self._node}")))


class DrillWatch:
    """Watches on the nodes of a job when the ranks of its attempt end and when the next ones start."""

    def __init__(self, drilled: DrilledJob, target: int) -> None:
        nodes = list(dict.fromkeys([target, *range(drilled.nodes)]))[:WATCHED_NODES]
        self._streams = {
            node: VerbStream(drilled, node, "watch", attempt=drilled.attempt, seconds=drilled.timeout_seconds) for node in nodes
        }
        self.notes = [f"{len(nodes)} of {drilled.nodes} nodes were watched"] if len(nodes) < drilled.nodes else []
        self._drilled = drilled
        self._hit = 0.0

    def __enter__(self) -> DrillWatch:
        for stream in self._streams.values():
            stream.__enter__()
        for node, stream in self._streams.items():
            if not stream.wait("watching", 30.0):
                self.__exit__()
                raise Failed(f"node {node} could not be watched: {stream.problem}")
        self._hit = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams.values():
            stream.close()

    def since_the_fault(self) -> float:
        return time.monotonic() - self._hit

    def stopped_seconds(self) -> float | None:
        """Seconds from the fault until the last node that stayed had no rank any more; never later than the next attempt began, which waits
        for that.
        """
        times, started = self._seconds_of("stopped"), self.first_heard_seconds("started")
        return min([max(times), *([] if started is None else [started])]) if times else None

    def first_heard_seconds(self, key: str) -> float | None:
        return min(self._seconds_of(key), default=None)

    def _seconds_of(self, key: str) -> list[float]:
        return [when - self._hit for stream in self._streams.values() if (when := stream.heard_at(key)) is not None]
