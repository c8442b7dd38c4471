"""Real ranks for tests: torch processes over gloo, forked from one pre-imported server."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_gang.contract.layout import RankLayout, equal_layout
from lockstep_machine.network import free_ports

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]
SOURCES = TESTS.parent / "workspace"
TIMEOUT_SECONDS = 450
READY = b'{"ready": true}\n'
RunFile = Callable[..., Path]


def torchrun_environment(rank: int, world_size: int, nodes: int | tuple[int, ...], port: int) -> dict[str, str]:
    """`nodes`: their number, or the ranks of each."""
    layout = equal_layout(nodes, world_size // nodes) if isinstance(nodes, int) else RankLayout(nodes)
    node = layout.node_of(rank)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(layout.local_rank_of(rank)),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(layout.counts[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(layout.counts)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@dataclass(frozen=True)
class Ended:
    """How a group of ranks ended: exit codes (negative: the signal) and what each printed."""

    codes: list[int]
    outputs: list[str]

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)


class Outcomes(dict[str, Any]):
    """Variant → what came out of it. Asking for one that failed is an AssertionError with what its ranks printed."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: dict[str, str] = {}

    def __missing__(self, name: str) -> Any:
        raise AssertionError(f"{name} failed:\n{self.failures.get(name, 'there is no such variant')}")


def join(meeting: Path, folder: Path) -> socket.socket | None:
    """Connect to the server at `meeting`; None if there is none, or it is about to end."""
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(str(meeting))
        greet(client, folder)
    except OSError:
        client.close()
        return None
    return client


def greet(client: socket.socket, folder: Path) -> None:
    client.settimeout(TIMEOUT_SECONDS)
    client.sendall(json.dumps({"folder": str(folder)}).encode() + b"\n")
    if client.recv(100) != READY:
        raise ConnectionError((folder / "server.log").read_text())


def start(meeting: Path, folder: Path, variables: dict[str, str]) -> socket.socket:
    """Start the server, and be its first client."""
    meeting.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": f"{SOURCES}:{HERE}:{TESTS}",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }
    environment.pop("LOCKSTEP_ATTEMPT", None)
    client, inherited = socket.socketpair()
    with inherited, (folder / "server.log").open("w") as log:
        command = [sys.executable, str(HERE / "rank_server.py"), str(meeting), str(inherited.fileno())]
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": [inherited.fileno()]}
        started = subprocess.run(command, **streams, env=environment, cwd=folder, check=False, timeout=TIMEOUT_SECONDS)
    assert started.returncode == 0, (folder / "server.log").read_text()
    greet(client, folder)
    return client


class ForkServer:
    """Starts groups of ranks; one at a time. `variables`: of the environment that libraries read when they are loaded.

    The process that ranks are forked from is shared by all that give the same `meeting`, a path for its socket; it ends with the last of
    them.
    """

    def __init__(self, folder: Path, meeting: Path | None = None, **variables: str) -> None:
        self._folder = folder
        self._groups = 0
        self._pending = b""
        self._running: dict[int, int] = {}
        self.meeting = meeting or folder / "ranks.sock"
        with self.meeting.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._client = join(self.meeting, folder) or start(self.meeting, folder, variables)

    def _answer(self, timeout_seconds: float) -> dict[str, Any] | None:
        """The next answer, or None after a while."""
        self._client.settimeout(timeout_seconds)
        while b"\n" not in self._pending:
            try:
                received = self._client.recv(65536)
            except TimeoutError:
                return None
            assert received, (self._folder / "server.log").read_text()
            self._pending += received
        line, self._pending = self._pending.split(b"\n", 1)
        return json.loads(line)

    def start(
        self,
        target: str,
        runs: Sequence[Path | None],
        *,
        nodes: int | tuple[int, ...] = 1,
        arguments: dict[str, Any] | None = None,
        **environment: str,
    ) -> list[Path]:
        """Start one rank a run file (the same one, usually, for each); returns the files their output goes to."""
        assert not self._running
        self._groups += 1
        port = free_ports(1)[0]
        outputs = [self._folder / f"group-{self._groups}-rank-{rank}.log" for rank in range(len(runs))]
        ranks = []
        for rank, run in enumerate(runs):
            variables = {**torchrun_environment(rank, len(runs), nodes, port), **environment}
            ranks.append({"environment": {**variables, "LOCKSTEP_RUN": str(run)} if run else variables, "output": str(outputs[rank])})
        self._client.sendall(json.dumps({"target": target, "arguments": arguments or {}, "ranks": ranks}).encode() + b"\n")
        answer = self._answer(TIMEOUT_SECONDS)
        self._running = {pid: rank for rank, pid in enumerate(answer["pids"])}
        return outputs

    def wait(self, outputs: list[Path], *, kill_rest_after_first: bool = False) -> Ended:
        """Wait for all ranks. `kill_rest_after_first`: do what the agent does, SIGKILL all once one has failed."""
        codes = [0] * len(outputs)
        try:
            while self._running:
                answer = self._answer(TIMEOUT_SECONDS)
                assert answer is not None, "ranks did not end in time:\n" + "\n".join(path.read_text() for path in outputs)
                rank = self._running.pop(answer["pid"])
                codes[rank] = answer["code"]
                if kill_rest_after_first and answer["code"] != 0:
                    self._signal(signal.SIGKILL)
        finally:
            self.kill()  # those that a failure or the test's time limit left, so that the next test can start its own
        return Ended(codes, [path.read_text() for path in outputs])

    def run(self, target: str, runs: Sequence[Path | None], *, codes: int | list[int] | None = 0, **options: Any) -> Ended:
        """Run the ranks to their end. `codes`: how all of them have to end, or each; None: in any way."""
        kill = options.pop("kill_rest_after_first", False)
        ended = self.wait(self.start(target, runs, **options), kill_rest_after_first=kill)
        expected = [codes] * len(runs) if isinstance(codes, int) else codes
        assert expected in (None, ended.codes), f"ranks ended with {ended.codes} instead of {expected}:\n{ended.output}"
        return ended

    def run_each(self, target: str, size: int, variants: dict[str, Any], output: Path, *, nodes: int = 1, **arguments: Any) -> Outcomes:
        """Run all variants in one group of `size` ranks, which adds each one's result to the JSON in `output`.

        A variant that fails ends its group, since its ranks may be anywhere; those after it run in a new one.
        """
        outcomes, rest = Outcomes(), variants
        while rest:
            output.unlink(missing_ok=True)
            try:
                given = {**arguments, "variants": rest, "output": str(output)}
                ended = self.run(target, [None] * size, nodes=nodes, arguments=given, codes=None, kill_rest_after_first=True)
                printed, whole = ended.output, ended.codes == [0] * size
            except AssertionError as hung:
                printed, whole = str(hung), False
            outcomes |= json.loads(output.read_text()) if output.exists() else {}
            rest = {name: variant for name, variant in rest.items() if name not in outcomes}
            assert rest or whole, f"the group failed after its last variant:\n{printed}"
            if rest:
                outcomes.failures[next(iter(rest))] = printed
                rest = dict(list(rest.items())[1:])
        return outcomes

    def _signal(self, number: int) -> None:
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):  # it ended a moment ago, and its answer is on the way
                os.kill(pid, number)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        while self._running:
            answer = self._answer(TIMEOUT_SECONDS)
            self._running.pop(answer["pid"])

    def close(self) -> None:
        self.kill()
        self._client.close()
