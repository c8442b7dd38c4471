"""Claims on GPUs: real processes, of real users, that want the same ones."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from lockstep_gang.agent import claims
from lockstep_gang.agent.claims import Claims, GpuTaken, holder_of
from lockstep_gang.contract.run import HostPlace, parse_run, run_text
from lockstep_machine import gpus
from lockstep_machine.gpus import CLAIM
from lockstep_machine.readings import user_name
from lockstep_spec.codec import ContractError
from lockstep_spec.exits import CONFIGURATION
from unit.gang.cases import WORKSPACE, Gang, make_run
from unit.virtual_time import VirtualClock

NOBODY = 65534
RACER = """
import sys
from lockstep_gang.agent.claims import Claims, GpuTaken
for line in sys.stdin:
    held = None
    try:
        held = Claims(line.split(), sys.argv[1])
        print("won", flush=True)
    except GpuTaken as error:
        print(error, flush=True)
    sys.stdin.readline()
    if held is not None:
        held.release()
    print("released", flush=True)
"""


@pytest.fixture
def gpu() -> str:
    """A GPU of this test alone: names are the machine's, and tests run side by side."""
    return f"GPU-{uuid.uuid4()}"


@contextmanager
def racer(job: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", RACER, job],
        env={"PYTHONPATH": str(WORKSPACE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], line: str) -> None:
    process.stdin.write(line + "\n")


def answer(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().rstrip("\n")


def test_of_two_processes_that_want_the_same_gpus_one_gets_them_in_each_of_a_hundred_races(gpu: str) -> None:
    with racer("a") as first, racer("b") as second:
        for number in range(100):
            wanted = [f"{gpu}-{number}", f"{gpu}-{number}-2"]
            tell(first, " ".join(wanted))
            tell(second, " ".join(reversed(wanted)))
            answers = [answer(first), answer(second)]
            assert answers.count("won") == 1, answers
            winner = "ab"[answers.index("won")]
            assert f"GPU {wanted[0]} of this machine is taken: job {winner} of " in answers[1 - answers.index("won")]
            for process in (first, second):
                tell(process, "release")
                assert answer(process) == "released"


def test_a_claim_says_whose_it_is_and_the_kernel_which_process_holds_it(gpu: str) -> None:
    assert holder_of(gpu) == ""
    with Claims([gpu], "demo"):
        said = holder_of(gpu)
        user = user_name()
        assert said.startswith(f"job demo of {user} since ")
        assert said.endswith(f" (process {os.getpid()} of {user})")
        assert time.strptime(said.removeprefix(f"job demo of {user} since ")[:5], "%H:%M")
    assert holder_of(gpu) == ""


def test_a_claim_of_an_earlier_day_says_the_date(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Claims([gpu], "demo") as held:
        monkeypatch.setattr(held, "_began", time.strptime("2026-01-02 23:59", "%Y-%m-%d %H:%M"))
        assert " since 2026-01-02 23:59 (process " in holder_of(gpu)


def test_who_gets_one_of_two_gpus_holds_neither(gpu: str) -> None:
    with Claims([f"{gpu}-2"], "demo"), pytest.raises(GpuTaken, match=f"GPU {gpu}-2 of this machine is taken: job demo of "):
        Claims([f"{gpu}-1", f"{gpu}-2"], "other")
    with Claims([f"{gpu}-1", f"{gpu}-2", f"{gpu}-1"], "other"):
        pass


def test_a_claim_is_gone_with_its_process_even_by_sigkill(gpu: str) -> None:
    with racer("a") as process:
        tell(process, gpu)
        assert answer(process) == "won"
        with pytest.raises(GpuTaken):
            Claims([gpu], "demo")
        process.send_signal(signal.SIGKILL)
        process.wait()
        Claims([gpu], "demo").release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_s_claim_counts_and_names_them(gpu: str) -> None:
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover (another process)
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            Claims([gpu], "theirs")
            os.write(ready[1], b"1")
            os.read(go[0], 1)
        finally:
            os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"1"
        user = user_name(NOBODY)
        with pytest.raises(
            GpuTaken, match=rf"GPU {gpu} of this machine is taken: job theirs of {user} since .* \(process {child} of {user}\)"
        ):
            Claims([gpu], "demo")
    finally:
        os.write(go[1], b"1")
        os.waitpid(child, 0)
        for descriptor in (*ready, *go):
            os.close(descriptor)
    Claims([gpu], "demo").release()


@contextmanager
def held_by_a_stranger(gpu: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        held.bind(CLAIM + gpu)
        held.listen(1)
        yield held


def test_a_holder_that_says_nothing_is_named_by_its_user(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "ANSWER_SECONDS", 0.05)
    with held_by_a_stranger(gpu), pytest.raises(GpuTaken, match=rf"its holder says nothing \(process {os.getpid()} of "):
        Claims([gpu], "demo")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock()
    for module in (claims, gpus):
        monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), "monotonic": clock.monotonic, "sleep": clock.sleep}))
    return clock


