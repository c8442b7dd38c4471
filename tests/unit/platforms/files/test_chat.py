"""A model that answers requests, as the command line hears it: a program of a few lines plays it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.files import generate
from lockstep.platforms.files import chat
from lockstep.platforms.files.chat import Unanswered, loaded
from lockstep.platforms.files.results import NoAdapter
from lockstep.platforms.jobs.processes import LocalPlace
from lockstep.platforms.places.values import Use, Volume, Words
from lockstep.programs import Program, ProgramFailed

MODEL = """
import json, os, signal, sys
def say(**answer): print(json.dumps(answer), flush=True)
say(adapter="/runs/x/adapter", model="/models/x", chats=True)
say(ready=True)
for line in sys.stdin:
    request = json.loads(line)
    text = request["prompt"]
    if text == "die":
        say(piece="half")
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "long":
        say(refused="too long")
        continue
    for letter in text:
        say(piece=letter)
    say(end=True, left_out=request.get("out", 0))
"""


def talk(program: str, *prompts: str) -> list[tuple[str, list[str]]]:
    async def talking() -> list[tuple[str, list[str]]]:
        answers: list[tuple[str, list[str]]] = []
        async with loaded(LocalPlace(), [sys.executable, "-c", program], "nothing yet", nullcontext) as model:
            for prompt in prompts:
                pieces: list[str] = []
                try:
                    answers.append((await model.answer({"prompt": prompt}, pieces.append), pieces))
                except Unanswered as refused:
                    answers.append((f"refused: {refused}", pieces))
        return answers

    return asyncio.run(talking())


def test_answers_come_in_pieces_one_request_after_the_other_and_a_refusal_ends_nothing() -> None:
    assert talk(MODEL, "ü日", "long", "b") == [("ü日", ["ü", "日"]), ("refused: too long", []), ("b", ["b"])]


def test_half_a_letter_of_a_command_line_is_no_error() -> None:
    assert talk(MODEL, "a\udcff") == [("a?", ["a", "?"])]


def test_a_program_that_is_killed_in_the_middle_ends_the_chat_with_a_sentence() -> None:
    with pytest.raises(ProgramFailed, match="this machine: it ended with -9"):
        talk(MODEL, "a", "die")


def test_an_answer_that_never_ends_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "OUTPUT_BYTES_MAX", 8)
    with pytest.raises(ProgramFailed, match="an answer of more than 8 letters is not a valid one"):
        talk(MODEL, "123456789abc")


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        ("import sys; print('lockstep: no template', file=sys.stderr); sys.exit(78)", ConfigError, "^this machine: no template$"),
        ("import sys; sys.exit('No module named lockstep_train')", ProgramFailed, "No module named lockstep_train"),
        ("print('{\"none\": 1}')", NoAdapter, "^nothing yet$"),
        ("import sys; print('{}'); print('lockstep: another base', file=sys.stderr); sys.exit(78)", ConfigError, "^this machine: another"),
        ("print('Welcome')", ProgramFailed, "says 'Welcome', which is not a valid answer"),
    ],
)
def test_what_is_refused_before_it_is_loaded_is_told(program: str, error: type[Failed], words: str) -> None:
    with pytest.raises(error, match=words):
        talk(program, "a")


class WithoutCommit(LocalPlace):
    """This machine, where the trainer's program finds nothing."""

    @asynccontextmanager
    async def program(
        self, command: Sequence[str], *, stdin: bool = True, tty: bool = False, pings: bool = False
    ) -> AsyncIterator[Program]:
        async with super().program([sys.executable, "-c", "print('{\"none\": 1}')"]) as program:
            yield program


@pytest.mark.parametrize("runs", [True, False])
def test_a_running_pod_that_has_no_commit_yet_is_asked_before_another_pod_is_made(runs: bool) -> None:
    made: list[int] = []

    @asynccontextmanager
    async def volume(node: int, say: Any, use: Use, gpus: int = 0) -> AsyncIterator[Volume]:
        if use is Use.MODEL:
            made.append(gpus)
        elif not runs:
            raise Failed("pod x-0 is gone")
        yield Volume(WithoutCommit(), "/workspace", "/datasets")

    async def loading() -> None:
        backend = SimpleNamespace(words=Words("-n ml", "in namespace ml"))
        job = SimpleNamespace(name="x", job={"spec": {}}, pods=object(), backend=backend, volume=volume)
        async with generate._of_job(cast(Any, job), 0, []):
            pytest.fail("there is nothing to load")

    with pytest.raises(NoAdapter, match="/workspace/runs/x in this machine has no adapter and no commit: lockstep why x -n ml tells"):
        asyncio.run(loading())
    assert made == ([] if runs else [0])
