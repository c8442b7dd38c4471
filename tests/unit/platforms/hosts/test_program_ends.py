"""How a program on a host has ended, by what its ssh says: here a shell that says the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.platforms.hosts.place import HostPlace
from lockstep.programs import STDERR, Broken

SAYS = "cat > /dev/null & printf '\\036lockstep 1\\n'; {script}"


def place(script: str) -> HostPlace:
    """A host whose ssh is this script, after the mark by which a program begins."""

    async def opened() -> None:
        """Do nothing: there is no connection to share."""

    async def once(connect: Callable[[], Awaitable[Any]]) -> Any:
        return await connect()

    shared: Any = SimpleNamespace(
        login=SimpleNamespace(name="lab0"), be_open=opened, patiently=once, command=lambda *_: ("sh", "-c", SAYS.format(script=script))
    )
    return HostPlace(shared)


async def ended(script: str) -> tuple[bytes, int | None]:
    async with place(script).program(["true"]) as program:
        try:
            errors = b"".join([data async for channel, data in program.output() if channel == STDERR])
        except Broken:
            return program.errors, None
        return errors, program.code


@pytest.mark.parametrize(
    ("script", "errors", "code"),
    [
        ("printf 'no\\036lockstep 255\\n' >&2; exit 255", b"no", 255),
        ("printf 'no\\036lock' >&2; sleep 0.3; printf 'step 255\\n' >&2; exit 255", b"no", 255),
        ("printf 'lost\\036lockstep' >&2; exit 255", b"lost\x1elockstep", None),
        ("printf '\\036lockstep 255\\nConnection closed' >&2; exit 255", b"\x1elockstep 255\nConnection closed", None),
        ("printf 'a\\036' >&2; sleep 0.3; printf 'b' >&2; exit 3", b"a\x1eb", 3),
    ],
)
def test_255_is_a_program_s_own_only_where_its_mark_ends_what_it_says_in_one_piece_or_two(
    script: str, errors: bytes, code: int | None
) -> None:
    assert asyncio.run(ended(script)) == (errors, code)
