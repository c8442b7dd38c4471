"""The one way to standard output and standard error: whatever a cluster, a pod or a file says reaches a terminal as text that does nothing
there.

`print` is not used (`make lint` refuses it): each line given here stays one line, and control characters and those that change the
direction of writing come out as escapes. A terminal of `lockstep shell` is the one exception: that is a terminal of the pod.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
import sys
from pathlib import Path
from typing import TextIO

from lockstep.api.errors import Failed
from lockstep_spec.words import json_escaped, printable, printable_line


def put(*lines: object, flush: bool = False) -> None:
    """Lines to standard output, each as one line whatever it quotes. Raises Failed where it takes no more, as all functions here do."""
    _write(sys.stdout, lines, flush)


def tell(*lines: object) -> None:
    """Lines to standard error, at once."""
    _write(sys.stderr, lines, True)


def say(line: str) -> None:
    """Print a line about the verb itself, on standard error: its output stays clean."""
    tell(f"lockstep: {line}")


def put_text(text: str, *, error: bool = False) -> None:
    """Text whose line ends are Lockstep's own: YAML, a page. Values of others are in it as lines."""
    _send(sys.stderr if error else sys.stdout, printable(text), True)


NO_LINKS = ("", "dumb", "linux")
"""Terminals, by $TERM, that show the codes of a link or do nothing with them."""


def put_link(address: str) -> None:
    """A line that is an address; a terminal that knows links (OSC 8) makes all of it one."""
    line = printable_line(address)
    if sys.stdout.isatty() and os.environ.get("TERM", "") not in NO_LINKS and not os.environ.get("NO_COLOR"):
        line = f"\x1b]8;;{line}\x1b\\{line}\x1b]8;;\x1b\\"
    _send(sys.stdout, f"{line}\n", True)


def put_json(value: object, *, indent: int = 2, ascii_only: bool = True) -> None:
    """JSON that every parser reads as `value`, and no terminal acts on."""
    put_json_text(json.dumps(value, indent=indent, ensure_ascii=ascii_only))


def put_json_text(text: str) -> None:
    _send(sys.stdout, f"{json_escaped(text)}\n", True)


def put_over(line: str, width: int) -> None:
    """Write it in place of what was put so before, `width` characters of it: on a terminal's standard error."""
    _send(sys.stderr, "\r" + printable_line(line).ljust(width) + ("" if line else "\r"), True)


def open_streams() -> None:
    """Prepare the standard streams: one that is closed leads nowhere, and no character is an error where the locale has none for it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (for as long as this process lives)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write what standard output holds. Raises Failed where it takes no more."""
    _send(sys.stdout, "", True)


def leave_terminal() -> None:
    """Write nowhere from now on: every write to a terminal that is gone is an error, and would cut the cleaning short."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


class ProgramOutput:
    """Output of a program in a pod, as it comes, in pieces that end anywhere. A carriage return ends a line, as it does in node logs."""

    def __init__(self, *, error: bool = False) -> None:
        self._error = error
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._returned = False

    def put(self, data: bytes) -> None:
        text = self._decoder.decode(data)
        if self._returned and text.startswith("\n"):
            text = text[1:]
        if text:
            self._returned = text.endswith("\r")
        put_text(text.replace("\r\n", "\n").replace("\r", "\n"), error=self._error)


def _write(stream: TextIO, lines: tuple[object, ...], flush: bool) -> None:
    _send(stream, "".join(f"{printable_line(str(line))}\n" for line in lines or ("",)), flush)


def _send(stream: TextIO, text: str, flush: bool) -> None:
    """Write the text. Raises Failed when standard output takes no more; a reader that has gone is typer's to hear of."""
    try:
        stream.write(text)
        if flush:
            stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _leave(stream)
        if stream is sys.stdout:
            raise Failed(f"standard output can't be written: {error.strerror}") from None


def _leave(stream: TextIO) -> None:
    """Let the stream lead nowhere: what it holds would be an error once more when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
