"""So long programs on a host wait, and so much they read, take and tell: of others' files, of what comes, and of what fails there."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.platforms.hosts.place import beginning
from lockstep.platforms.onhost import condition, gputest, install, keep, look, marks, relay, starter, station
from unit.virtual_time import VirtualClock, clock_of

MEBIBYTE = 1 << 20


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The clock of every program here."""
    return clock_of(monkeypatch, install, keep, now=0.0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "lockstep").mkdir()
    return tmp_path


def test_files_that_sshd_includes_are_read_three_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(condition, "file_words", lambda path: read.append(path) or "Include more")
    monkeypatch.setattr(condition, "paths", lambda pattern: [pattern])
    condition.sshd()
    assert len(read) == 1 + 3


def test_a_setup_waits_ten_seconds_for_another_one(home: Path, clock: VirtualClock) -> None:
    later = install.exclusive()
    with install.exclusive(), pytest.raises(install.NotMade, match="another setup of yours runs there"):
        later.__enter__()
    later.__exit__()
    assert clock.now == pytest.approx(10.0, abs=0.2)


def test_of_a_step_that_fails_the_last_1500_characters_are_told(home: Path) -> None:
    with pytest.raises(install.NotMade) as raised:
        install.run(["sh", "-c", "printf '%05000d' 0; exit 1"], {})
    assert str(raised.value) == "sh -c failed: " + "0" * 1500


