"""`lockstep shell`: connect this terminal to a shell in a pod."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.api.names import CONTAINER
from lockstep.kube.cluster import Cluster
from lockstep.kube.exec import STDERR, STDOUT, Place, Program, program
from lockstep.platforms.output import ProgramOutput

SHELL = "umask 002; if command -v bash >/dev/null; then exec bash; else exec sh; fi"
PLAIN_TERMINAL = "xterm"
_TERM = re.compile(r"[A-Za-z0-9][-+.A-Za-z0-9]*")


def shell_command(term: str | None) -> list[str]:
    """Command for a shell, but no login shell: that would replace the PATH and the variables that the container gives to every run."""
    terminal = term if term and _TERM.fullmatch(term) else PLAIN_TERMINAL
    return ["env", f"TERM={terminal}", "sh", "-c", SHELL]


async def shell(cluster: Cluster, namespace: str, pod: str) -> int:
    """Run a shell until it ends, and return its exit code.

    With a terminal it has one, too; else it reads this process's standard input, to its end.
    """
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    command = shell_command(os.environ.get("TERM"))
    async with program(cluster, Place(namespace, pod, CONTAINER), command, tty=interactive, pings=True) as session:
        with _raw() if interactive else _plain():
            helpers = [asyncio.create_task(_type(session))]
            if interactive:
                helpers.append(asyncio.create_task(_follow_size(session)))
            try:
                await _show(session, raw=interactive)
            finally:
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)
    return session.code or 0


async def _show(session: Program, *, raw: bool) -> None:
    """Show its output: as it is to its own terminal, a file or a pipe; escaped to a terminal that isn't the pod's."""
    streams = {STDOUT: sys.stdout, STDERR: sys.stderr}
    escaping = {channel: ProgramOutput(error=channel == STDERR) for channel, stream in streams.items() if not raw and stream.isatty()}
    async for channel, data in session.output():
        if channel in escaping:
            escaping[channel].put(data)
            continue
        out = streams[channel].buffer
        out.write(data)
        out.flush()


async def _type(session: Program) -> None:
    """Send standard input, and its end. A thread reads: not everything that can be standard input can be polled."""
    loop, read = asyncio.get_running_loop(), asyncio.Queue[bytes]()

    def reading() -> None:
        data = b"-"
        while data:
            try:
                data = os.read(sys.stdin.fileno(), 1 << 16)
            except OSError:
                data = b""
            try:
                loop.call_soon_threadsafe(read.put_nowait, data)
            except RuntimeError:  # the session has ended, and the loop with it
                return

    threading.Thread(target=reading, daemon=True).start()
    while data := await read.get():
        await session.write(data)
    if not await session.close_stdin():
        await session.write(b"\nexit\n")


async def _follow_size(session: Program) -> None:
    """Send the size of the window now, and whenever it changes."""
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        while True:
            changed.clear()
            size = shutil.get_terminal_size()
            await session.resize(size.columns, size.lines)
            await changed.wait()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


@contextmanager
def _raw() -> Iterator[None]:
    """Pass every key to the pod, Ctrl-C among them."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setraw(terminal, termios.TCSADRAIN)  # what was typed ahead stays
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@contextmanager
def _plain() -> Iterator[None]:
    yield