def test_a_holder_whom_too_many_ask_is_no_free_gpu(gpu: str, clock: VirtualClock) -> None:
    begun = clock.now
    with held_by_a_stranger(gpu), ExitStack() as waiting:
        for _ in range(2):  # and nobody takes them
            waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)).connect(CLAIM + gpu)
        with pytest.raises(GpuTaken, match="its holder does not answer"):
            Claims([gpu], "demo")
    assert 2.0 <= clock.now - begun <= 5.0


def test_what_a_stranger_says_is_one_short_line_that_can_be_printed(gpu: str) -> None:
    with held_by_a_stranger(gpu) as held, ExitStack() as asking:

        def talk() -> None:
            connection, _ = held.accept()
            asking.enter_context(connection).sendall(b"\x1b[31mx" * 100)

        thread = threading.Thread(target=talk)
        thread.start()
        said = holder_of(gpu)
        thread.join()
    assert said.startswith(r"\x1b[31mx" * 42 + r"\x1b[31 (process ")  # 256 bytes


def test_somebody_who_asks_and_goes_harms_nobody(gpu: str) -> None:
    with Claims([gpu], "demo"):
        for _ in range(50):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(CLAIM + gpu)
        assert holder_of(gpu).startswith("job demo of ")


def test_a_holder_without_a_free_descriptor_waits_for_one_and_then_answers(gpu: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Claims([gpu], "demo"), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (connection.fileno() + 1, limits[1]))
            connection.connect(CLAIM + gpu)
            before = time.process_time()
            time.sleep(0.5)
            used = time.process_time() - before
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert used < 0.1, "it doesn't ask for one all the time"
        assert connection.recv(256).startswith(b"job demo of ")


def test_an_agent_holds_its_gpus_for_its_life(agents: Gang, gpu: str) -> None:
    agents.write(
        'import os, time\nwhile not os.path.exists(os.environ["FOLDER"] + "/go"): time.sleep(0.02)', nodes=1, host=HostPlace(claims=(gpu,))
    )
    agents.start(0)
    agents.until("attempt 1")
    assert holder_of(gpu).startswith("job x of ")
    assert f"(process {agents.processes[0].pid} of " in holder_of(gpu)
    (agents.folder / "go").touch()
    assert agents.codes() == [0]
    assert holder_of(gpu) == ""


def test_an_agent_whose_gpu_is_taken_starts_nothing_and_says_who_has_it(agents: Gang, gpu: str) -> None:
    agents.write("", nodes=1, host=HostPlace(claims=(gpu,)))
    with Claims([gpu], "demo"):
        agents.run(codes=[CONFIGURATION])
    assert f"lockstep agent: GPU {gpu} of this machine is taken: job demo of " in agents.log()
    assert not (agents.folder / "run").exists()


@pytest.mark.parametrize("claims", [("",), ("GPU 1",), ("a/b",), ("x" * 81,)])
def test_a_claim_is_the_uuid_of_a_gpu(claims: tuple[str, ...]) -> None:
    with pytest.raises(ContractError, match=r"host\.claims"):
        HostPlace(claims=claims)


@pytest.mark.parametrize("unit", ["--now", "a b.service", "../x.service", "demo"])
def test_a_unit_is_the_name_of_a_service(unit: str) -> None:
    with pytest.raises(ContractError, match=r"host\.unit"):
        parse_run(run_text(make_run(host=HostPlace(unit=unit))))
    assert parse_run(run_text(make_run(host=HostPlace("lockstep-x.service", ("GPU-1",))))).host == HostPlace(
        "lockstep-x.service", ("GPU-1",)
    )


def test_a_gpu_whose_holder_takes_no_connection_is_asked_for_during_a_second(gpu: str, clock: VirtualClock) -> None:
    begun = clock.now
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held, pytest.raises(GpuTaken, match="a process that accepts no connection"):
        held.bind(CLAIM + gpu)
        Claims([gpu], "demo")
    assert clock.now - begun == pytest.approx(1.0)
