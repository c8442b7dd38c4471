"""`lockstep launch` and `lockstep join` from the outside, as two machines that share loopback: real commands, agents and ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launched import SAVES, Machine, Typed, machines_on_loopback, own_and_descendants, wait_until, write_job

NEXT = iter(range(18000 + os.getpid() % 9 * 1400, 32000, 70))
"""First ports of launches, below those that the kernel gives to connections."""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    with machines_on_loopback(tmp_path) as both:
        for machine in both:
            machine.write("script.py", SAVES)
        yield both


class Launch:
    """A launch on the first machine, and its token."""

    def __init__(self, machine: Machine, **spec: object) -> None:
        self.machine, self.port = machine, next(NEXT)
        self.job = write_job(machine.folder, **{"script": {"path": "script.py"}, **spec})
        self.token_file = machine.folder / "state/lockstep/launch" / f"x-{self.port}.token"
        self.place = f"127.0.0.1:{self.port}"

    def start(self, *words: str, **variables: str) -> Typed:
        return self.machine.type("launch", "--at", self.place, "-f", str(self.job), *words, **variables)

    def token(self) -> str:
        wait_until(self.token_file.exists, "no token was written")
        return self.token_file.read_text().strip()


def both_train(launch: Launch, machines: list[Machine]) -> tuple[Typed, Typed, str]:
    """Launch, join, and return both commands and the token once both ranks run."""
    first = launch.start()
    second = machines[1].type("join", launch.place, given=(token := launch.token()))
    first.sees("rank 0 of 2")
    second.sees("rank 1 of 2")
    return first, second, token


def go(machines: list[Machine]) -> None:
    for machine in machines:
        machine.write("go", "")


def test_each_machine_runs_its_node_in_its_own_folder_and_both_end_with_the_job(machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    first, second, _ = both_train(launch, machines)
    assert f"lockstep join {launch.place}" in first.output
    assert "this machine is node 1 of 2 of job x" in second.output
    go(machines)
    assert (first.ends(), second.ends()) == (0, 0)
    assert "Complete: all ranks are done" in first.output
    assert "has gone" not in first.output, "it left with the job's end"
    assert not launch.token_file.exists()
    assert all((machine.folder / "workspace/runs/x").is_dir() for machine in machines)


def test_a_machine_that_joins_first_waits_for_the_launch_and_says_so(machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    shared = machines[0].folder / "token"
    second = machines[1].type("launch", "--node", "1", "--at", launch.place, "-f", str(launch.job), "--token-file", str(shared))
    second.sees(f"waiting for {shared}, which lockstep launch writes")
    first = launch.start("--node", "0", "--token-file", str(shared))
    go(machines)
    assert (first.ends(), second.ends()) == (0, 0)
    assert shared.stat().st_mode & 0o777 == 0o600


def test_a_join_before_any_launch_says_what_it_waits_for(machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    first = launch.start()
    token = launch.token()
    first.sees("lockstep: anyone who has the token")
    first.process.send_signal(signal.SIGINT)
    assert first.ends() == 130
    assert "stopped before all machines were there, nothing was started" in first.output
    (machines[0].folder / "kept").write_text(token)
    (machines[0].folder / "kept").chmod(0o600)
    second = machines[1].type("join", launch.place, given=token)
    second.sees(f"waiting for lockstep launch at {launch.place} (")
    go(machines)
    first = launch.start("--token-file", str(machines[0].folder / "kept"))
    assert (first.ends(), second.ends()) == (0, 0)


def test_a_wrong_token_is_refused_on_both_sides_and_the_launch_goes_on_waiting(machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    first = launch.start()
    right = launch.token()
    wrong = "-".join(["aaaa"] * 8)
    refused = machines[1].type("join", launch.place, given=wrong)
    assert refused.ends() == 2
    assert f"the launch at {launch.place} has another token" in refused.output
    first.sees("refused a connection from 127.0.0.1: it has another token")
    go(machines)
    second = machines[1].type("join", launch.place, given=right)
    assert (first.ends(), second.ends()) == (0, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_on_the_launch_saves_on_all_machines(number: signal.Signals, machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    first, second, _ = both_train(launch, machines)
    first.process.send_signal(number)
    assert (first.ends(), second.ends()) == (130, 130)
    assert machines[0].has("saved-0")
    assert machines[1].has("saved-1")
    assert "the launch was stopped" in second.output


def test_ctrl_c_on_a_joiner_saves_everywhere_and_it_gets_its_node_back(machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    first, second, token = both_train(launch, machines)
    second.process.send_signal(signal.SIGINT)
    assert second.ends() == 130
    wait_until(lambda: machines[0].has("saved-0") and machines[1].has("saved-1"), first.output)
    first.sees("node 1 has gone")
    again = machines[1].type("join", launch.place, given=token)
    first.sees("node 1 is back")
    again.sees("rank 1 of 2 in attempt 2")
    go(machines)
    assert (first.ends(), again.ends()) == (0, 0)


def test_a_joiner_that_is_killed_joins_again(machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    first, second, token = both_train(launch, machines)
    second.kill()
    again = machines[1].type("join", launch.place, given=token)
    again.sees("rank 1 of 2 in attempt 2")
    go(machines)
    assert (first.ends(), again.ends()) == (0, 0)


def test_a_launch_that_is_killed_is_launched_again_and_its_joiner_comes_by_itself(machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    first, second, _ = both_train(launch, machines)
    first.kill()
    second.sees("lost the connection to the launch")
    wait_until(lambda: machines[0].has("saved-0"), "the agent without its launch did not save")
    again = launch.start()
    again.sees("the token is that of the earlier launch")
    second.sees("the job was launched anew")
    go(machines)
    assert (again.ends(), second.ends()) == (0, 0)
    assert "attempt 2 starts" in again.output


def test_another_machine_as_node_0_gives_no_attempt_number_twice(machines: list[Machine]) -> None:
    go(machines)
    for attempt, (head, other) in enumerate([machines, machines[::-1]], 1):
        launch = Launch(head)
        first = launch.start()
        second = other.type("join", launch.place, given=launch.token())
        assert (first.ends(), second.ends()) == (0, 0)
        assert f"attempt {attempt} starts" in first.output


def test_an_agent_that_is_killed_is_started_again(machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    first, second, _ = both_train(launch, machines)
    for typed in (second, first):
        (agent,) = [pid for pid in own_and_descendants([typed.process.pid]) if b"lockstep_gang.agent.main" in _words(pid)]
        attempts = first.output.count("all 2 ranks run")
        os.kill(agent, signal.SIGKILL)
        typed.sees("was ended by SIGKILL: it is started again")
        first.sees("all 2 ranks run", attempts + 1)
    go(machines)
    assert (first.ends(), second.ends()) == (0, 0)


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_token_and_the_key_are_in_no_argument_variable_log_or_message(machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    first = launch.start()
    token = launch.token()
    wire = Wire(launch.port)
    second = machines[1].type("join", f"127.0.0.1:{wire.port}", given=token)
    first.sees("all 2 ranks run")
    keys = {path.read_text() for pid in own_and_descendants([first.process.pid, second.process.pid]) for path in _key_files(pid)}
    assert len(keys) == 1, "both have the same key"
    secrets = [token.encode(), *(key.strip().encode() for key in keys)]
    for pid in own_and_descendants([first.process.pid, second.process.pid]):
        for name in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{name}").read_bytes()
            assert not [secret for secret in secrets if secret in text], (pid, name)
    go(machines)
    assert (first.ends(), second.ends()) == (0, 0)
    texts = [path.read_bytes() for machine in machines for path in machine.folder.rglob("*") if path.is_file()]
    wire.close()
    assert b"assigned" in wire.heard
    assert not [secret for secret in secrets for text in [*texts, bytes(wire.heard)] if secret in text]


class Wire:
    """A way to the launch on which everything is heard."""

    def __init__(self, port: int) -> None:
        self.heard = bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._threads = [threading.Thread(target=self._carry, args=(port,))]
        self._threads[0].start()

    def _carry(self, port: int) -> None:
        joiner, launch = self._ends = self._server.accept()[0], socket.create_connection(("127.0.0.1", port))
        self._threads += [threading.Thread(target=self._pass, args=pair) for pair in ((joiner, launch), (launch, joiner))]
        for thread in self._threads[1:]:
            thread.start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.heard += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.close()
        for thread in self._threads:
            thread.join(30)
        for end in self._ends:
            end.close()


def _key_files(pid: int) -> list[Path]:
    words = _words(pid).split(b"\0")
    return [Path(os.fsdecode(words[words.index(b"--run") + 1])).with_name("key")] if b"--run" in words else []


def test_the_token_is_shown_on_the_terminal_itself_and_not_in_redirected_output(machines: list[Machine], tmp_path: Path) -> None:
    launch = Launch(machines[0])
    log = tmp_path / "output"
    words = [
        sys.executable,
        "-m",
        "lockstep.cli.main",
        "launch",
        "--at",
        launch.place,
        "-f",
        str(launch.job),
        "--cluster",
        str(machines[0].folder),
    ]
    child, terminal = pty.fork()
    if child == 0:
        os.environ["XDG_STATE_HOME"] = str(machines[0].folder / "state")
        with log.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.execv(words[0], words)  # noqa: S606 (no shell is wanted)
    try:
        shown = b""
        while not (match := re.search(rb"token: ([a-z2-7-]{39})\r?\n", shown)):
            shown += os.read(terminal, 1000)
        assert match[1].decode() == launch.token()
        wait_until(lambda: "the token is shown once" in log.read_text(), "it was not said")
        assert launch.token() not in log.read_text()
    finally:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        os.close(terminal)


def test_a_token_that_is_typed_is_not_echoed(machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    go(machines)
    first = launch.start()
    token = launch.token()
    words = [sys.executable, "-m", "lockstep.cli.main", "join", launch.place, "--cluster", str(machines[1].folder)]
    child, terminal = pty.fork()
    if child == 0:
        os.execv(words[0], words)  # noqa: S606 (no shell is wanted)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal ends with its last process
        while data := os.read(terminal, 1000):
            shown += data
            if shown.endswith(b"has shown: "):
                os.write(terminal, f"{token}\n".encode())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, shown
    os.close(terminal)
    assert first.ends() == 0
    assert b"this machine is node 1 of 2" in shown
    assert token.encode() not in shown


@pytest.mark.parametrize(
    "variables",
    [
        [{"OMPI_COMM_WORLD_RANK": n, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"} for n in "01"],
        [{"PMIX_RANK": n} for n in "01"],
    ],
)
def test_one_command_on_every_node_under_a_starter(variables: list[dict[str, str]], machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    go(machines)
    shared = str(machines[0].folder / "shared-token")
    words = ("launch", "--node", "auto", "--at", launch.place, "-f", str(launch.job), "--token-file", shared)
    typed = [machine.type(*words, **own) for machine, own in zip(machines, variables, strict=True)]
    assert [one.ends() for one in typed] == [0, 0], [one.output for one in typed]
    assert "this machine is node 1 of 2" in typed[1].output


@pytest.mark.parametrize("launch_first", [False, True])
def test_a_starter_that_signals_every_process_still_lets_ranks_save(launch_first: bool, machines: list[Machine]) -> None:
    launch = Launch(machines[0])
    shared = str(machines[0].folder / "shared-token")
    words = ("launch", "--node", "auto", "--at", launch.place, "-f", str(launch.job), "--token-file", shared)
    typed = [machine.type(*words, SLURM_NODEID=str(n), SLURM_STEP_NUM_NODES="2", SLURM_LOCALID="0") for n, machine in enumerate(machines)]
    typed[0].sees("rank 0 of 2")
    typed[1].sees("rank 1 of 2")
    started = [own_and_descendants([one.process.pid]) for one in typed]
    if launch_first:
        os.kill(typed[0].process.pid, signal.SIGTERM)
        typed[1].sees("the launch was stopped, the ranks save first")
    for pid in itertools.chain(*started):
        if not (launch_first and pid == typed[0].process.pid):
            with contextlib.suppress(ProcessLookupError):  # an earlier one's end was this one's
                os.kill(pid, signal.SIGTERM)
    assert [one.ends() for one in typed] == [130, 130], [one.output for one in typed]
    assert machines[0].has("saved-0")
    assert machines[1].has("saved-1")


def test_what_can_not_be_is_refused_in_a_sentence_before_anything_starts(machines: list[Machine]) -> None:
    launch = Launch(machines[0], gpusPerNode=1)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

    def refused(*words: str) -> str:
        command = [sys.executable, "-m", "lockstep.cli.main", *words, "--cluster", str(machines[0].folder)]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, check=False, timeout=60)
        assert ended.returncode == 2, ended.stderr
        return ended.stderr

    job = ("-f", str(launch.job))
    assert "gpusPerNode is 1, and" in refused("launch", "--at", launch.place, *job)
    assert "is no address of this machine" in refused("launch", "--at", "192.0.2.1:29600", *job, "--set", "gpusPerNode=0")
    assert "means every interface" in refused("launch", "--at", "0.0.0.0:29600", *job, "--set", "gpusPerNode=0")
    assert "is no ADDRESS:PORT" in refused("join", "127.0.0.1")
    assert "no token was given" in refused("join", launch.place)
    assert "add --token-file FILE" in refused("launch", "--node", "auto", "--at", launch.place, *job)
