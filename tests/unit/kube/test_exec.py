"""A program in a pod: what it prints, how it ends, what is refused before there is one, and what is said of each."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import WSMessage, WSMsgType

from lockstep.kube.cluster import ApiError
from lockstep.kube.exec import STATUS, STDIN, V4, V5, NotRunning, PodPlace, ending_of, refused
from lockstep.platforms.jobs.terminal import shell_command
from lockstep.programs import STDERR, STDOUT, Broken, NotStarted, ProgramFailed, output_of, python_program

SUCCESS = {"status": "Success"}


def failure(code: int) -> dict[str, Any]:
    return {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]}}


class Played:
    """A websocket and the cluster that opens it: frames come from it, in turn, and then its end."""

    def __init__(self, *frames: tuple[int, bytes], status: dict[str, Any] | None = None, protocol: str = V5, hangs: bool = False) -> None:
        self.protocol, self.hangs = protocol, hangs
        self.frames = [*frames, *([] if status is None else [(STATUS, json.dumps(status).encode())])]
        self.sent: list[bytes] = []
        self.asked: list[tuple[str, Sequence[tuple[str, str]], float | None]] = []
        self.refusal: ApiError | None = None
        self.broken = False

    async def stream(self, path: str, query: Sequence[tuple[str, str]], protocols: Sequence[str], *, heartbeat: float | None) -> Any:
        self.asked.append((path, query, heartbeat))
        if self.refusal is not None:
            raise self.refusal
        return self

    async def send_bytes(self, data: bytes) -> None:
        if self.broken:
            raise ConnectionResetError("Cannot write to closing transport")
        self.sent.append(data)

    def __aiter__(self) -> Played:
        return self

    async def __anext__(self) -> WSMessage:
        if self.frames:
            channel, data = self.frames.pop(0)
            return WSMessage(WSMsgType.BINARY, bytes([channel]) + data, None)
        if self.hangs:
            await asyncio.Event().wait()
        raise StopAsyncIteration

    async def close(self) -> None:
        pass


def pod(played: Any) -> PodPlace:
    return PodPlace(played, "n", "x-0", "trainer")


def output(played: Any, **options: Any) -> bytes:
    return asyncio.run(output_of(pod(played), ["python3", "-c", "1"], **options))


def printed(played: Any) -> list[tuple[int, bytes]]:
    async def all_of_it() -> list[tuple[int, bytes]]:
        async with pod(played).program(["sh"]) as running:
            return [frame async for frame in running.output()]

    return asyncio.run(all_of_it())


def test_what_it_prints_is_one_piece_whatever_the_frames() -> None:
    played = Played((STDOUT, b"one "), (STDERR, b"noise"), (STDOUT, b"two"), status=SUCCESS)
    assert output(played) == b"one two"
    path, query, heartbeat = played.asked[0]
    assert path == "/api/v1/namespaces/n/pods/x-0/exec"
    assert [value for key, value in query if key == "command"] == ["python3", "-c", "1"]
    assert ("stdin", "false") in query
    assert heartbeat is not None


def test_what_it_is_given_goes_to_its_standard_input() -> None:
    played = Played((STDOUT, b"ok"), status=SUCCESS)
    assert output(played, stdin=b"x" * 300_000) == b"ok"
    assert {frame[0] for frame in played.sent} == {STDIN}
    assert b"".join(frame[1:] for frame in played.sent) == b"x" * 300_000


def test_a_program_that_fails_is_told_in_its_own_last_words() -> None:
    with pytest.raises(ProgramFailed, match=r"^pod x-0: b \| c \| d$"):
        output(Played((STDERR, b"a\nb\nc\nd\n"), status=failure(7)))
    with pytest.raises(ProgramFailed, match=r"^pod x-0: it ended with 7$"):
        output(Played(status=failure(7)))


def test_a_program_that_ends_before_it_has_read_all_is_told_by_what_it_said() -> None:
    played = Played((STDERR, b"no room\n"), status=failure(1))
    played.broken = True
    with pytest.raises(ProgramFailed, match=r"^pod x-0: no room$"):
        output(played, stdin=b"x")


def test_output_without_an_end_is_given_up_before_it_fills_the_memory() -> None:
    class Endless(Played):
        async def __anext__(self) -> WSMessage:
            return WSMessage(WSMsgType.BINARY, bytes([STDOUT]) + bytes(1 << 18), None)

    tracemalloc.start()
    try:
        with pytest.raises(ProgramFailed, match=r"^pod x-0: python3 prints more than 16777216 bytes, which is not a valid answer$"):
            output(Endless())
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("status", [b"[]", b"\xff", b"{}" * 2, b"[" * 100_000, b'{"details": {"causes": [1]}}'])
def test_a_status_that_cant_be_read_is_a_failure(status: bytes) -> None:
    with pytest.raises(ProgramFailed, match="a status that can't be read"):
        output(Played((STATUS, status)))


def test_a_connection_that_breaks_is_no_exit_code() -> None:
    with pytest.raises(Broken, match=r"^the connection to pod x-0 broke$"):
        output(Played((STDOUT, b"half")))
    with pytest.raises(Broken, match=r"^the connection to pod x-0 broke, after: Killed$"):
        printed(Played((STDERR, b"Killed\n")))


def test_an_exit_code_is_no_error_to_who_shows_the_output() -> None:
    assert printed(Played((STDOUT, b"a"), (STDERR, b"b"), status=failure(3))) == [(STDOUT, b"a"), (STDERR, b"b")]


def test_a_program_that_does_not_end_is_given_up() -> None:
    with pytest.raises(ProgramFailed, match=r"^pod x-0: python3 has not ended after 0 s$"):
        output(Played(hangs=True), seconds=0.01)


@pytest.mark.parametrize("how", [output, printed])
def test_what_could_not_be_started_is_told_in_one_line(how: Any) -> None:
    with pytest.raises(NotStarted, match=r"^no program could be started in pod x-0: python3: not found$") as raised:
        how(Played(status={"status": "Failure", "message": "python3:\nnot found"}))
    assert not isinstance(raised.value, NotRunning)


@pytest.mark.parametrize("how", [output, printed])
@pytest.mark.parametrize(
    "words",
    [
        'Internal error occurred: unable to upgrade connection: container not found ("trainer")',
        "unable to upgrade connection: pod does not exist",
        "cannot exec into a container in a completed pod; current phase is Succeeded",
        "pod x-0 does not have a host assigned",
        "failed to exec in container: container is in CONTAINER_EXITED state",
        "failed to load task: no running task found: task 0c1d not found: not found",
        "rpc error: code = NotFound desc = failed to find container in store: not found",
        "error executing command in container: container is not created or running",
        "Container 0c1d is not running",
        "OCI runtime exec failed: exec failed: cannot exec in a stopped container: unknown",
        "OCI runtime exec failed: exec failed: cannot exec a container that has stopped: unknown",
        "OCI runtime exec failed: exec failed: unable to start container process: procReady not received: unknown",
        "failed to start exec: ttrpc: closed: unknown",
    ],
)
def test_a_container_that_ended_before_the_program_began_is_told_from_other_refusals(words: str, how: Any) -> None:
    """The API server says so once the connection is there, or refuses it."""
    for status, refusal in (({"status": "Failure", "message": words}, None), (None, ApiError(500, "", words))):
        played = Played(status=status)
        played.refusal = refusal
        with pytest.raises(NotRunning, match=r"^the container of pod x-0 has ended, or doesn't run yet: ") as raised:
            how(played)
        assert str(raised.value).endswith(words)


def test_a_program_that_never_ran_is_told_so_though_its_text_can_not_be_sent() -> None:
    played: Any = Played(status={"status": "Failure", "message": "container not found"})
    played.broken = True

    async def started() -> bytes:
        async with python_program(pod(played), b"print(1)") as running:
            answer = await running.read()
            raise running.failure() if not answer else AssertionError(answer)

    with pytest.raises(NotRunning):
        asyncio.run(started())


def test_the_exit_code_is_read_from_what_the_kubelet_tells() -> None:
    assert ending_of(SUCCESS) == (0, "")
    assert ending_of(failure(7)) == (7, "")


@pytest.mark.parametrize(("protocol", "passed"), [(V5, True), (V4, False)])
def test_the_end_of_input_is_told_where_the_server_knows_how(protocol: str, passed: bool) -> None:
    played: Any = Played(protocol=protocol)

    async def end() -> bool:
        async with pod(played).program(["cat"]) as running:
            return await running.close_stdin()

    assert asyncio.run(end()) is passed
    assert played.sent == ([bytes([255, STDIN])] if passed else [])


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, r"^you may not run programs in pods of namespace n \(pods/exec\): ask an administrator for the role edit there$"),
        (404, "^pod x-0 no longer exists in namespace n$"),
        (500, "^the cluster doesn't let you run programs in pods: pod x-0 of namespace n: no"),
    ],
)
def test_a_refusal_says_what_to_do(status: int, said: str) -> None:
    played = Played()
    played.refusal = ApiError(status, "", "no")
    for how in (output, printed):
        with pytest.raises(NotStarted, match=said):
            how(played)
    with pytest.raises(NotRunning if status == 404 else NotStarted, match=said):
        raise refused(played.refusal, "n", "x-0", "run programs in pods", "pods/exec")


def test_who_may_not_use_the_scc_of_a_pod_is_told_what_it_is_about_and_what_an_administrator_types() -> None:
    """OpenShift's own words, which also come as 403."""
    scc = (
        "unable to validate against any security context constraint: [provider restricted-v2: .containers[0].capabilities.add: Invalid"
        ' value: "IPC_LOCK": capability may not be added, provider "lockstep-rdma": Forbidden: not usable by user or serviceaccount]'
    )
    exceeds = f'exec operation is not allowed because the pod\'s security context exceeds your permissions: pods "x-0" is forbidden: {scc}'
    error = refused(ApiError(403, "Forbidden", f'pods "x-0" is forbidden: {exceeds}'), "n", "x-0", "run programs in pods", "pods/exec")
    assert str(error).startswith("you may not run programs in pods that neither you nor their service account may create: x-0 -n n: no SCC")
    assert "an administrator types: oc adm policy add-scc-to-user lockstep-rdma -z" in str(error) and "the role edit" not in str(error)


@pytest.mark.parametrize(
    ("term", "given"), [("xterm-256color", "xterm-256color"), (None, "xterm"), ("", "xterm"), ("a; rm -rf", "xterm"), ("-x", "xterm")]
)
def test_a_terminal_s_name_can_not_become_anything_else(term: str | None, given: str) -> None:
    assert shell_command(term)[:2] == ["env", f"TERM={given}"]


def test_what_is_made_in_a_shell_is_the_group_s_as_what_ranks_make_is() -> None:
    """Pods of another transport have another user."""
    ended = subprocess.run(shell_command(None), input="umask\n", text=True, capture_output=True, umask=0o022, check=True)
    assert int(ended.stdout, 8) == 0o002
