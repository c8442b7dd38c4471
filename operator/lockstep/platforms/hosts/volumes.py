"""Files of hosts, and which hosts see the same ones: found out by a mark that each writes and the others look for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from lockstep.api.errors import Failed
from lockstep.plan.hosts.facts import HostFacts
from lockstep.plan.hosts.place import python_of
from lockstep.plan.hosts.volumes import Sharing, groups_of
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.inpod import source_of
from lockstep.platforms.onhost import marks as marks_program
from lockstep.platforms.places.values import Volume, Volumes
from lockstep.programs import Program, ProgramFailed, answer_of, lines_in, meanwhile, python_program
from lockstep_spec.words import printable_line

GLANCE_SECONDS = 0.3
"""Seconds for which a host looks for marks that it may not see at all."""
SURE_SECONDS = 30.0
"""The same, where one file system was stated: its clients may show new names late."""
ASK_SECONDS = 60.0


async def sharing(fleet: Fleet, folders: Mapping[str, str], *, stated: bool = False) -> Sharing:
    """Hosts by the file system that their folder is on, in the order of `folders`. A host that can't be asked stands alone.

    `stated`: the cluster file says that all share it.
    """
    async with looking_for_marks(fleet, folders, stated=stated) as looking:
        return await looking


@asynccontextmanager
async def looking_for_marks(fleet: Fleet, folders: Mapping[str, str], *, stated: bool = False) -> AsyncIterator[asyncio.Task[Sharing]]:
    """Let each host write its mark, and yield what then finds out the answer of `sharing` beside the block.

    A block may make folders: each host has chosen by then where its own mark is.
    """
    unwritable: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        asked: dict[str, tuple[Program, AsyncIterator[bytes]]] = {}

        async def write(host: str) -> str:
            program = await stack.enter_async_context(python_program(fleet.place(host), source_of(marks_program)))
            asked[host] = program, lines_in(program)
            answer = await _asked(*asked[host], {"folder": folders[host]})
            if "problem" in answer:
                unwritable[host] = printable_line(str(answer["problem"]))
            return str(answer.get("mark", ""))

        async def look(host: str) -> list[str]:
            seconds = SURE_SECONDS if stated else GLANCE_SECONDS
            answer = await _asked(*asked[host], {"marks": [mark for mark in marks.values() if mark], "seconds": seconds})
            return [str(mark) for mark in answer.get("seen", [])]

        async def look_all() -> Sharing:
            seen, silent_later = await fleet.all(marks, look)
            # Each removes its mark only now, and in turn: all have looked.
            await asyncio.gather(*(program.close_stdin() for program, _ in asked.values()))
            await asyncio.gather(*(_ended(lines) for _, lines in asked.values()))
            groups = groups_of({host: marks.get(host, "") for host in folders}, seen)
            able_first = [sorted(group, key=lambda host: host in unwritable) for group in groups]
            return Sharing(able_first, unwritable, {**silent, **silent_later})

        marks, silent = await fleet.all(folders if len(folders) > 1 else (), write)
        async with meanwhile(look_all()) as looking:
            yield looking


async def volumes_of(fleet: Fleet, names: Sequence[str]) -> Volumes:
    """Return the files of each of these hosts, where programs have the Python and the variables that its file gives its ranks."""
    answers, problems = await fleet.look(names)
    return {name: _opened(fleet, name, answers.get(name), problems.get(name, "")) for name in names}


@asynccontextmanager
async def _opened(fleet: Fleet, name: str, facts: HostFacts | None, problem: str) -> AsyncIterator[Volume]:
    if facts is None:
        raise Failed(problem)
    host = fleet.cluster.host(name)
    variables = tuple((variable.name, variable.value) for variable in host.env)
    place = replace(fleet.place(name), python=(python_of(host, facts),), environment=variables)
    yield Volume(place, facts.workspace.path, facts.datasets.path)


async def _asked(program: Program, lines: AsyncIterator[bytes], question: Mapping[str, object]) -> dict[str, Any]:
    async with asyncio.timeout(ASK_SECONDS):
        await program.write(json.dumps(question).encode() + b"\n")
        async for line in lines:
            return answer_of(line, program.place.name)
    raise program.failure()


async def _ended(lines: AsyncIterator[bytes]) -> None:
    try:
        async with asyncio.timeout(ASK_SECONDS):
            async for _ in lines:
                pass
    except (ProgramFailed, TimeoutError):
        pass
