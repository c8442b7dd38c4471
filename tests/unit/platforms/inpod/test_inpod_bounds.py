"""Limits of the programs in pods and on hosts: how long each waits, how often it looks, and how much it takes."""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.platforms.inpod import drill, editor, gate, netrate, rankload, rankstacks, synced
from lockstep.platforms.inpod.entries import is_plain
from lockstep_machine import wire as protocol
from lockstep_machine.processes import ProcessState
from lockstep_machine.wire import CarryError, Gone, Wire
from unit.virtual_time import VirtualClock, clock_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The clock of every program here, too."""
    return clock_of(monkeypatch, drill, netrate, protocol, rankstacks)


@pytest.fixture
def wire() -> Iterator[Wire]:
    own, other = socket.socketpair()
    with own, other:
        yield Wire(own.fileno(), own.fileno())


def test_an_end_that_works_says_so_after_five_seconds(clock: VirtualClock, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(wire, "_write", sent.append)
    for seconds, messages in ((4.9, 0), (0.2, 1)):
        clock.sleep(seconds)
        wire.busy()
        assert len(sent) == messages


def test_an_end_that_says_nothing_for_a_minute_is_gone(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(select, "poll", lambda: SimpleNamespace(register=lambda *_: None, poll=waits.append))
    with pytest.raises(Gone, match="nothing heard for 60 s"):
        wire.hear()
    with pytest.raises(Gone, match="nothing was taken for 60 s"):
        while True:  # (until there is no room)
            wire.say({})
    assert waits == [60_000, 60_000]


def test_an_end_is_busy_a_hundred_thousand_times_at_most(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = iter([{"busy": True}] * 100_000 + [{"x": 1}])
    monkeypatch.setattr(wire, "_object", lambda: next(messages))
    with pytest.raises(CarryError, match="only reports that it is busy"):
        wire.hear()


def test_a_line_without_an_end_is_read_no_further_than_a_mebibyte(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(protocol, "_ready", lambda *_: True)
    monkeypatch.setattr("os.read", lambda _, size: (sizes.append(size >> 4), b"x" * (size >> 4))[1])
    with pytest.raises(CarryError, match="a line is longer than 1048576 bytes"):
        wire.hear()
    assert 1 << 20 <= sum(sizes) <= (1 << 20) + (1 << 17)


def test_a_long_list_goes_in_lines_of_half_a_mebibyte(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[bytes] = []
    monkeypatch.setattr(wire, "_write", lines.append)
    wire.say_all("x", ["a" * 1022] * 2048)
    assert len(lines) == 5 and len(lines[0]) == pytest.approx(1 << 19, rel=0.01)


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [("/".join("d" * 200), True), ("/".join("d" * 201), False), ("x" * 4096, True), ("x" * 4097, False)],
    ids=["200 parts", "201 parts", "4096 bytes", "4097 bytes"],
)
def test_a_name_has_at_most_200_parts_and_4096_bytes(name: str, is_taken: bool) -> None:
    assert is_plain(name) is is_taken


def test_ranks_are_watched_twenty_times_a_second(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    monkeypatch.setattr(drill, "_command", lambda: SimpleNamespace(is_gone=False))
    monkeypatch.setattr(drill, "processes", lambda: looks.append(clock.now) or [])
    drill.watch(1, 1.0)
    assert len(looks) == pytest.approx(20, abs=1)


def test_a_browser_s_request_has_30_seconds_and_no_line_of_more_than_64_kibibytes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=ours.sendall, args=(b"GET /" + b"x" * (1 << 16),), daemon=True).start()
        gate.Guard(theirs, ("127.0.0.1", 0), cast(Any, None))
        assert (theirs.gettimeout(), ours.recv(64).split()[1]) == (30.0, b"414")


def test_a_program_of_vscode_has_four_seconds_to_end(clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(timeout: float) -> None:
        clock.sleep(timeout)
        raise subprocess.TimeoutExpired("x", timeout)

    (tmp_path / "code.json").write_text(
        json.dumps({"token": "t", "kind": "vscode", "name": "n", "socket": str(tmp_path / "none"), "command": []})
    )
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: SimpleNamespace(poll=lambda: 3, wait=wait))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    begun = clock.now
    with pytest.raises(SystemExit):
        editor.serve_guarded(str(tmp_path / "code.json"))
    assert clock.now - begun == 4


def test_64_knocks_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    go, threads = threading.Event(), list[int]()

    def targets() -> Iterator[list[str | int]]:
        before = threading.active_count()
        yield from [["10.0.0.1", 1]] * 100
        threads.append(threading.active_count() - before)
        go.set()

    monkeypatch.setattr(netrate, "_why_no_answer", lambda *_: "" if go.wait(20) else "late")
    assert netrate.knock("11" * 32, "10.0.0.2", cast(Any, targets()), 3.0) == {"reasons": [""] * 100}
    assert threads == [64]


def test_a_knock_with_the_token_of_32_bytes_is_answered_with_a_proof() -> None:
    ours, theirs = socket.socketpair()
    listening = netrate.Receiver()
    listening.token = bytes(range(32))
    with ours:
        ours.sendall(listening.token + netrate.HEADER.pack(bytes(16), 0, 0, 0.0))
        ours.shutdown(socket.SHUT_WR)
        listening._serve(theirs)
        assert ours.recv(100) == hmac.digest(listening.token, bytes(16), "sha256")


def test_a_stream_is_sent_in_blocks_of_8_mebibytes(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[int] = []

    def sendfile(to: int, file: int, offset: int, size: int) -> None:
        blocks.append(min(size, os.fstat(file).st_size - offset))
        clock.sleep(1)

    monkeypatch.setattr(os, "sendfile", sendfile)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"9.5\n")
        assert netrate._fill(ours, clock.now + 3) == b"9.5"
    assert blocks == [8 << 20] * 3


def test_a_server_of_perftest_that_runs_after_a_second_is_ready(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    def communicate(timeout: float) -> None:
        clock.sleep(timeout)
        raise subprocess.TimeoutExpired("x", timeout)

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: SimpleNamespace(communicate=communicate))
    begun = clock.now
    assert netrate.Perftest().serve("mlx5_0", 1, 1, None, 5.0) == {"ready": True}
    assert clock.now - begun == 1


def test_a_program_that_measures_ends_when_it_is_asked_nothing_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(select, "select", lambda reads, writes, errors, timeout: limits.append(timeout) or ([], [], []))
    rankload.answer_questions(dict)
    assert limits == [60.0]


@pytest.mark.parametrize(
    ("said", "seconds", "size"), [(b"", 3.0, 0), (b"x", 0.14, 1), (b"x" * (1 << 20), 0.14, 256 << 10)], ids=["nothing", "little", "much"]
)
def test_a_rank_has_three_seconds_to_answer_256_kibibytes_and_is_looked_at_fifty_times_a_second(
    said: bytes, seconds: float, size: int, clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    memory = tmp_path / "stacks"
    memory.touch()
    rank = {"rank": 0, "attempt": 1, "node": 0, "pid": 1, "leads": True, "asked": (str(memory), 40), "worldSize": 1, "ranksPerNode": 1}
    monkeypatch.setattr(
        rankstacks, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=lambda nap: naps.append(nap) or clock.sleep(nap))
    )
    monkeypatch.setattr(rankstacks, "rank_processes_of", lambda _: [rank])
    monkeypatch.setattr(rankstacks, "process_state", lambda _: ProcessState("S"))
    monkeypatch.setattr(os, "kill", lambda *_: memory.write_bytes(said))
    (answer,) = rankstacks.look()["ranks"]
    assert sum(map(len, answer["lines"])) == size
    assert sum(naps) == pytest.approx(seconds, abs=0.03) and len(naps) == pytest.approx(50 * seconds, abs=2)


@pytest.mark.parametrize(("seconds", "names"), [(1.9, []), (2.1, ["x"])])
def test_a_file_that_was_changed_in_the_last_two_seconds_is_read_again(
    seconds: float, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("x")
    monkeypatch.setattr(synced, "time", VirtualClock((tmp_path / "x").stat().st_ctime + seconds))
    digests = synced.Digests(tmp_path)
    digests.of("x")
    digests.remember()
    assert list(synced.read_json(tmp_path / ".lockstep/sync-seen.json")) == names
