"""Programs on hosts over the system's ssh: whatever the login shell is and prints, both ways intact, and nothing runs on when its connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from lockstep.devcluster.hosts import bed as running
from lockstep.platforms.hosts.place import REMOTE, HostPlace
from lockstep.platforms.hosts.ssh import HostUnreachable
from lockstep.programs import STDERR, STDOUT, Broken, NotStarted, ProgramFailed, output_of, python_output
from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_ssh import SHARED, Ways

ODD = ['it\'s "quoted" $HOME `id` !x \\n', "ünïcode\n2 lines", "-x", "", "a;b|c&d>e*", "\t%s {x}"]
SHELLS = ["bash", "dash", "zsh", "fish", "tcsh"]
NOISE = "echo Welcome to the cluster; echo 'and to stderr' >&2\n"
PRINT_ARGUMENTS = "import sys, json; print(json.dumps(sys.argv[1:]))"
HASH = "import hashlib, os, sys\nd = hashlib.sha256()\nn = 0\nwhile b := os.read(0, 1 << 20): d.update(b); n += len(b)\nprint(n, d.hexdigest())"
MEBIBYTE = 1 << 20
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@contextlib.contextmanager
def login_shell(bed: BedHosts, shell: str) -> Any:
    """Bob's login shell."""
    bed.console(0, "usermod", "--shell", shell, "bob")
    try:
        yield
    finally:
        bed.console(0, "usermod", "--shell", "/bin/bash", "bob")


@pytest.mark.parametrize("shell", SHELLS)
def test_arguments_arrive_as_they_are_whatever_the_login_shell_is(bed: BedHosts, ways: Ways, shell: str) -> None:
    path = bed.console(0, "sh", "-c", f"command -v {shell}").strip()
    with login_shell(bed, path):
        place = ways.place(user="bob")
        assert json.loads(run(output_of(place, ["python3", "-c", PRINT_ARGUMENTS, *ODD]))) == ODD
        assert run(output_of(place, ["sh", "-c", "echo $SHELL"])).decode().strip() == path


def test_what_a_login_shell_prints_is_no_part_of_the_programs_output(bed: BedHosts, ways: Ways) -> None:
    for name in (".bashrc", ".profile"):
        bed.console(0, "sh", "-c", f"cat > /home/bob/{name}", stdin=NOISE.encode())

    async def both() -> tuple[list[tuple[int, bytes]], str, int | None]:
        async with ways.place(user="bob").program(["sh", "-c", "echo out; echo err >&2; exit 3"]) as program:
            return [piece async for piece in program.output()], program.noise, program.code

    try:
        pieces, noise, code = run(both())
    finally:
        bed.console(0, "rm", "/home/bob/.bashrc", "/home/bob/.profile")
    assert b"".join(data for channel, data in pieces if channel == STDOUT) == b"out\n"
    assert b"".join(data for channel, data in pieces if channel == STDERR).endswith(b"err\n")
    assert noise == "Welcome to the cluster\n" and code == 3


def test_an_account_that_may_not_log_in_says_so(bed: BedHosts, ways: Ways) -> None:
    with (
        login_shell(bed, "/usr/sbin/nologin"),
        pytest.raises(NotStarted, match=r"its login shell says: This account is currently not available\.$"),
    ):
        run(output_of(ways.place(user="bob"), ["true"]))


def test_a_host_without_python_says_so(bed: BedHosts, ways: Ways) -> None:
    bed.console(0, "sh", "-c", "cat > /home/bob/.bashrc", stdin=b"PATH=/nowhere\n")
    try:
        with pytest.raises(NotStarted, match=r"host bed0: its login shell says: .*python3: (command )?not found"):
            run(output_of(ways.place(user="bob"), ["true"]))
    finally:
        bed.console(0, "rm", "/home/bob/.bashrc")


