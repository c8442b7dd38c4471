"""The program that gives others a terminal on a host, here without ssh."""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.platforms.onhost import relay


def framed(kind: bytes, content: bytes = b"") -> bytes:
    return relay.HEADER.pack(kind, len(content)) + content


class Session:
    """A program in a terminal of the relay's."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.shown = b""

    def send(self, *frames: bytes) -> None:
        self.process.stdin.write(b"".join(frames))
        self.process.stdin.flush()

    def until(self, pattern: bytes, seconds: float = 20.0) -> re.Match[bytes]:
        """Read until this was shown."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.shown)) and time.monotonic() < deadline:
            if select.select([self.process.stdout], [], [], 0.1)[0]:
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                if not data:
                    break
                self.shown += data
        assert match, self.shown
        return match


@contextmanager
def session(*words: str) -> Iterator[Session]:
    command = ["python3", "-I", str(relay.__file__), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Session(process)
        finally:
            process.kill()


def test_a_terminal_has_a_size_and_follows_it() -> None:
    with session("sh", "-c", "stty -echo; tty; trap 'stty size' WINCH; echo up; while :; do read line && echo got $line; done") as shell:
        shell.until(rb"/dev/pts/\d+\s+up")
        shell.send(framed(relay.RESIZE, relay.SIZE.pack(91, 33)), framed(relay.DATA, b"x\n"))
        shell.until(b"33 91")
        shell.until(b"got x")


def test_the_end_comes_with_the_programs_code_though_something_keeps_the_terminal_open() -> None:
    with session("sh", "-c", "trap '' HUP; sleep 1000 & echo pid=$!; exit 7") as shell:
        pid = int(shell.until(rb"pid=(\d+)\r")[1])
        assert shell.process.wait(30) == 7
        os.kill(pid, 9)


def test_what_a_program_prints_last_is_shown() -> None:
    with session("sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x; echo end") as shell:
        shell.until(b"end")
        assert shell.shown.count(b"x") == 300000


def test_the_end_of_what_is_typed_ends_a_reader_in_its_own_way() -> None:
    for _ in range(5):
        with session("cat") as shell:
            shell.send(framed(relay.DATA, b"hello\n"), framed(relay.END))
            assert shell.process.wait(30) == 0


def test_a_program_that_is_not_there_is_told() -> None:
    with session("nonesuch") as shell:
        shell.until(b"nonesuch: No such file or directory")
        assert shell.process.wait(30) == 127


def test_a_connection_that_ends_ends_the_shell() -> None:
    with session("bash", "--norc", "-i") as shell:
        shell.send(framed(relay.DATA, b"echo pid=$$.\n"))
        pid = int(shell.until(rb"pid=(\d+)\.")[1])
        shell.process.stdin.close()
        shell.process.wait(30)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("frame", [b"x\0\0\0\0", b"d\xff\xff\xff\xff"])
def test_what_is_no_frame_is_refused(frame: bytes) -> None:
    with session("cat") as shell:
        shell.send(frame)
        assert shell.process.wait(30) not in (0, None)


def test_many_frames_at_once_are_typed_in_order() -> None:
    with session("sh", "-c", 'stty -echo; echo up; while read line; do echo $line; test "$line" = 1999 && exit 0; done') as shell:
        shell.until(b"up")
        shell.send(*(framed(relay.DATA, f"{number}\n".encode()) for number in range(2000)))
        shell.until(b"1999")
        assert shell.process.wait(30) == 0
        assert [int(word) for word in shell.shown.split()[1:]] == list(range(2000))
