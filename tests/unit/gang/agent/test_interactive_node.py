"""One node of a dev environment: whether somebody works there, and output that comes faster than it can be passed on."""

from __future__ import annotations

import asyncio
import ctypes
import json
import operator
import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep_gang.agent.interactive import DevNode, PrintedLines
from lockstep_gang.agent.ranks.script import look
from lockstep_gang.agent.session import client
from lockstep_gang.agent.session.activity import ShellActivity
from lockstep_gang.agent.session.requests import RequestSocket
from lockstep_gang.contract.interactive import Find
from unit.virtual_time import VirtualClock

BUNDLE_CHARACTERS = 128 * 1024
WAITING_CHARACTERS = 2 * 1024 * 1024

PTS_3 = 136 << 8 | 3


class Pod:
    """Folders as /proc and /dev/pts are in a pod."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.terminals = folder / "proc", folder / "pts"
        self.terminals.mkdir()
        self.process(os.getpid(), seconds=1000)
        self.activity = ShellActivity(self.proc, self.terminals)
        self.activity.was_used(1000.0)

    def process(self, pid: int, parent: int = 1, terminal: int = 0, seconds: float = 0.0) -> None:
        (self.proc / str(pid)).mkdir(parents=True, exist_ok=True)
        ticks = int(seconds * os.sysconf("SC_CLK_TCK"))
        fields = ["S", parent, pid, pid, terminal, *([0] * 6), ticks, 0, 0, 0]
        (self.proc / str(pid) / "stat").write_text(f"{pid} (a) b) {' '.join(map(str, fields))}\n")

    def terminal(self, used_at: float) -> None:
        (self.terminals / "3").touch()
        os.utime(self.terminals / "3", (used_at, used_at))


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_a_pod_with_nobody_in_it_is_not_used_whatever_its_agent_does(pod: Pod) -> None:
    pod.process(os.getpid(), seconds=2000)
    assert not pod.activity.was_used(1015.0)


def test_a_shell_is_use_when_it_comes_and_when_something_is_typed_but_not_while_it_stands_open(pod: Pod) -> None:
    pod.terminal(used_at=900.0)
    pod.process(70, parent=0, terminal=PTS_3)
    assert pod.activity.was_used(1015.0)
    assert not pod.activity.was_used(1030.0)
    pod.terminal(used_at=1040.0)
    assert pod.activity.was_used(1045.0)
    assert not pod.activity.was_used(1060.0)


def test_a_program_that_computes_is_use_and_a_server_that_waits_is_not(pod: Pod) -> None:
    pod.process(80, seconds=0.1)
    assert not pod.activity.was_used(1015.0)
    pod.process(80, seconds=0.2)
    assert not pod.activity.was_used(1030.0)
    pod.process(80, seconds=10.0)
    assert pod.activity.was_used(1045.0)


class Line:
    """A connection that takes so much, and what was sent over it."""

    def __init__(self) -> None:
        self.has_room = True
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_lines_come_in_order_and_in_small_messages() -> None:
    link = Line()
    printed = PrintedLines(link, 1)  # type: ignore[arg-type]
    printed.begin(4)
    lines = [f"{number} {'x' * 1000}" for number in range(500)]
    for line in lines:
        printed.add(line)
    printed.flush()
    assert [line for message in link.sent for line in message.lines] == lines
    assert all(sum(map(len, message.lines)) <= BUNDLE_CHARACTERS for message in link.sent)
    assert {message.attempt for message in link.sent} == {4}


def test_what_nobody_takes_is_counted_and_not_kept() -> None:
    link = Line()
    link.has_room = False
    printed = PrintedLines(link, 1)  # type: ignore[arg-type]
    printed.begin(1)
    for _ in range(WAITING_CHARACTERS // 1000 + 100):
        printed.add("x" * 999)
    link.has_room = True
    printed.flush()
    lines = [line for message in link.sent for line in message.lines]
    assert "lines of node 1 left out" in lines[-1]
    assert sum(map(len, lines)) < WAITING_CHARACTERS + 10_000


def test_a_script_that_is_here_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = look(Find("1", ("a.py",), str(tmp_path)), 0)
    (tmp_path / "a.py").write_text("2")
    assert first.problem == ""
    assert look(Find("1", ("a.py",), str(tmp_path)), 0).digest != first.digest
    assert "has no folder /nowhere" in look(Find("1", ("a.py",), "/nowhere"), 2).problem


def test_whoever_waits_for_a_script_hears_of_the_silence_until_a_rank_has_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "QUIET_SECONDS", 0.05)
    here, agent = socket.socketpair()
    lines = ["[lockstep] all 2 ranks run", "[rank 0] here", None]

    def answer() -> None:
        agent.recv(65536)
        for line in lines:
            time.sleep(0.2)
            found = {"exitCode": 0, "message": ""} if line is None else {"lines": [line]}
            agent.sendall(json.dumps(found).encode() + b"\n")

    patience: list[float | None] = []

    class Watched(client.Conversation):
        def _answers(self, seconds: float | None) -> list[dict[str, Any]]:
            patience.append(seconds)
            return super()._answers(seconds)

    previous = signal.getsignal(signal.SIGINT)
    speaker = threading.Thread(target=answer)
    speaker.start()
    try:
        with here, agent:
            assert Watched(here, until_eof=False).hold({"verb": "run"}) == 0
            speaker.join()
    finally:
        signal.signal(signal.SIGINT, previous)
    printed = capsys.readouterr()
    assert printed.out.splitlines() == lines[:2]
    assert printed.err.startswith("[lockstep] no rank has printed anything for 0 s: importing torch")
    assert (patience[0], patience[-1]) == (0.05, None), "not once a rank has printed"


async def test_what_scripts_print_goes_on_ten_times_a_second(clock: VirtualClock) -> None:
    flushed: list[float] = []
    made = DevNode.__new__(DevNode)
    made.printed = cast(Any, SimpleNamespace(flush=lambda: flushed.append(clock.now)))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.05):
            await made._flush_often()
    assert len(flushed) == 10


@pytest.mark.parametrize(("size", "code"), [(1 << 20, 0), ((1 << 20) + 1, 2)])
def test_a_request_is_a_line_of_at_most_a_mebibyte(tmp_path: Path, size: int, code: int) -> None:
    path = tmp_path / "agent.sock"

    def ask() -> Any:
        with socket.socket(socket.AF_UNIX) as here:
            here.connect(str(path))
            here.sendall(b'{"verb": "env"}'.ljust(size) + b"\n")
            with here.makefile() as answer:
                return json.loads(answer.readline())

    async def story() -> Any:
        requests = RequestSocket(path, "node 0", lambda _: None, dict)
        await requests.start()
        try:
            return await asyncio.to_thread(ask)
        finally:
            requests.close()

    assert asyncio.run(story())["exitCode"] == code


def test_a_ctrl_c_just_before_the_client_waits_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes between Python's last look at signals and the system call: no Python code runs in between here, either."""
    ours, agents_end = socket.socketpair()
    agents_end.settimeout(5)
    select_now, interrupts = select.select, [partial(ctypes.CDLL(None)["raise"], int(signal.SIGINT))]
    heard: list[Any] = []

    def select_late(*words: Any) -> Any:
        return list(map(operator.call, [*(interrupts.pop() for _ in interrupts[:1]), partial(select_now, *words)]))[-1]

    def agent() -> None:
        with agents_end, suppress(TimeoutError):
            for line in agents_end.makefile():
                heard.append(json.loads(line))
                if "interrupt" in heard[-1]:
                    agents_end.sendall(b'{"exitCode": 130, "message": ""}\n')
                    return

    monkeypatch.setattr(client, "select", SimpleNamespace(select=select_late))
    monkeypatch.setattr(client, "_connect", lambda path: ours)
    before = signal.getsignal(signal.SIGINT)
    answering = threading.Thread(target=agent)
    answering.start()
    try:
        assert client.main(["stop"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(signal.set_wakeup_fd(-1))
        answering.join()
    assert [one.get("verb") for one in heard] == ["stop", None]
