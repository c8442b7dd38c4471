"""Record a terminal session as an asciicast, and show the terminal's screen at any moment of it.

The recording is a real shell in a real terminal: commands are typed, and what they print is kept with its times (asciicast v2,
docs.asciinema.org). A mark is a moment that a picture shows.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyte

PROMPT = "$ "
KEY_SECONDS = 0.05
QUIET_SECONDS = 0.4
"""The screen is complete when nothing has been written for this long."""
TOGETHER_SECONDS = 0.02
"""Output that is written within this time is one event."""
READ_BYTES = 65536
SHELL = ("/bin/bash", "--norc", "--noprofile", "--noediting")
Lines = list[str]


class SceneError(Exception):
    """A scene could not show what it should."""


@dataclass(frozen=True)
class Event:
    seconds: float
    kind: str
    """"o": written to the terminal; "m": a mark."""
    text: str


@dataclass
class Cast:
    title: str
    columns: int
    rows: int
    events: list[Event] = field(default_factory=list)

    def text(self) -> str:
        header = {"version": 2, "width": self.columns, "height": self.rows, "title": self.title}
        events = ([event.seconds, event.kind, event.text] for event in self.events)
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (header, *events))

    @classmethod
    def read(cls, path: Path) -> Cast:
        header, *events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return cls(header["title"], header["width"], header["height"], [Event(*event) for event in events])

    def screens(self) -> Iterator[tuple[Event, pyte.Screen]]:
        """Every event, with the screen after it. The screen is the same object each time."""
        screen = pyte.Screen(self.columns, self.rows)
        stream = pyte.Stream(screen)
        for event in self.events:
            if event.kind == "o":
                stream.feed(event.text)
            yield event, screen

    def marked(self) -> dict[str, Lines]:
        """Lines of the screen at each mark."""
        return {event.text: shown(screen) for event, screen in self.screens() if event.kind == "m"}


def shown(screen: pyte.Screen) -> Lines:
    """Lines on a screen, without the empty ones at its end."""
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines


class Terminal:
    """A shell to type into. `hidden` texts never get into the recording: each is replaced by its value there."""

    def __init__(
        self, title: str, *, columns: int, rows: int, folder: Path, environment: Mapping[str, str], hidden: Mapping[str, str]
    ) -> None:
        self.cast = Cast(title, columns, rows)
        self._codes = Path(tempfile.mkstemp(prefix="lockstep-codes-")[1])
        self._hidden = hidden
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.Stream(self._screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._began = time.monotonic()
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            try:
                os.chdir(folder)
                told = {"PS1": PROMPT, "PROMPT_COMMAND": f"echo $? >> {self._codes}", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
                os.execve(SHELL[0], SHELL, {**environment, **told})
            finally:  # if there is no shell, this process must not run the other one's cleanup
                os._exit(127)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def __enter__(self) -> Terminal:
        try:
            self.until(lambda lines: lines[-1:] == [PROMPT.rstrip()], "the shell's prompt", seconds=60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGHUP)
        os.close(self._terminal)
        os.waitpid(self._pid, 0)
        self._codes.unlink()

    def run(self, command: str, *, seconds: float, code: int = 0) -> None:
        """Type a command and wait until it has ended. Raises SceneError where it ends with another exit code, or not in time."""
        self.type(command)
        self.until(lambda lines: lines[-1:] == [PROMPT.rstrip()], f"the end of: {command}", seconds=seconds)
        ended = int(self._codes.read_text().split()[-1])
        if ended != code:
            raise SceneError(f"{command} ended with {ended}; the terminal shows:\n" + "\n".join(shown(self._screen)))

    def type(self, command: str) -> None:
        for key in command:
            os.write(self._terminal, key.encode())
            self._read(KEY_SECONDS)
        os.write(self._terminal, b"\r")
        self._read(KEY_SECONDS)

    def press(self, key: bytes) -> None:
        os.write(self._terminal, key)

    def until(self, there: Callable[[Lines], bool], what: str, *, seconds: float) -> None:
        """Wait until the screen shows it. If it doesn't in time, raise SceneError with the screen's lines."""
        limit = time.monotonic() + seconds
        while self._read(QUIET_SECONDS) or not there(shown(self._screen)):
            if time.monotonic() > limit:
                raise SceneError(f"waited {seconds:.0f} s for {what}; the terminal shows:\n" + "\n".join(shown(self._screen)))

    def lines(self) -> Lines:
        return shown(self._screen)

    def mark(self, name: str) -> None:
        self.cast.events.append(Event(self._now(), "m", name))

    def _read(self, seconds: float) -> bool:
        """Read the output of the next seconds; return False if there was none."""
        if not select.select([self._terminal], [], [], seconds)[0]:
            return False
        data = b""
        try:
            while select.select([self._terminal], [], [], TOGETHER_SECONDS)[0] and (part := os.read(self._terminal, READ_BYTES)):
                data += part
        except OSError:  # Linux reports a closed other end like this
            if not data:
                raise SceneError("the shell has ended; the terminal shows:\n" + "\n".join(shown(self._screen))) from None
        text = self._decoder.decode(data)
        for secret, stands_for in self._hidden.items():
            text = text.replace(secret, stands_for)
        self._stream.feed(text)
        self.cast.events.append(Event(self._now(), "o", text))
        return True

    def _now(self) -> float:
        return round(time.monotonic() - self._began, 2)
