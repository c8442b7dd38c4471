"""A model with a job's adapter, loaded once where the job's files are, which answers one request after the other: `lockstep_train.chat`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import Any

from lockstep.api.errors import ConfigError, Failed
from lockstep.platforms.files.results import NoAdapter
from lockstep.programs import OUTPUT_BYTES_MAX, Broken, Place, Program, ProgramFailed, answer_of, lines_in, next_answer
from lockstep_spec.exits import CONFIGURATION

MODULE = "lockstep_train.chat"
Json = dict[str, Any]
Loading = Callable[[str], AbstractContextManager[object]]


class Unanswered(Failed):
    """A request has no answer, and the next one may have one."""


class TunedModel:
    """A loaded model. `facts`: folders of its `adapter`, or the commit that this is made of, and of its base `model`; `chats`: the run has
    learned conversations.
    """

    def __init__(self, program: Program, lines: AsyncIterator[bytes], facts: Json) -> None:
        self.facts, self._program, self._lines = facts, program, lines

    async def answer(self, request: Json, show: Callable[[str], None]) -> str:
        """Return the answer, which `show` gets in pieces as it comes. Raises Unanswered, ProgramFailed."""
        with suppress(Broken):  # (what the program said tells more)
            await self._program.write(json.dumps(request, ensure_ascii=False).encode(errors="replace") + b"\n")
        text = ""
        async for line in self._lines:
            answer = answer_of(line, self._program.place.name)
            if "refused" in answer:
                raise Unanswered(str(answer["refused"]))
            if "end" in answer:
                return text
            text += (piece := str(answer.get("piece", "")))
            show(piece)
            if len(text) > OUTPUT_BYTES_MAX:
                raise ProgramFailed(f"{self._program.place.name}: an answer of more than {OUTPUT_BYTES_MAX} letters is not a valid one")
        raise self._program.failure()

    async def stop(self) -> None:
        """End the answer that is being written."""
        with suppress(Broken):
            await self._program.write(b'{"stop": true}\n')


@asynccontextmanager
async def started(place: Place, command: Sequence[str], none: str) -> AsyncIterator[TunedModel]:
    """Start to load what the command names. Raises ConfigError, ProgramFailed, and NoAdapter with the words `none`."""
    async with place.program([*command], pings=True) as program:
        lines = lines_in(program)
        facts = await _next(program, lines)
        if "none" in facts:
            raise NoAdapter(none)
        yield TunedModel(program, lines, facts)


@asynccontextmanager
async def loaded(place: Place, command: Sequence[str], none: str, loading: Loading) -> AsyncIterator[TunedModel]:
    """Load what the command names, while the block of `loading` is open. Raises as `started`."""
    async with started(place, command, none) as model:
        with loading(f"{model.facts.get('adapter')} ({place.name})"):
            await _next(model._program, model._lines, "ready")
        yield model


async def _next(program: Program, lines: AsyncIterator[bytes], word: str = "") -> Json:
    try:
        return await next_answer(program, lines, word)
    except ProgramFailed as error:
        raise ConfigError(str(error).replace(": lockstep: ", ": ", 1)) if program.code == CONFIGURATION else error from None
