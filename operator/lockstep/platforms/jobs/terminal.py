"""`lockstep shell` and a run on all nodes of a dev environment: this terminal, connected to a program in a pod or on a host.

The program that runs on all nodes ends the run when its standard input ends, so that a laptop that is shut leaves no GPU busy; a `c` there
is Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.api.errors import Failed
from lockstep.api.names import AGENT_PATH
from lockstep.platforms.output import ProgramOutput
from lockstep.programs import STDERR, STDOUT, Broken, Place, Program, ProgramFailed, kept_alive, output_of
from lockstep_spec.exits import INTERRUPTED

SHELL = "umask 002; if command -v bash >/dev/null; then exec bash; else exec sh; fi"
PLAIN_TERMINAL = "xterm"
CTRL_C, ALIVE = b"c", b"."
ALIVE_SECONDS = 30.0
"""Seconds between signs of life: load balancers cut connections that are silent for minutes, and that would end the run."""
DIGEST_BYTES_MAX = 16 << 20
DIGEST_PROGRAM = "import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())"
DIGEST_SECONDS = 10.0
_TERM = re.compile(r"[A-Za-z0-9][-+.A-Za-z0-9]*")


def shell_command(term: str | None, folder: str = "") -> list[str]:
    """Command for a shell in this folder, but no login shell: that would replace the PATH and the variables that the container gives to
    every run.
    """
    terminal = term if term and _TERM.fullmatch(term) else PLAIN_TERMINAL
    begin = ["sh", "-c", f'cd "$1" && {{ {SHELL}; }}', "sh", folder] if folder else ["sh", "-c", SHELL]
    return ["env", f"TERM={terminal}", *begin]


async def shell(place: Place, folder: str = "") -> int:
    """Run a shell until it ends, and return its exit code. `folder`: where it begins; left out, where programs begin there.

    With a terminal it has one, too; else it reads this process's standard input, to its end.
    """
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    command = shell_command(os.environ.get("TERM"), folder)
    async with place.program(command, tty=interactive, pings=True) as session:
        with _raw() if interactive else contextlib.nullcontext():
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


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Pass every key to the pod, Ctrl-C among them."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setraw(terminal, termios.TCSADRAIN)  # what was typed ahead stays
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def agent_command(words: Sequence[str], by: str, *, detach: bool) -> list[str]:
    """Command in the pod. `by`: who runs it on which machine."""
    options = ["--by", by, *(["--detach"] if detach else ["--until-eof"])]
    return ["python3", "-I", AGENT_PATH, "run", *options, "--", *words]


def digest_here(words: Sequence[str], folder: Path) -> str:
    """Return the SHA-256 of the file that a person may take for the script that runs: the one at its path below `folder`, their current
    one. '': there is none.
    """
    path = Path(words[0]) if words else Path()
    if path.is_absolute() or not path.parts:
        return ""
    file = folder / path
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() and file.stat().st_size <= DIGEST_BYTES_MAX else ""
    except OSError:
        return ""


async def differs_there(place: Place, digest: str, there: str) -> bool:
    """Return True if the file at `there` of the pod has another SHA-256. False also where nobody can say."""
    try:
        answer = await output_of(place, ["python3", "-I", "-c", DIGEST_PROGRAM, there], seconds=DIGEST_SECONDS)
    except (Failed, OSError):
        return False  # the run itself tells what is wrong
    return answer.decode(errors="replace").strip() != digest


async def run_on_all_nodes(place: Place, command: Sequence[str]) -> int:
    """Run the command in node 0 and return its exit code; what it prints comes on this process's own output.

    Raises:
        Failed: the connection broke, or there is no right to run programs in pods.
    """
    try:
        async with place.program(command) as running, kept_alive(running, ALIVE, ALIVE_SECONDS):
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