def test_a_program_that_is_not_there_was_not_started(ways: Ways) -> None:
    with pytest.raises(NotStarted, match=r"no program could be started on host bed0: there is no nonesuch$"):
        run(output_of(ways.place(), ["nonesuch", "-x"]))


def test_the_hosts_own_python_may_be_in_the_home_folder(bed: BedHosts, ways: Ways) -> None:
    bed.ssh(0, "ln -sf /usr/bin/python3 'my python'")
    shared = ways.place().shared
    place = HostPlace(shared, ("~/my python",), (("GREETING", "$HOME it's"),))
    assert run(python_output(place, b"import os, sys; print(os.environ['GREETING'], sys.argv[1])", "x")) == b"$HOME it's x\n"


@pytest.mark.parametrize("code", [0, 1, 7, 127, 254, 255])
def test_every_exit_code_is_the_programs_own(ways: Ways, code: int) -> None:
    async def ended() -> tuple[int | None, bytes]:
        async with ways.place().program(["sh", "-c", f"echo last words >&2; exit {code}"]) as program:
            errors = b"".join([data async for channel, data in program.output() if channel == STDERR])
            return program.code, errors

    assert run(ended()) == (code, b"last words\n")


def test_a_program_that_a_signal_ends_has_its_code(ways: Ways) -> None:
    with pytest.raises(ProgramFailed, match="host bed0: it ended with 137"):
        run(output_of(ways.place(), ["sh", "-c", "kill -9 $$"]))


def test_a_transfer_of_200_mebibytes_arrives_intact(ways: Ways) -> None:
    block = os.urandom(MEBIBYTE)
    digest = hashlib.sha256(block * 200).hexdigest()

    async def sent() -> bytes:
        async with ways.place().program(["python3", "-c", HASH]) as program:
            for _ in range(200):
                await program.write(block)
            await program.close_stdin()
            return b"".join([data async for channel, data in program.output() if channel == STDOUT])

    assert run(sent()).split() == [str(200 * MEBIBYTE).encode(), digest.encode()]


def test_much_goes_both_ways_at_once(ways: Ways) -> None:
    block = os.urandom(MEBIBYTE)

    async def echoed() -> tuple[str, int]:
        async with ways.place().program(["sh", "-c", "tee /dev/stderr"]) as program:

            async def send() -> None:
                for _ in range(32):
                    await program.write(block)
                await program.close_stdin()

            sending = asyncio.create_task(send())
            digest, errors = hashlib.sha256(), 0
            async for channel, data in program.output():
                if channel == STDOUT:
                    digest.update(data)
                else:
                    errors += len(data)
            await sending
            return digest.hexdigest(), errors

    assert run(echoed()) == (hashlib.sha256(block * 32).hexdigest(), 32 * MEBIBYTE)


def test_a_program_whose_output_nobody_reads_waits_and_fills_no_memory(bed: BedHosts, ways: Ways) -> None:
    async def unread() -> int:
        async with ways.place().program(["sh", "-c", "head -c 100000000 /dev/zero; echo done > unread"]) as program:
            await asyncio.sleep(1.0)
            before = bed.console(0, "sh", "-c", "cat /home/ada/unread 2>/dev/null || echo waits").strip()
            assert before == "waits"
            return sum([len(data) async for _, data in program.output()])

    try:
        assert run(unread()) == 100_000_000
    finally:
        bed.console(0, "rm", "-f", "/home/ada/unread")


def processes_of(bed: BedHosts, word: str, number: int = 0) -> str:
    return bed.console(number, "sh", "-c", f"ps -eo args | grep -F '{word}' | grep -v grep || true")


@pytest.mark.parametrize(
    "command", ["sleep 4321", "trap '' TERM; sleep 4321; sleep 4322", "sleep 4321 & sleep 4323"], ids=["plain", "stubborn", "family"]
)
def test_a_program_that_is_cancelled_leaves_nothing_running(bed: BedHosts, ways: Ways, command: str) -> None:
    async def cancelled() -> None:
        async with ways.place().program(["sh", "-c", f"echo up; {command}"]) as program:
            assert await program.read() == b"up\n"
            task = asyncio.create_task(program.read())
            await asyncio.sleep(0)
            task.cancel()

    run(cancelled())
    assert eventually(lambda: not processes_of(bed, "sleep 432")), processes_of(bed, "sleep 432")


