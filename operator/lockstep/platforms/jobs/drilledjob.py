"""Job under a drill: how its pods are reached, and what happens in them, each event with the time at which it was heard here."""

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
from lockstep.api.names import CONTAINER, pod_name
from lockstep.api.objects import Object
from lockstep.kube.cluster import Client, Cluster
from lockstep.kube.exec import PodPlace
from lockstep.kube.jobs import job_status
from lockstep.plan.observed import JobObject
from lockstep.plan.pages.drill import WATCHED_PODS
from lockstep.plan.pages.logs import node_of_rank
from lockstep.platforms.inpod import drill, source_of
from lockstep.platforms.jobs.runs import lines_of
from lockstep.programs import ProgramFailed, answer_of, kept_alive, python_output, python_program

T = TypeVar("T")
VERB_SECONDS = 600.0
POLL_SECONDS = 0.2
BEAT_SECONDS = 10.0
"""Seconds between signs of life. A verb in a pod that hears nothing for a minute undoes what it did, and ends."""
ANSWERS_MAX = 1000
"""Answers of a verb that goes on; each sends a handful."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class DrilledJob(JobObject):
    """The job that is drilled, as it was before that, and how its cluster and its pods are reached."""

    client: Client
    timeout_seconds: float
    say: Say

    @property
    def attempt(self) -> int:
        return int(self.status["attempts"])

    @property
    def tells_steps(self) -> bool:
        return "step" in (self.status.get("trainer") or {})

    def status_now(self) -> Object:
        return job_status(self.client, self.namespace, self.name)

    def pod_of(self, rank: int) -> str:
        """Name of the rank's pod. Raises ConfigError for a rank that the job doesn't have."""
        return pod_name(self.name, node_of_rank(self.status["ranks"], int(self.status["nodes"]), rank))

    def trainer(self, cluster: Cluster, pod: str) -> PodPlace:
        """Container of the pod that runs the ranks."""
        return PodPlace(cluster, self.namespace, pod, CONTAINER)

    def in_pod(self, pod: str, verb: str, **arguments: Any) -> Object:
        """Last answer of the pod to `verb`. Raises ProgramFailed."""

        async def ask(cluster: Cluster) -> bytes:
            return await python_output(self.trainer(cluster, pod), source_of(drill), verb, json.dumps(arguments), seconds=VERB_SECONDS)

        lines = self.client.run(ask).strip().splitlines()
        answer = answer_of(lines[-1] if lines else b"", f"pod {pod}")
        if any(
            not (answer[key] is None or (isinstance(answer[key], int) and not isinstance(answer[key], bool)))
            for key in ("step", "hit")
            if key in answer
        ):
            raise ProgramFailed(f"python3 in pod {pod} answers {verb} with {str(answer)[:100]}: check the image's python3")
        return answer

    def until(self, what: str, look: Callable[[], T | None]) -> T:
        """First result of `look` that is neither None nor False. Raises Failed after the time that was given."""
        end = time.monotonic() + self.timeout_seconds
        while time.monotonic() < end:
            result = look()
            if result:
                return result
            time.sleep(POLL_SECONDS)
        raise Failed(
            f"waited {self.timeout_seconds:.0f} s (--timeout) for {what}, which did not come: lockstep why {self.name} -n {self.namespace}"
        )


class VerbStream:
    """A verb that runs in a pod and answers meanwhile, each answer with the time at which it was heard here."""

    def __init__(self, drilled: DrilledJob, pod: str, verb: str, **arguments: Any) -> None:
        self._drilled, self._pod, self._arguments = drilled, pod, (verb, json.dumps(arguments))
        self._heard: list[tuple[float, Object]] = []
        self.ended = False
        self.problem = ""
        self._thread = threading.Thread(target=self._listen, name=f"drill {pod}", daemon=True)
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
            self._drilled.client.run(self._follow)
        except (Failed, OSError) as error:
            self.problem = str(error)
        except asyncio.CancelledError:
            self.problem = "nobody listens any more"
        self.ended = True

    async def _follow(self, cluster: Cluster) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101 (this is one)
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        place = self._drilled.trainer(cluster, self._pod)
        async with (
            python_program(place, source_of(drill), *self._arguments, pings=True) as running,
            kept_alive(running, b".", BEAT_SECONDS),
        ):
            async for line in lines_of(running):
                if len(self._heard) >= ANSWERS_MAX:
                    raise ProgramFailed(f"pod {self._pod}: python3 prints more than {ANSWERS_MAX} answers: check the image's python3")
                self._heard.append((time.monotonic(), answer_of(line, f"pod {self._pod}")))


class DrillWatch:
    """Watches in the pods of a job when the ranks of its attempt end and when the next ones start."""

    def __init__(self, drilled: DrilledJob, target: str) -> None:
        nodes = int(drilled.status["nodes"])
        pods = list(dict.fromkeys([target, *(pod_name(drilled.name, node) for node in range(nodes))]))[:WATCHED_PODS]
        self._streams = {pod: VerbStream(drilled, pod, "watch", attempt=drilled.attempt, seconds=drilled.timeout_seconds) for pod in pods}
        self.notes = [f"{len(pods)} of {nodes} nodes were watched"] if len(pods) < nodes else []
        self._drilled = drilled
        self._hit = 0.0

    def __enter__(self) -> DrillWatch:
        for stream in self._streams.values():
            stream.__enter__()
        for pod, stream in self._streams.items():
            if not stream.wait("watching", 30.0):
                self.__exit__()
                raise Failed(f"pod {pod} could not be watched: {stream.problem}")
        self._hit = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams.values():
            stream.close()

    def since_the_fault(self) -> float:
        return time.monotonic() - self._hit

    def last_heard_seconds(self, key: str) -> float | None:
        """Seconds from the fault until the last pod that stayed answered with `key`."""
        moments = [stream.heard_at(key) for stream in self._streams.values()]
        times = [when - self._hit for when in moments if when is not None]
        return max(times) if times else None

    def first_heard_seconds(self, key: str) -> float | None:
        times = [when - self._hit for stream in self._streams.values() if (when := stream.heard_at(key)) is not None]
        return min(times) if times else None
