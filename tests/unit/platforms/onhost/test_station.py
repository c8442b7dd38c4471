"""Hosts of a copy to several, here as processes at addresses of the loopback: what each gets, from whom, and what strangers get."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from lockstep.api.errors import Failed
from lockstep.platforms.files.transfer import Carried, TransferProgress, wired
from lockstep.platforms.hosts import spread as spread_module
from lockstep.platforms.hosts.spread import Spread, Stop
from lockstep.platforms.inpod.carry import Stored, _give_file, draft_name
from lockstep.platforms.inpod.entries import hear_entries
from lockstep.platforms.onhost.station import give_on, listening, proved_wire
from lockstep_machine.wire import CarryError, Gone, Wire
from lockstep_spec.codec import ContractError
from support.process_place import ProcessPlace

KEY = bytes(32)
PORTS = list(range(29899, 29880, -1))
CONTENT = os.urandom(5 << 20)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    (folder / "parts").mkdir(parents=True)
    (folder / "weights").write_bytes(CONTENT)
    for number in range(100):
        (folder / "parts" / f"{number}").write_bytes(b"%d" % number * number)
    (folder / "newest").symlink_to("parts/99")
    (folder / "run.sh").write_text("true")
    (folder / "run.sh").chmod(0o755)
    return folder


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below the folder, where every link leads, and who can be executed."""
    return {
        str(path.relative_to(folder)): (
            str(path.readlink()) if path.is_symlink() else f"{hashlib.sha256(path.read_bytes()).hexdigest()} {os.access(path, os.X_OK)}"
        )
        for path in folder.rglob("*")
        if not path.is_dir()
    }


def spread(
    tmp_path: Path, source: Path, *, is_there: bool = False, addresses: Mapping[str, str | None] | None = None
) -> tuple[dict[str, Carried | Exception], dict[str, int], list[str]]:
    """What became of each host, the bytes that each got, and what was said."""
    every = addresses or {f"h{number}": f"127.0.0.{number + 1}" for number in range(3)}
    place, lines = ProcessPlace(python=(sys.executable,)), list[str]()
    stops = [
        Stop(host, place, f"{tmp_path}/{host}/x", [f"{tmp_path}/{host}"], address, TransferProgress()) for host, address in every.items()
    ]
    results = asyncio.run(Spread(stops, str(source), PORTS, lines.append, None, is_there=is_there).run())
    return results, {stop.host: stop.progress.passed for stop in stops}, lines


def test_every_host_gets_everything_once(tmp_path: Path, source: Path) -> None:
    results, passed, said = spread(tmp_path, source)
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file() and not path.is_symlink())
    assert results == dict.fromkeys(("h0", "h1", "h2"), Carried(files=102, sent=102, bytes=size, resumed=0)) and not said
    assert passed == dict.fromkeys(passed, size)
    for host in passed:
        assert contents(tmp_path / host / "x") == contents(source)
    results, passed, _ = spread(tmp_path, source)
    assert results == dict.fromkeys(passed, Carried(files=102, sent=0, bytes=0, resumed=0)) and set(passed.values()) == {0}


def test_one_host_alone_gets_everything_and_again_nothing(tmp_path: Path, source: Path) -> None:
    for sent in (102, 0):
        results, _, said = spread(tmp_path, source, addresses={"h0": None})
        assert isinstance(result := results["h0"], Carried) and result.sent == sent and not said
    assert contents(tmp_path / "h0" / "x") == contents(source)


def test_a_host_that_has_more_than_the_one_before_it_gets_only_what_it_lacks(tmp_path: Path, source: Path) -> None:
    for host, size, name in (("h1", 3 << 20, draft_name("weights")), ("h2", len(CONTENT), "weights")):
        (tmp_path / host / "x").mkdir(parents=True)
        (tmp_path / host / "x" / name).write_bytes(CONTENT[:size])
    (tmp_path / "h2" / "x" / "run.sh").write_text("evil")  # as long, and another one
    results, passed, _ = spread(tmp_path, source)
    assert passed["h0"] - passed["h1"] == 3 << 20 and passed["h1"] - passed["h2"] == 2 << 20
    assert isinstance(results["h1"], Carried) and results["h1"].resumed == 1
    for host in results:
        assert contents(tmp_path / host / "x") == contents(source)


def test_a_path_of_the_first_host_goes_from_there(tmp_path: Path, source: Path) -> None:
    results, _, _ = spread(tmp_path, source, is_there=True)
    assert all(isinstance(result, Carried) and result.sent == 102 for result in results.values())
    assert [contents(tmp_path / host / "x") for host in results] == [contents(source)] * 3


def test_a_host_that_nobody_can_reach_another_way_is_sent_to_from_here(tmp_path: Path, source: Path) -> None:
    results, passed, said = spread(tmp_path, source, addresses={"h0": "192.0.2.1", "h1": None, "h2": "127.0.0.3"})
    assert (
        len(said) == 2 and "host h1 can't reach host h0 (192.0.2.1 port" in said[0] and said[0].endswith("its files go from this machine")
    )
    assert said[1].startswith("host h2 can't reach host h1 (its address is not known: state hosts[].address)")
    assert [contents(tmp_path / host / "x") for host in passed] == [contents(source)] * 3
    assert all(isinstance(result, Carried) for result in results.values())


