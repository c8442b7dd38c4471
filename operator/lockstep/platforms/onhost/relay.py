"""Run a program in a terminal of its own: `relay WORD …`. Standard input has frames, standard output what the terminal shows.

A frame is a letter, four bytes of length, and so many bytes: `d` what was typed; `r` columns and lines, two bytes each; `e` the end of what
is typed. The end of standard input closes the terminal, which tells its programs to end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
from collections.abc import Sequence

HEADER = struct.Struct("!cI")
SIZE = struct.Struct("!HH")
DATA, RESIZE, END = b"d", b"r", b"e"
END_OF_FILE = b"\x04"
FRAME_BYTES_MAX = 1 << 20
PIECE_BYTES = 1 << 16


class Terminal:
    """The terminal's side of this process, and what was typed but is not yet taken."""

    def __init__(self, master: int) -> None:
        self.master = master
        self.frames, self.typed = b"", b""
        os.set_blocking(master, False)

    def take(self, data: bytes) -> None:
        """Read whole frames. Raises ValueError for one that is too long or unknown."""
        self.frames += data
        while len(self.frames) >= HEADER.size:
            kind, length = HEADER.unpack_from(self.frames)
            if length > FRAME_BYTES_MAX or kind not in (DATA, RESIZE, END):
                raise ValueError("not a frame")
            if len(self.frames) < HEADER.size + length:
                return
            content = self.frames[HEADER.size : HEADER.size + length]
            self.frames = self.frames[HEADER.size + length :]
            if kind == RESIZE:
                columns, lines = SIZE.unpack(content)
                fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            else:
                self.typed += END_OF_FILE if kind == END else content

    def type(self) -> None:
        """Pass on what the terminal takes of it."""
        with contextlib.suppress(BlockingIOError):
            self.typed = self.typed[os.write(self.master, self.typed) :]

    def shown(self) -> bytes | None:
        """Next output of the terminal; b"" when there is none now, None at its end."""
        try:
            return os.read(self.master, PIECE_BYTES) or None
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno == errno.EIO:  # nobody has it open any more
                return None
            raise


def main(words: Sequence[str]) -> int:
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking)
    child, master = pty.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(words[0], list(words))  # noqa: S606 (a list of words, no shell)
        except OSError as error:
            os.write(2, f"{words[0]}: {error.strerror}\n".encode(errors="replace"))
        os._exit(127)
    serve(Terminal(master), woken)
    os.close(master)
    _, status = os.waitpid(child, 0)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def serve(terminal: Terminal, woken: int) -> None:
    """Carry both ways until the program ends, or the connection does. What the program left in the background loses its terminal."""
    is_open = True
    while True:
        takes = [0] if len(terminal.typed) <= FRAME_BYTES_MAX else []
        shows, types = ([terminal.master], [terminal.master] if terminal.typed else []) if is_open else ([], [])
        readable, writable, _ = select.select([woken, *takes, *shows], types, [])
        if 0 in readable:
            data = os.read(0, PIECE_BYTES)
            if not data:
                return
            terminal.take(data)
        if writable:
            terminal.type()
        if terminal.master in readable:
            output = terminal.shown()
            is_open = output is not None  # (many programs close their files before they end: closing the terminal then would kill them)
            show(output or b"")
        if woken in readable:  # the program has ended: what it printed last is still there
            while output := terminal.shown():
                show(output)
            return


def show(output: bytes) -> None:
    while output:
        output = output[os.write(1, output) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
