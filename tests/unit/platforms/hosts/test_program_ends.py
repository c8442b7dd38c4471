"""How a program on a host has ended, by what its ssh says: here a shell that says the same."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.api.hosts import Host, HostsCluster
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.hosts.place import HostPlace
from lockstep.platforms.hosts.ssh import Login, Shared
from lockstep.programs import STDERR, Broken, NotStarted

SAYS = "cat > /dev/null & {noise}; printf '\\036lockstep 1\\n'; {script}"


def place(script: str, noise: str = ":") -> HostPlace:
    """A host whose ssh is this script, after the login shell's noise and the mark by which a program begins."""

    async def opened() -> None:
        """Do nothing: there is no connection to share."""

    async def once(connect: Callable[[], Awaitable[Any]]) -> Any:
        return await connect()

    shared: Any = SimpleNamespace(
        login=SimpleNamespace(name="lab0", words="lab0"),
        be_open=opened,
        patiently=once,
        command=lambda *_: ("sh", "-c", SAYS.format(script=script, noise=noise)),
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


@pytest.mark.parametrize(("kibibytes", "is_refused"), [(60, False), (200, True)])
def test_a_login_shell_may_print_64_kibibytes_before_a_program(kibibytes: int, is_refused: bool) -> None:
    async def begun() -> str:
        async with place("true", f"head -c {kibibytes << 10} /dev/zero | tr '\\0' x").program(["true"]) as program:
            return program.noise

    if is_refused:
        with pytest.raises(NotStarted, match=r"its login shell says: x{1000} \("):
            asyncio.run(begun())
    else:
        assert len(asyncio.run(begun())) == kibibytes << 10


def test_work_on_hosts_that_is_interrupted_has_cleaned_up_on_all_of_them_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.platforms.hosts.fleet.control_folder", lambda: tmp_path)
    fleet = Fleet(HostsCluster(hosts=[Host(name=name) for name in ("a", "b", "c")]), "lab", "lab")
    begun, cleaned = asyncio.Queue[str](), list[str]()

    async def work(host: str) -> None:
        try:
            begun.put_nowait(host)
            await asyncio.Event().wait()
        finally:
            for _ in range({"a": 0, "b": 5, "c": 50}[host]):  # (turns of the loop: each host's cleaning takes another while)
                await asyncio.sleep(0)
            cleaned.append(host)

    async def interrupted() -> list[str]:
        task = asyncio.create_task(fleet.all(["a", "b", "c"], work))
        for _ in "abc":
            await begun.get()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return list(cleaned)

    assert asyncio.run(interrupted()) == ["a", "b", "c"]


def test_a_host_that_does_not_answer_is_given_up_a_moment_after_the_others_and_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.platforms.hosts.fleet.control_folder", lambda: tmp_path)
    fleet = Fleet(HostsCluster(hosts=[Host(name=name) for name in ("a", "off", "refused")]), "lab", "lab")
    cleaned: list[str] = []

    async def work(host: str) -> int:
        if host == "refused":
            raise Broken("host refused: no")
        try:
            return 1 if host == "a" else await asyncio.get_running_loop().create_future()
        finally:
            cleaned.append(host)

    answers, problems = asyncio.run(fleet.all(["a", "off", "refused"], work, late_seconds=0.01))
    assert (answers, cleaned) == ({"a": 1}, ["a", "off"])
    assert problems == {"off": "host off has not answered 0 s after the others", "refused": "host refused: no"}


def test_a_host_whose_turn_comes_late_is_waited_for_as_long_as_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.platforms.hosts.fleet.control_folder", lambda: tmp_path)
    monkeypatch.setattr("lockstep.platforms.hosts.fleet.AT_ONCE", 1)
    fleet = Fleet(HostsCluster(hosts=[Host(name=name) for name in ("a", "off", "queued")]), "lab", "lab")

    async def work(host: str) -> str:
        return host if host != "off" else await asyncio.get_running_loop().create_future()

    answers, problems = asyncio.run(fleet.all(["a", "off", "queued"], work, late_seconds=0.01))
    assert answers == {"a": "a", "queued": "queued"}
    assert problems == {"off": "host off has not answered 0 s after the others"}


def test_an_ssh_that_is_interrupted_while_it_tells_its_settings_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    os.mkfifo(tmp_path / "begun")
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho > {tmp_path}/begun\nexec sleep 60\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    unraisable: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)

    async def interrupted() -> None:
        task = asyncio.create_task(Shared(Login("lab0"), tmp_path).prepare())
        await asyncio.to_thread((tmp_path / "begun").read_bytes)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    gc.collect()
    assert unraisable == [] and [str(warning.message) for warning in recwarn] == []


async def test_a_program_that_floods_its_output_unread_is_ended() -> None:
    """asyncio stops reading a pipe that is too full, and would wait for its end for ever."""
    async with asyncio.timeout(60):
        async with place("exec yes").program(["true"]) as program:
            process = program._process  # type: ignore[attr-defined]
            while not process.stdout._paused:  # noqa: ASYNC110 (asyncio has no event of it)
                await asyncio.sleep(0)
        assert process.returncode is not None