def test_a_laptop_that_is_killed_leaves_nothing_running(bed: BedHosts, ways: Ways) -> None:
    place = ways.place()
    run(place.shared.open())
    command = place.shared.command("-T", "--", "bed0", REMOTE)
    for told in (b"", b"imp"):  # before the first byte of the starter, and in the middle of its first line
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ssh:
            assert ssh.stdin is not None
            ssh.stdin.write(told)
            ssh.stdin.flush()
            assert eventually(lambda: processes_of(bed, "os._exit(9)"))
            ssh.kill()
        assert eventually(lambda: not processes_of(bed, "os._exit(9)"))


def test_a_host_that_vanishes_breaks_the_connection(bed: BedHosts, ways: Ways) -> None:
    async def vanished() -> None:
        async with ways.place(2).program(["sh", "-c", "echo up; sleep 1000"]) as program:
            assert await program.read() == b"up\n"
            running.power_off(bed.host(2))
            async for _ in program.output():
                pass

    began = time.monotonic()
    with pytest.raises(Broken, match="the connection to host bed2 broke"):
        run(vanished())
    assert time.monotonic() - began < 45
    with pytest.raises(
        HostUnreachable, match=r"host bed2 can't be reached: it doesn't answer\. Check its power, its cable and its address"
    ):
        run(output_of(ways.place(2), ["true"]))
    running.power_on(bed.host(2))
    assert run(output_of(ways.place(2), ["echo", "again"])) == b"again\n"


def test_a_host_that_hangs_while_one_logs_in_is_told(bed: BedHosts, ways: Ways) -> None:
    running.freeze(bed.host(1), frozen=True)
    with pytest.raises(HostUnreachable, match="it doesn't answer"):
        run(output_of(ways.place(1), ["true"]))


def test_twenty_programs_at_once_on_three_hosts(ways: Ways) -> None:
    """More than sshd's MaxSessions on each connection: those that it refuses get a connection of their own."""

    async def all_of_them() -> list[bytes]:
        places = [ways.place(number) for number in range(3)]
        words = [(place, f"{number}-{turn}") for number, place in enumerate(places) for turn in range(20)]
        if not ways.shares:
            words = [each for each in words if int(each[1].split("-")[1]) < 4]  # (MaxStartups: sshd drops more that log in at once)
        return await asyncio.gather(*(output_of(place, ["sh", "-c", "sleep 0.5; echo $0", word]) for place, word in words))

    answers = run(all_of_them())
    assert len(set(answers)) == len(answers) == (60 if ways.shares else 12)


@SHARED
def test_two_processes_that_open_at_once_share_one_connection(bed: BedHosts, ways: Ways) -> None:
    login = ways.place().shared.login
    script = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom lockstep.platforms.hosts.ssh import Login, Shared\n"
        f"asyncio.run(Shared({login!r}, Path({str(ways.folder)!r})).open())"
    )
    openers = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(4)]
    assert [opener.wait(60) for opener in openers] == [0, 0, 0, 0]
    masters = subprocess.run(
        ["pgrep", "-f", f"ControlPath={ways.folder}/{login.key}"], capture_output=True, text=True, check=False
    ).stdout.split()
    assert len(masters) == 1


@SHARED
def test_a_connection_that_somebody_killed_is_made_again(ways: Ways) -> None:
    place = ways.place()
    assert run(output_of(place, ["echo", "1"])) == b"1\n"
    _, message = run(place.shared.control("check"))
    os.kill(int(message.partition("pid=")[2].partition(")")[0]), signal.SIGKILL)
    assert run(output_of(place, ["echo", "2"])) == b"2\n"