def test_an_agent_that_ends_by_a_fault_is_started_again_after_two_seconds(
    home: Path, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock
) -> None:
    (home / "lockstep/jobs/x").mkdir(parents=True)
    monkeypatch.chdir(home)
    starts, opened = list[float](), set[int]()

    def agent(*_: object, **__: object) -> Any:
        starts.append(clock.now)
        return SimpleNamespace(wait=lambda: 9 if len(starts) < 4 else 0)

    monkeypatch.setattr(subprocess, "Popen", agent)
    for name, stub in (
        ("fork", lambda: 0),
        ("setsid", lambda: None),
        ("dup2", lambda source, _: opened.add(source)),
        ("pipe", lambda: (0, os.open(os.devnull, 1))),
    ):
        monkeypatch.setattr(os, name, stub)
    for name in ("signal", "pthread_sigmask"):
        monkeypatch.setattr(signal, name, lambda *_: None)
    monkeypatch.setattr(os, "_exit", lambda _: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        keep.supervise("x", ["agent"], {})
    for descriptor in opened:
        os.close(descriptor)
    assert starts == [0.0, 2.0, 4.0, 6.0]


def test_a_host_that_lost_its_connection_looks_for_the_coordinator_for_twenty_seconds(
    monkeypatch: pytest.MonkeyPatch, clock: VirtualClock
) -> None:
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert not keep.is_heard("10.0.0.1", 29400)
    assert clock.now == pytest.approx(20.0, abs=0.5)


def refuse(*_: object, **__: object) -> Any:
    raise TimeoutError


def test_a_look_tells_of_at_most_256_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = SimpleNamespace(glob=lambda _: [Path(f"j{number}") for number in range(300)])
    for name, stub in (("state_folder", lambda: folders), ("units", lambda _: {}), ("job", lambda *_: {})):
        monkeypatch.setattr(look, name, stub)
    assert len(look.jobs("~/ws", "")) == 256


def test_of_a_job_s_attempts_the_last_4000_are_read(tmp_path: Path) -> None:
    (tmp_path / "gang").mkdir()
    (tmp_path / "gang/attempts.jsonl").write_text("".join(f'{{"attempt": {number}}}\n' for number in (9999, *range(4000))))
    assert look.highest_attempt(tmp_path) == 3999


@pytest.mark.parametrize(
    ("text", "lines"),
    [("".join(f"{number}\n" for number in range(100)), [str(number) for number in range(80, 100)]), ("x" * MEBIBYTE, ["x" * (16 << 10)])],
    ids=["lines", "bytes"],
)
def test_of_an_agent_s_log_the_last_20_lines_are_told_and_no_more_than_16_kibibytes(tmp_path: Path, text: str, lines: list[str]) -> None:
    (tmp_path / "agent.log").write_text(text)
    assert look.last_lines(tmp_path / "agent.log") == lines


def test_a_mark_that_a_power_cut_left_goes_after_an_hour(tmp_path: Path) -> None:
    for name, age in (("young", 3500.0), ("old", 3700.0)):
        (tmp_path / f"{marks.MARK}{name}").touch()
        os.utime(tmp_path / f"{marks.MARK}{name}", (time.time() - age,) * 2)
    marks.forget_old(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{marks.MARK}young"]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[relay.Terminal]:
    """A terminal that has shown much already."""
    (tmp_path / "shown").write_bytes(bytes(MEBIBYTE))
    with (tmp_path / "shown").open("rb") as file:
        yield relay.Terminal(file.fileno())


def test_a_frame_has_at_most_a_mebibyte(terminal: relay.Terminal) -> None:
    terminal.take(relay.HEADER.pack(relay.DATA, MEBIBYTE) + bytes(MEBIBYTE))
    assert len(terminal.typed) == MEBIBYTE
    with pytest.raises(ValueError, match="not a frame"):
        terminal.take(relay.HEADER.pack(relay.DATA, MEBIBYTE + 1))


def test_what_a_terminal_shows_is_passed_on_by_64_kibibytes(terminal: relay.Terminal) -> None:
    assert terminal.shown() == bytes(64 << 10)


def test_a_program_that_goes_on_when_it_is_told_to_end_is_killed_after_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, signals = VirtualClock(0.0), list[tuple[float, int]]()

    class Poller:
        def register(self, *_: object) -> None:
            """Report that standard output was closed."""

        unregister = register

        def poll(self, milliseconds: int | None) -> list[tuple[int, int]]:
            clock.sleep((milliseconds or 0) / 1000)
            return [] if milliseconds else [(1, 0)]

    monkeypatch.setattr(starter.select, "poll", Poller)
    monkeypatch.setattr(starter, "end", lambda _, number: signals.append((clock.now, number)))
    monkeypatch.setattr(os, "waitpid", lambda *_: (7, 9) if len(signals) == 2 else (0, 0))
    assert starter.wait_for(7, 3) == 128 + 9
    assert signals == [(0.0, signal.SIGTERM), (5.0, signal.SIGKILL)]


def test_a_host_that_another_one_can_t_reach_is_given_up_after_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", refuse)
    lines: list[dict[str, object]] = []
    request = {"key": "00" * 32, "from": ["10.0.0.2", 29400], "address": None, "ports": []}
    station.take_and_give(cast(Any, SimpleNamespace(hear=lambda: request, say=lines.append)))
    assert lines[1:] == [{"unreachable": "no answer in 5 s"}]


def test_pythons_from_3_10_to_3_19_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for minor in range(5, 30):
        (tmp_path / f"python3.{minor}").touch(0o755)
    (tmp_path / "python3").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(install, "output", lambda path, *_, **__: f"CPython {Path(path).name[6:]} True 0 True")
    assert install.pythons() == [
        ("3", str(tmp_path / "python3")),
        *((f"3.{minor}", str(tmp_path / f"python3.{minor}")) for minor in range(10, 20)),
    ]


def test_a_gpu_s_speed_is_that_of_twenty_products_of_4096_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, products = VirtualClock(), list[int]()

    class Matrix:
        def __init__(self, size: int) -> None:
            self.size = size

        def __matmul__(self, other: Matrix) -> Matrix:
            products.append(self.size)
            clock.now += 0.01
            return self

        def __getitem__(self, _: object) -> float:
            return float(self.size)

    device = SimpleNamespace(get_device_name=lambda _: "GPU", get_device_capability=lambda _: (9, 0), synchronize=lambda _: None)
    torch = SimpleNamespace(cuda=device, bfloat16="torch.bfloat16", ones=lambda rows, columns, **_: Matrix(rows))
    monkeypatch.setattr(gputest, "time", clock)
    answer = gputest.measured(torch, 0)
    assert products == [4096] * 21  # one of them to begin with
    assert answer["seconds"] == pytest.approx(0.01) and answer["teraflops"] == pytest.approx(2 * 4096**3 / 0.01 / 1e12)


def test_the_length_of_what_a_host_is_to_start_comes_in_ten_digits() -> None:
    digits, head = re.findall(rb"([0-9]+)(\{.*)", beginning(["true"], []))[-1]
    assert (len(digits), int(digits)) == (10, len(head))
