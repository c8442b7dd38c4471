"""The token of a launch: its file, its proof, and what somebody without it learns."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from lockstep.api.errors import ConfigError
from lockstep.platforms.local.joined import token
from lockstep.platforms.local.joined.channel import WrongToken, accept, connect
from lockstep.platforms.local.joined.token import LaunchToken, default_file, new_token, read_file, token_of_launch, token_to_join
from lockstep_gang.contract.channel import Channel, listen
from lockstep_gang.contract.proof import parse_key
from lockstep_spec.codec import ContractError
from unit.virtual_time import VirtualClock


def test_tokens_differ_and_are_not_shown_where_objects_are() -> None:
    one, two = new_token(), new_token()
    assert one != two
    assert one.text not in repr(one)


def test_the_job_s_key_is_of_one_token_and_one_launch() -> None:
    token = new_token()
    keys = {token.job_key("uid-1"), token.job_key("uid-2"), new_token().job_key("uid-1"), token.key.hex()}
    assert len(keys) == 4
    assert len(parse_key(token.job_key("uid-1"))) == 32


@pytest.mark.parametrize("text", ["", "hunter2", "AAAA-" * 7 + "AAAA", "-".join(["aaaa"] * 9)])
def test_what_could_be_guessed_is_no_token(text: str) -> None:
    with pytest.raises(ConfigError, match="this is no token"):
        LaunchToken(text)


def test_a_launch_makes_the_file_for_its_owner_alone_and_an_interrupted_one_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "lockstep/launch/x.token"
    token, is_new = token_of_launch(path)
    assert is_new
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert token_of_launch(path) == (token, False)
    assert [one.name for one in path.parent.iterdir()] == ["x.token"]


def test_launches_of_one_job_at_two_places_have_two_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_file("x", 1) != default_file("x", 2)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_is_refused_with_what_to_do(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(new_token().text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"others may read or write .* \(mode {mode:04o}\), .*: chmod 600 {path}"):
        read_file(path)


def test_a_folder_and_another_user_s_file_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "token"
    target.write_text(new_token().text)
    target.chmod(0o600)
    with pytest.raises(ConfigError, match="is no regular file"):
        read_file(tmp_path)
    if os.geteuid() == 0:
        os.chown(target, 1234, 1234)
        with pytest.raises(ConfigError, match="belongs to another user"):
            read_file(target)


def test_a_file_without_a_token_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("something")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{path}: this is no token"):
        token_of_launch(path)


@pytest.mark.parametrize("size", [4096, 4097])
def test_of_a_token_s_file_4_kibibytes_are_read(tmp_path: Path, size: int) -> None:
    (path := tmp_path / "token").touch(0o600)
    path.write_text((token := new_token()).text.rjust(size))
    with nullcontext() if size == 4096 else pytest.raises(ConfigError, match="this is no token"):
        assert read_file(path) == token


def test_a_joiner_waits_for_the_file_as_long_as_it_may(tmp_path: Path) -> None:
    path, said = tmp_path / "token", list[str]()
    with pytest.raises(ConfigError, match=r"there is no file .*: copy it from the machine of lockstep launch"):
        token_to_join(path)

    def write() -> None:
        while not said:
            time.sleep(0.01)
        token_of_launch(path)

    writer = threading.Thread(target=write)
    writer.start()
    token = token_to_join(path, 60.0, say=said.append)
    writer.join()
    assert token == read_file(path)
    assert said == [f"lockstep: waiting for {path}, which lockstep launch writes"]


class Door:
    """A launch's end of connections, in a test's event loop. `other`: who answers in its place."""

    def __init__(
        self, token: LaunchToken, other: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None
    ) -> None:
        self.token, self.other = token, other
        self.channels: asyncio.Queue[Channel | Exception] = asyncio.Queue()
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> tuple[str, int]:
        self.server = await listen(self._take, "127.0.0.1", 0)
        return "127.0.0.1", self.server.sockets[0].getsockname()[1]

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            if self.other is not None:
                await self.other(reader, writer)
            else:
                self.channels.put_nowait(await accept((reader, writer), self.token))
        except (ContractError, EOFError) as error:
            self.channels.put_nowait(error)
            writer.close()


async def test_both_sides_with_the_token_talk() -> None:
    token = new_token()
    door = Door(token)
    async with door as address:
        joiner = await connect(address, token)
        launch = await door.channels.get()
        assert isinstance(launch, Channel)
        joiner.send({"name": "x" * 100_000})
        assert (await launch.receive())["name"] == "x" * 100_000
        launch.send({"kind": "waiting", "present": 1})
        assert await joiner.receive() == {"kind": "waiting", "present": 1}
        joiner.close()
        launch.close()


async def test_a_joiner_with_another_token_is_told_so() -> None:
    door = Door(new_token())
    async with door as address:
        with pytest.raises(WrongToken, match="has another token: give the one that it has shown"):
            await connect(address, new_token())
        assert "another token" in str(await door.channels.get())


ANSWERS = [{}, {"proof": "0" * 64}, {"nonce": "a", "proof": "0" * 64}, {"nonce": 5, "proof": 7}, {"nonce": "a", "proof": ""}]


async def test_whoever_has_no_token_gets_the_same_answer_whatever_was_wrong_and_no_proof() -> None:
    async def answer_to(address: tuple[str, int], message: dict[str, object]) -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        challenge = json.loads(await reader.readline())
        assert challenge.keys() == {"format", "nonce"}
        writer.write(json.dumps(message).encode() + b"\n")
        answer = await reader.read()
        writer.close()
        return answer

    async with Door(new_token()) as address:
        answers = {await answer_to(address, message) for message in ANSWERS}
    assert answers == {b'{"refused": "token"}\n'}


async def test_something_else_on_the_port_is_named() -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"format": "lockstep-launch/3", "nonce": "n"}\n')

    async with Door(new_token(), other) as address:
        with pytest.raises(ConfigError, match=r"speaks 'lockstep-launch/3', and this lockstep lockstep-launch/2: .*same version"):
            await connect(address, new_token())


def test_a_file_that_comes_later_is_looked_for_twice_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = VirtualClock(), list[float]()

    def read(path: Path) -> str:
        looks.append(clock.now - 1000.0)
        if len(looks) < 4:
            raise FileNotFoundError
        return "the token"

    monkeypatch.setattr(token, "time", clock)
    monkeypatch.setattr(token, "read_file", read)
    assert token._waited_for(tmp_path, 10.0, lambda line: None) == "the token"
    assert looks == [0, 0.5, 1.0, 1.5]
