"""What Lockstep asks of an API server and of login programs is bounded, and so is what it reads of them."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.api.errors import ConfigError
from lockstep.kube import expiry, forward, jobs, kubeconfig, loginprogram, reading
from lockstep.kube.cluster import Answers, ApiError, Cluster, _error
from lockstep.kube.exec import PodProgram, ending_of
from lockstep.kube.kubeconfig import Server
from lockstep.kube.loginprogram import LoginProgram
from support.fake_cluster import FakeCluster
from unit.kube.test_reading import Listing, Reply, deep, depth_of
from unit.virtual_time import VirtualClock, clock_of


class Ended(Reply):
    """A response whose stream is over."""

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in ():
            yield piece


class Recording:
    """A connection that notes how long each request may take, and how a stream is kept open."""

    def __init__(self) -> None:
        self.server = Server("https://cluster")
        self.limits: list[float | None] = []
        self.urls: list[str] = []

    async def request(self, method: str, url: str, body: object, headers: object, seconds: float | None) -> Reply:
        self.limits.append(seconds)
        self.urls.append(url)
        return Ended(b'{"metadata":{},"items":[]}')

    async def websocket(self, url: str, protocols: object, heartbeat: float | None) -> None:
        self.limits.append(heartbeat)


async def drained(lines: Any) -> None:
    async for _ in lines:
        pass


@pytest.mark.parametrize(
    ("ask", "seconds"),
    [
        (lambda cluster: cluster.request("GET", "/x"), 30),
        (lambda cluster: cluster.stream("/x", (), ()), 30.0),
        (lambda cluster: drained(cluster.watch("Pod", "ns", {})), 3600),
        (lambda cluster: drained(cluster.log_of("/x", {})), None),
    ],
    ids=["request", "ping", "watch", "log"],
)  # fmt: skip
def test_a_request_may_take_so_long(ask: Any, seconds: float | None) -> None:
    asyncio.run(ask(Cluster(connection := Recording())))  # type: ignore[arg-type]
    assert connection.limits == [seconds]


async def test_a_reply_that_is_not_read_gives_its_connection_back() -> None:
    released: list[str] = []

    class Unread(Recording):
        async def request(self, method: str, url: str, *_: object) -> Any:
            return SimpleNamespace(status=200, headers={}, release=lambda: released.append(url))

    assert await Cluster(Unread()).exists("Pod", "ns", "x")  # type: ignore[arg-type]
    assert released == ["/api/v1/namespaces/ns/pods/x"]


def test_lists_are_asked_for_by_pages_of_500() -> None:
    asyncio.run(drained(Cluster(connection := Recording()).pages("Pod")))  # type: ignore[arg-type]
    assert connection.urls[0].endswith("?limit=500")


async def test_a_log_without_an_end_of_line_comes_in_pieces_of_256_kibibytes() -> None:
    class Unbroken(Reply):
        async def iter_any(self) -> AsyncIterator[bytes]:
            yield b"x" * (600 << 10)

    async def answer(reply: Reply) -> Reply:
        return reply

    server = Listing([])
    server.request = lambda *_: answer(Unbroken(b""))  # type: ignore[assignment]
    assert [len(line) async for line in Cluster(server).log_of("/x", {})] == [256 << 10, 256 << 10, 88 << 10]


@pytest.mark.parametrize(("said", "seconds"), [("7", 7.0), ("86400", 60.0), ("soon", 0.0)])
def test_an_api_server_s_wish_for_patience_is_obeyed_for_a_minute(said: str, seconds: float) -> None:
    assert _error(429, b"{}", said).retry_after_seconds == seconds


@pytest.mark.parametrize(("silent", "is_outage"), [(14.0, False), (16.0, True)])
def test_fifteen_seconds_without_an_answer_are_an_outage(silent: float, is_outage: bool) -> None:
    now = [100.0]
    answers = Answers(lambda: now[0])
    answers.heard(200)
    now[0] += silent
    answers.heard(200)
    assert (answers.back_since == now[0]) == is_outage


def test_what_is_read_is_67_levels_deep_at_most() -> None:
    assert depth_of(reading.loads(deep(100).encode())) == 67


@pytest.mark.parametrize(("size", "is_refused"), [(8 << 20, False), ((8 << 20) + 1, True)])
def test_a_kubeconfig_has_at_most_eight_mebibytes(tmp_path: Path, size: int, is_refused: bool) -> None:
    (path := tmp_path / "config").write_bytes(b"a: b\n".ljust(size, b"\n"))
    with pytest.raises(ConfigError, match="more than 8 MiB") if is_refused else nullcontext():
        kubeconfig._loaded(path)


@pytest.mark.parametrize(("levels", "is_refused"), [(64, False), (65, True)])
def test_a_kubeconfig_is_nested_at_most_64_deep(tmp_path: Path, levels: int, is_refused: bool) -> None:
    with pytest.raises(ConfigError, match="more than 64 deep") if is_refused else nullcontext():
        kubeconfig._check_size("[" * levels + "]" * levels, tmp_path)


def test_a_login_program_that_opens_a_browser_has_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def run(command: object, timeout: float, **_: object) -> None:
        limits.append(timeout)
        raise subprocess.TimeoutExpired("x", timeout)

    made = LoginProgram.__new__(LoginProgram)
    made.stated, made._program, made._spec = {"apiVersion": "v1"}, lambda: "/bin/login", dict  # type: ignore[method-assign]
    monkeypatch.setattr(loginprogram.subprocess, "run", run)
    with pytest.raises(ConfigError, match="can't be run"):
        made._fetch()
    assert limits == [300.0]


def test_what_a_command_made_goes_two_minutes_after_it_was_killed_and_it_says_so_every_half_minute() -> None:
    clock, said, removed = VirtualClock(), list[int](), list[float]()

    class Kept(FakeCluster):
        async def request(self, method: str, path: str, body: Any, *_: object) -> None:
            said.append(body["spec"]["activeDeadlineSeconds"])

        async def delete(self, *_: object, **__: object) -> None:
            removed.append(clock.now)
            await asyncio.Event().wait()

    async def story() -> str:
        async with expiry.expiring(Kept().as_cluster, "ns", "n" * 100, "image") as owner:
            await asyncio.sleep(95)
        return str(cast(Any, owner)["name"])

    before = expiry.time
    expiry.time = cast(Any, clock)
    try:
        name = clock.run(story())
    finally:
        expiry.time = before
    assert said == [150, 180, 210] and clock.now - removed[0] == 10.0
    assert name.startswith("n" * 40 + "-expiry-")
    assert expiry.expiry_job("ns", "n", "i")["spec"]["activeDeadlineSeconds"] == 120


def test_what_is_written_to_a_pod_goes_in_frames_of_256_kibibytes() -> None:
    frames: list[int] = []

    async def send(data: bytes) -> None:
        frames.append(len(data) - 1)

    made = PodProgram.__new__(PodProgram)
    made._socket = SimpleNamespace(send_bytes=send)
    asyncio.run(made.write(bytes(600 << 10)))
    assert frames == [256 << 10, 256 << 10, 88 << 10]


def test_of_a_kubelet_s_words_2000_characters_are_repeated() -> None:
    async def socket() -> AsyncIterator[SimpleNamespace]:
        for data in (b"port", b"x" * 5000):
            yield SimpleNamespace(data=bytes([forward.ERROR]) + data)

    said: list[str] = []
    asyncio.run(forward._from_pod(socket(), cast(Any, None), said.append))
    assert [ending_of({"message": "x" * 5000})[1], *said] == ["x" * 2000] * 2


def test_the_end_of_a_forwarded_port_with_an_open_connection_is_no_error() -> None:
    """A browser keeps its connections open: Ctrl-C is the usual end of `lockstep tensorboard`."""
    problems: list[dict[str, Any]] = []

    class Silent:
        def __aiter__(self) -> Silent:
            return self

        async def __anext__(self) -> None:
            await asyncio.Event().wait()

        async def close(self) -> None:
            """As of a WebSocket."""

    class Opened:
        def __init__(self) -> None:
            self.streams = asyncio.Event()

        async def stream(self, *_: object) -> Silent:
            self.streams.set()
            return Silent()

    async def browse() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        cluster = Opened()
        async with forward.forwarded(cast(Any, cluster), "ns", "x-0", 6006, 0, lambda line: None) as port:
            _, writer = await asyncio.open_connection(forward.HERE, port)
            await cluster.streams.wait()
        writer.close()

    asyncio.run(browse())
    assert problems == []


def test_a_deleted_job_is_looked_for_five_times_a_second_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = clock_of(monkeypatch, jobs), list[str]()

    async def ask(*words: str) -> Any:
        asked.append(words[0])
        return {}

    with pytest.raises(TimeoutError, match="ns/x is still there 60 s after its deletion"):
        clock.run(jobs.delete_job(cast(Any, SimpleNamespace(get=ask, request=ask)), "ns", "x"))
    assert clock.now - 1000.0 == pytest.approx(60, abs=0.5)
    assert len(asked) == pytest.approx(60 * 5, abs=5)


def test_an_api_error_is_told_apart() -> None:
    assert isinstance(_error(500, b"x" * 5000, ""), ApiError) and len(_error(500, b"x" * 5000, "").message) == 500
