"""A chat at a terminal and from a pipe, with a played model: what is sent, and what ends an answer, a message and the chat."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PLAYED = """
import asyncio, json, sys
from contextlib import asynccontextmanager
from lockstep.cli.files import chat
from lockstep.cli.main import main
from lockstep.platforms.files.chat import Unanswered

class Model:
    async def answer(self, request, show):
        self.stopped = asyncio.Event()
        texts = [message["content"] for message in request["messages"]]
        if texts[-1] == "too long":
            raise Unanswered("say it in fewer words")
        show(json.dumps(texts, ensure_ascii=False))
        if texts[-1] == "endless":
            await self.stopped.wait()
        return "no" if request["base"] else "yes"

    async def stop(self):
        self.stopped.set()

@asynccontextmanager
async def tuned(*_):
    try:
        yield Model()
    finally:
        print("closed", flush=True)

chat.tuned_model = tuned
sys.argv = ["lockstep", "chat", "./run", *sys.argv[1:]]
sys.exit(main())
"""


def piped(text: bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", PLAYED, *options], input=text, capture_output=True, check=False, timeout=60)


def test_each_line_of_a_pipe_is_a_message_of_one_conversation() -> None:
    told = piped("ü\n\n  \n日\\\n本\nend".encode())
    assert told.stdout.decode() == '["ü"]\n["ü", "yes", "日\\n本"]\n["ü", "yes", "日\\n本", "yes", "end"]\nclosed\n'
    assert (told.returncode, told.stderr) == (0, b"")


def test_the_base_model_has_a_conversation_of_its_own() -> None:
    assert piped(b"a\nb\n", "--base").stdout.decode() == (
        'base: ["a"]\ntuned: ["a"]\nbase: ["a", "no", "b"]\ntuned: ["a", "yes", "b"]\nclosed\n'
    )


def test_a_refused_message_is_forgotten_and_the_chat_goes_on() -> None:
    told = piped(b"a\ntoo long\nb\n")
    assert told.stdout.decode() == '["a"]\n\n["a", "yes", "b"]\nclosed\n'
    assert (told.returncode, told.stderr) == (0, b"say it in fewer words\n")


def test_bytes_that_are_no_text_are_replaced() -> None:
    told = piped(b"a\xff\n")
    assert told.returncode == 0 and told.stdout.decode().startswith('["a\N{REPLACEMENT CHARACTER}"]')


class Person:
    """A person at a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process, self._terminal, self.screen = process, terminal, b""

    def type(self, text: bytes) -> None:
        os.write(self._terminal, text)

    def sees(self, text: bytes) -> None:
        """Wait until the text is on the screen, and forget what is before its end."""
        while text not in self.screen:
            self.screen += os.read(self._terminal, 4096)
        self.screen = self.screen.partition(text)[2]

    def rest(self, typed: bytes = b"") -> bytes:
        """What is shown until it ends. `typed`: typed until it helps: Python's input() sleeps over a signal just before it reads."""
        with pytest.raises(OSError, match="Input/output"):  # the terminal is closed
            while True:
                if typed and not select.select([self._terminal], [], [], 2)[0]:
                    self.type(typed)
                self.screen += os.read(self._terminal, 4096)
        return self.screen


@contextmanager
def at_a_terminal() -> Iterator[Person]:
    here, there = pty.openpty()
    with subprocess.Popen(["setsid", "-c", sys.executable, "-c", PLAYED], stdin=there, stdout=there, stderr=there) as process:
        os.close(there)
        try:
            person = Person(process, here)
            person.sees(b"> ")
            yield person
        finally:
            process.kill()
            os.close(here)


def test_ctrl_c_ends_the_answer_and_at_the_prompt_the_chat() -> None:
    with at_a_terminal() as person:
        person.type(b"endless\n")
        person.sees(b'["endless"]')
        person.type(b"\x03")
        person.sees(b"> ")
        person.type(b"next\n")
        person.sees(b'["endless", "yes", "next"]')
        person.sees(b"> ")
        person.type(b"\x03")
        rest = person.rest(typed=b"\x03")
        assert b"closed" in rest and b"Traceback" not in rest
        assert person.process.wait(60) == 130


def test_ctrl_d_ends_the_chat_well() -> None:
    with at_a_terminal() as person:
        person.type(b"\x04")
        assert b"closed" in person.rest()
        assert person.process.wait(60) == 0


def test_sigterm_in_an_answer_ends_the_chat() -> None:
    with at_a_terminal() as person:
        person.type(b"endless\n")
        person.sees(b'["endless"]')
        person.process.send_signal(signal.SIGTERM)
        rest = person.rest()
        assert b"closed" in rest and b"Traceback" not in rest
        assert person.process.wait(60) == 143
