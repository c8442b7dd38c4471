"""A run on all nodes of a dev environment, asked for from outside of the cluster: the agent's own command in pod 0, by exec.

The program in the pod ends the run when its standard input ends, so that a laptop that is shut leaves no GPU busy; a `c` there is Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from lockstep.api.errors import Failed
from lockstep.api.names import AGENT_PATH, CONTAINER, pod_name
from lockstep.kube.cluster import Cluster
from lockstep.kube.exec import STDERR, Broken, Place, Program, ProgramFailed, kept_alive, program
from lockstep.platforms.output import ProgramOutput

INTERRUPTED = 130
CTRL_C, ALIVE = b"c", b"."
ALIVE_SECONDS = 30.0
"""Seconds between signs of life: load balancers cut connections that are silent for minutes, and that would end the run."""


def agent_command(words: Sequence[str], by: str, *, detach: bool) -> list[str]:
    """Command in the pod. `by`: who runs it on which machine."""
    options = ["--by", by, *(["--detach"] if detach else ["--until-eof"])]
    return ["python3", "-I", AGENT_PATH, "run", *options, "--", *words]


async def run_on_all_nodes(context: str | None, namespace: str, job: str, command: Sequence[str]) -> int:
    """Run the command and return its exit code; what it prints comes on this process's own output.

    Raises:
        Failed: the connection broke, or there is no right to run programs in pods.
    """
    place = Place(namespace, pod_name(job, 0), CONTAINER)
    async with await Cluster.connect(context) as cluster:
        try:
            async with program(cluster, place, command) as running, kept_alive(running, ALIVE, ALIVE_SECONDS):
                with _passing_on_ctrl_c(running):
                    return await _follow(running)
        except BrokenPipeError:  # nobody reads what ranks print (`| head`)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return INTERRUPTED


async def _follow(running: Program) -> int:
    streams = {True: ProgramOutput(error=True), False: ProgramOutput()}
    try:
        async for channel, data in running.output():
            streams[channel == STDERR].put(data)
    except Broken as error:
        raise Failed(f"{error}, and the run was stopped with it") from error
    return 1 if running.code is None else running.code


@contextlib.contextmanager
def _passing_on_ctrl_c(running: Program) -> Iterator[None]:
    """Send Ctrl-C to the program in the pod, which decides what becomes of it."""
    loop, sending = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def send(data: bytes) -> None:
        with contextlib.suppress(ProgramFailed):
            await running.write(data)

    loop.add_signal_handler(signal.SIGINT, lambda: sending.add(loop.create_task(send(CTRL_C))))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
