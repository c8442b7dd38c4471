"""What happens in a job's pods meanwhile, told by themselves, each thing with the time at which it was heard here."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from lockstep.api.errors import Failed
from lockstep.api.names import pod_name
from lockstep.api.objects import Object
from lockstep.kube.cluster import Cluster
from lockstep.kube.exec import Program, ProgramFailed, answer_of, program
from lockstep.plan.pages.drill import WATCHED_PODS
from lockstep.platforms.drills.place import Place, command_of
from lockstep.platforms.jobs.runs import lines_of

BEAT_SECONDS = 10.0
"""A verb in a pod that hears nothing for a minute undoes what it did, and ends."""
WORDS_MAX = 1000
"""Of a verb that goes on; each says a handful."""


class Stream:
    """A verb that runs in a pod and says things meanwhile, each with the time at which it was heard here."""

    def __init__(self, place: Place, pod: str, verb: str, **arguments: Any) -> None:
        self._place, self._pod, self._command = place, pod, command_of(verb, arguments)
        self._heard: list[tuple[float, Object]] = []
        self.ended = False
        self.problem = ""
        self._thread = threading.Thread(target=self._listen, name=f"drill {pod}", daemon=True)
        self._cancel: Callable[[], object] = lambda: None

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(5.0)

    def close(self) -> None:
        """End it, whatever it still has to say."""
        with contextlib.suppress(RuntimeError):  # (it has ended just now)
            self._cancel()
        self._thread.join(5.0)

    def said(self, key: str) -> float | None:
        """When it first said so."""
        return next((when for when, said in list(self._heard) if key in said), None)

    def wait(self, key: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.said(key) is None and not self.ended and time.monotonic() < end:
            time.sleep(0.02)
        return self.said(key) is not None

    def _listen(self) -> None:
        try:
            self._place.client.run(self._follow)
        except (Failed, OSError) as error:
            self.problem = str(error)
        except asyncio.CancelledError:
            self.problem = "nobody listens any more"
        self.ended = True

    async def _follow(self, cluster: Cluster) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101 (this is one)
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        async with program(cluster, self._place.trainer(self._pod), self._command, pings=True) as running:
            beating = asyncio.create_task(_beat(running))
            try:
                async for line in lines_of(running):
                    if len(self._heard) >= WORDS_MAX:
                        raise ProgramFailed(f"pod {self._pod}: python3 says more than {WORDS_MAX} things: look at the image's python3")
                    self._heard.append((time.monotonic(), answer_of(line, f"pod {self._pod}")))
            finally:
                beating.cancel()


async def _beat(running: Program) -> None:
    """So that the verb knows that somebody is still here."""
    with contextlib.suppress(Failed):
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await running.write(b".")


class Watch:
    """Sees in the pods of a job when the ranks of its attempt end and when the next ones come."""

    def __init__(self, place: Place, target: str) -> None:
        nodes = int(place.job["status"]["nodes"])
        pods = list(dict.fromkeys([target, *(pod_name(place.name, node) for node in range(nodes))]))[:WATCHED_PODS]
        self._streams = {pod: Stream(place, pod, "watch", attempt=place.attempt, seconds=place.timeout_seconds) for pod in pods}
        self.notes = [f"{len(pods)} of {nodes} nodes were watched"] if len(pods) < nodes else []
        self._place = place
        self._hit = 0.0

    def __enter__(self) -> Watch:
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

    def all_said(self, key: str) -> float | None:
        """When the last pod that was there all the time said so, since the fault."""
        said = [stream.said(key) for stream in self._streams.values()]
        times = [when - self._hit for when in said if when is not None]
        return max(times) if times else None

    def first_said(self, key: str) -> float | None:
        times = [when - self._hit for stream in self._streams.values() if (when := stream.said(key)) is not None]
        return min(times) if times else None
