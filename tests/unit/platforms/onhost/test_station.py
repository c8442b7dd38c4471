"""Hosts of a chain, here as processes at addresses of the loopback: what each gets, from whom, and what strangers get."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from lockstep.platforms.files.transfer import Carried, TransferProgress
from lockstep.platforms.hosts.chain import Chain, Stop
from lockstep.platforms.inpod.carry import draft_name
from lockstep.platforms.inpod.destination import Destination
from lockstep.platforms.inpod.wire import CarryError, Gone, Wire
from lockstep.platforms.onhost.station import Arrived, Inflow, Station, proved
from lockstep_spec.codec import ContractError
from support.process_place import ProcessPlace

STRANGERS_MAX = 16

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


def stops(tmp_path: Path, addresses: Mapping[str, str | None]) -> list[Stop]:
    place = ProcessPlace(python=(sys.executable,))
    return [Stop(host, place, f"{tmp_path}/{host}/x", (f"{tmp_path}/{host}",), address) for host, address in addresses.items()]


def chained(
    tmp_path: Path, source: Path, *, is_there: bool = False, addresses: Mapping[str, str | None] | None = None
) -> tuple[dict[str, Carried | Exception], dict[str, int], list[str]]:
    """What became of each host, the bytes that each got, and what was said."""
    every = addresses or {f"h{number}": f"127.0.0.{number + 1}" for number in range(3)}
    progress, said = {host: TransferProgress() for host in every}, list[str]()
    chain = Chain(stops(tmp_path, every), str(source), PORTS, progress, said.append, is_there=is_there)
    results = asyncio.run(chain.run())
    return results, {host: one.passed for host, one in progress.items()}, said


def test_every_host_gets_everything_once(tmp_path: Path, source: Path) -> None:
    results, passed, said = chained(tmp_path, source)
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file() and not path.is_symlink())
    assert results == dict.fromkeys(("h0", "h1", "h2"), Carried(files=102, sent=102, bytes=size, resumed=0)) and not said
    assert passed == dict.fromkeys(passed, size)
    for host in passed:
        assert contents(tmp_path / host / "x") == contents(source)
    results, passed, _ = chained(tmp_path, source)
    assert results == dict.fromkeys(passed, Carried(files=102, sent=0, bytes=0, resumed=0)) and set(passed.values()) == {0}


def test_a_host_that_has_more_than_the_one_before_it_gets_only_what_it_lacks(tmp_path: Path, source: Path) -> None:
    for host, size, name in (("h1", 3 << 20, draft_name("weights")), ("h2", len(CONTENT), "weights")):
        (tmp_path / host / "x").mkdir(parents=True)
        (tmp_path / host / "x" / name).write_bytes(CONTENT[:size])
    (tmp_path / "h2" / "x" / "run.sh").write_text("evil")  # as long, and another one
    results, passed, _ = chained(tmp_path, source)
    assert passed["h0"] - passed["h1"] == 3 << 20 and passed["h1"] - passed["h2"] == 2 << 20
    assert isinstance(results["h1"], Carried) and results["h1"].resumed == 1
    for host in results:
        assert contents(tmp_path / host / "x") == contents(source)


def test_a_path_of_the_first_host_goes_from_there(tmp_path: Path, source: Path) -> None:
    results, _, _ = chained(tmp_path, source, is_there=True)
    assert all(isinstance(result, Carried) and result.sent == 102 for result in results.values())
    assert [contents(tmp_path / host / "x") for host in results] == [contents(source)] * 3


def test_a_host_that_nobody_can_reach_another_way_is_sent_to_from_here(tmp_path: Path, source: Path) -> None:
    results, passed, said = chained(tmp_path, source, addresses={"h0": "192.0.2.1", "h1": None, "h2": "127.0.0.3"})
    assert (
        len(said) == 2 and "host h1 can't reach host h0 (192.0.2.1 port" in said[0] and said[0].endswith("its files go from this machine")
    )
    assert said[1].startswith("host h2 can't reach host h1 (its address is not known: state hosts[].address)")
    assert [contents(tmp_path / host / "x") for host in passed] == [contents(source)] * 3
    assert all(isinstance(result, Carried) for result in results.values())


def test_a_host_that_refuses_is_named_and_the_others_get_their_files(tmp_path: Path, source: Path) -> None:
    (tmp_path / "h1").mkdir()
    (tmp_path / "h1" / "x").write_text("a file where a folder must be")
    results, passed, _ = chained(tmp_path, source)
    assert isinstance(results["h1"], Exception) and "h1/x" in str(results["h1"])
    assert [contents(tmp_path / host / "x") for host in ("h0", "h2")] == [contents(source)] * 2
    assert passed["h0"] < 1.1 * len(CONTENT)


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
    giver, taker = ends(lambda one: proved(one, KEY, gives=True), lambda other: proved(other, b"x" * 32, gives=False))
    assert isinstance(giver, ContractError) and isinstance(taker, Gone)


def test_a_taker_doesnt_believe_a_giver_without_the_key() -> None:
    def liar(connection: socket.socket) -> None:
        wire = Wire(connection.fileno(), connection.fileno())
        wire.say({"nonce": "0"})
        wire.hear()
        wire.say({"proof": "I am who I am"})

    _, taker = ends(liar, lambda other: proved(other, KEY, gives=False))
    assert isinstance(taker, ContractError)


def test_a_line_that_was_not_signed_ends_the_copy() -> None:
    def liar(connection: socket.socket) -> None:
        proved(connection, KEY, gives=True).say({"ready": True})
        Wire(connection.fileno(), connection.fileno()).say({"says": {"sha256": "0"}})

    def taker(connection: socket.socket) -> object:
        wire = proved(connection, KEY, gives=False)
        assert wire.hear() == {"ready": True}
        return wire.hear()

    _, heard = ends(liar, taker)
    assert isinstance(heard, CarryError) and "has not signed" in str(heard)


def test_a_listener_turns_strangers_away_and_takes_the_one_with_the_key() -> None:
    mine, its = socket.socketpair()
    station = Station(Wire(its.fileno(), its.fileno()))
    home = Wire(mine.fileno(), mine.fileno())
    with mine, its:
        station._listen({"address": "127.0.0.1", "ports": PORTS}, KEY)
        address = ("127.0.0.1", home.hear()["listening"])
        with socket.create_connection(address) as silent, socket.create_connection(address) as wrong:
            with pytest.raises((ContractError, Gone)):
                proved(wrong, b"x" * 32, gives=False)
            with socket.create_connection(address) as right:
                proved(right, KEY, gives=False)
                silent.settimeout(5)
                with pytest.raises(OSError):
                    while True:
                        socket.create_connection(address, 1).close()


def test_threads_of_other_work_take_no_place_from_the_one_with_the_key() -> None:
    mine, its = socket.socketpair()
    home, over = Wire(mine.fileno(), mine.fileno()), threading.Event()
    others = [threading.Thread(target=over.wait, daemon=True) for _ in range(STRANGERS_MAX + 8)]
    for thread in others:
        thread.start()
    with mine, its:
        Station(Wire(its.fileno(), its.fileno()))._listen({"address": "127.0.0.1", "ports": PORTS}, KEY)
        with socket.create_connection(("127.0.0.1", home.hear()["listening"])) as right:
            proved(right, KEY, gives=False)
    over.set()


def test_what_a_disk_gives_back_altered_is_not_passed_on(tmp_path: Path) -> None:
    arrivals = Inflow()
    arrived = Arrived(arrivals, [{"name": "", "size": 1, "mode": 0o600}], "x", Destination(tmp_path, ("x",)))
    arrivals.named(0, "what it had when it came")
    mine, its = socket.socketpair()
    with mine, its:
        assert "is not what arrived there" in arrived.fault(0, "another", Wire(mine.fileno(), mine.fileno()))
        assert arrived.fault(0, "what it had when it came", Wire(mine.fileno(), mine.fileno())) == ""