def test_a_host_that_refuses_is_named_and_the_others_get_their_files(tmp_path: Path, source: Path) -> None:
    (tmp_path / "h1").mkdir()
    (tmp_path / "h1" / "x").write_text("a file where a folder must be")
    results, passed, _ = spread(tmp_path, source)
    assert isinstance(results["h1"], Exception) and "h1/x" in str(results["h1"])
    assert [contents(tmp_path / host / "x") for host in ("h0", "h2")] == [contents(source)] * 2
    assert passed["h0"] < 1.1 * len(CONTENT)


def test_more_programs_than_threads_of_a_pool_are_talked_to_at_once() -> None:
    together = threading.Barrier(40, timeout=30)

    async def story() -> None:
        place = ProcessPlace(python=(sys.executable,))

        async def one() -> None:
            async with place.program(["cat"]) as program, wired(program) as end:
                await end.run(lambda _: together.wait())

        await asyncio.gather(*(one() for _ in range(40)))

    asyncio.run(story())


def test_a_host_that_says_what_is_no_answer_is_named(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = b"""print('{"port": null}\\n{"arrived": {"files": "all"}}', flush=True); input(); input()"""
    monkeypatch.setattr(spread_module, "source_of", lambda _: program)
    results, _, _ = spread(tmp_path, source, is_there=True, addresses={"h0": None})
    assert isinstance(results["h0"], Failed) and "does not follow the protocol of copies" in str(results["h0"])


def ends(left: Callable[[socket.socket], object], right: Callable[[socket.socket], object]) -> list[object]:
    """What both ends of a TCP connection return, or raise."""
    results: list[object] = [None, None]

    def run(number: int, end: Callable[[socket.socket], object], connection: socket.socket) -> None:
        try:
            results[number] = end(connection)
        except (CarryError, ContractError, Gone) as error:
            results[number] = error
            connection.shutdown(socket.SHUT_RDWR)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        threads = [threading.Thread(target=run, args=arguments) for arguments in ((0, left, one), (1, right, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def test_an_end_with_another_key_is_refused_before_anything_is_said() -> None:
    giver, taker = ends(lambda one: proved_wire(one, KEY, gives=True), lambda other: proved_wire(other, b"x" * 32, gives=False))
    assert isinstance(giver, ContractError) and isinstance(taker, Gone)


def test_a_taker_doesnt_believe_a_giver_without_the_key() -> None:
    def liar(connection: socket.socket) -> None:
        wire = Wire(connection.fileno(), connection.fileno())
        wire.say({"nonce": "0"})
        wire.hear()
        wire.say({"proof": "I am who I am"})

    _, taker = ends(liar, lambda other: proved_wire(other, KEY, gives=False))
    assert isinstance(taker, ContractError)


def test_a_line_that_was_not_signed_ends_the_copy() -> None:
    def liar(connection: socket.socket) -> None:
        proved_wire(connection, KEY, gives=True).say({"ready": True})
        Wire(connection.fileno(), connection.fileno()).say({"counter": 2, "message": {"sha256": "0"}})

    def taker(connection: socket.socket) -> object:
        wire = proved_wire(connection, KEY, gives=False)
        assert wire.hear() == {"ready": True}
        return wire.hear()

    _, heard = ends(liar, taker)
    assert isinstance(heard, CarryError) and "has not signed" in str(heard)


@contextmanager
def giving() -> Iterator[tuple[str, int]]:
    """Address of a host that gives an empty folder; its thread ends with this process."""
    listener, _ = listening("127.0.0.1", PORTS)
    assert listener is not None
    threading.Thread(target=give_on, args=(listener, KEY, Stored([{"name": "", "dir": True}], "x")), daemon=True).start()
    yield listener.getsockname()


def test_strangers_and_another_key_take_no_place_from_the_one_with_the_key() -> None:
    with giving() as address, ExitStack() as stack:
        for _ in range(14):
            stack.enter_context(socket.create_connection(address))
        wrong = stack.enter_context(socket.create_connection(address))
        with pytest.raises((ContractError, Gone)):
            proved_wire(wrong, b"x" * 32, gives=False)
        right = stack.enter_context(socket.create_connection(address))
        assert hear_entries(proved_wire(right, KEY, gives=False)) == ([{"name": "", "dir": True}], "x")


@pytest.mark.parametrize(("digest", "is_sent"), [("what it had when it came", False), (hashlib.sha256(b"altered").hexdigest(), True)])
def test_what_a_disk_gives_back_altered_is_not_passed_on(tmp_path: Path, digest: str, is_sent: bool) -> None:
    (tmp_path / "x").write_text("altered")
    entry, answers = {"size": 7, "path": str(tmp_path / "x"), "sha256": digest}, list[dict[str, str]]()
    wire = cast(Wire, SimpleNamespace(pass_on=lambda _: None, say=answers.append))
    with nullcontext() if is_sent else pytest.raises(CarryError, match="is bad: try again"):
        _give_file(wire, entry, 0, hashlib.sha256(), lambda _: None)
    assert [list(answer) for answer in answers] == [["sha256"] if is_sent else ["failed"]]
