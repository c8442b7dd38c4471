"""Programs on hosts over the system's ssh: whatever the login shell is and prints, both ways intact, and nothing runs on when its
connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lockstep.platforms.hosts.place import REMOTE, HostPlace
from lockstep.platforms.hosts.ssh import HostUnreachable
from lockstep.programs import STDERR, STDOUT, Broken, NotStarted, ProgramFailed, output_of, python_output
from support.clusters import bed_hosts
from support.clusters.bed_hosts import OLD_PYTHON, BedHosts, eventually
from support.clusters.bed_jobs import RANK, BedJobs
from support.clusters.bed_ssh import Ways, few_logins

ODD = ['it\'s "quoted" $HOME `id` !x \\n', "ünïcode\n2 lines", "-x", "", "a;b|c&d>e*", "\t%s {x}"]
SHELLS = ["bash", "dash", "zsh", "fish", "tcsh"]
NOISE = "echo Welcome to the cluster; echo 'and to stderr' >&2\n"
PRINT_ARGUMENTS = "import sys, json; print(json.dumps(sys.argv[1:]))"
HASH = (
    "import hashlib, os, sys\nd = hashlib.sha256()\nn = 0\nwhile b := os.read(0, 1 << 20): d.update(b); n += len(b)\nprint(n,"
    " d.hexdigest())"
)
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


def test_a_host_that_lets_few_logins_begin_at_once_is_asked_again_until_all_are_in(bed: BedHosts, ways: Ways) -> None:
    async def all_of_them() -> list[bytes]:
        return await asyncio.gather(*(output_of(ways.place(name=f"door{number}"), ["echo", str(number)]) for number in range(4)))

    with few_logins(bed, 0):
        assert run(all_of_them()) == [f"{number}\n".encode() for number in range(4)]


def test_an_account_that_may_not_log_in_says_so(bed: BedHosts, ways: Ways) -> None:
    with (
        login_shell(bed, "/usr/sbin/nologin"),
        pytest.raises(
            NotStarted,
            match=(
                r"its login shell says: This account is currently not available\. \(ssh -i \S+ bob@bed0 python3 --version must print a"
                r" version\)$"
            ),
        ),
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


def test_every_exit_code_is_the_programs_own(ways: Ways) -> None:
    place, codes = ways.place(), (0, 1, 7, 127, 254, 255)

    async def ended(code: int) -> tuple[int | None, bytes]:
        async with place.program(["sh", "-c", f"echo last words >&2; exit {code}"]) as program:
            errors = b"".join([data async for channel, data in program.output() if channel == STDERR])
            return program.code, errors

    async def all_of_them() -> list[tuple[int | None, bytes]]:
        return [await ended(code) for code in codes]

    assert run(all_of_them()) == [(code, b"last words\n") for code in codes]


def test_a_program_that_a_signal_ends_has_its_code(ways: Ways) -> None:
    with pytest.raises(ProgramFailed, match="host bed0: it ended with 137"):
        run(output_of(ways.place(), ["sh", "-c", "kill -9 $$"]))


def test_a_transfer_of_40_mebibytes_arrives_intact(ways: Ways) -> None:
    block = os.urandom(MEBIBYTE)
    digest = hashlib.sha256(block * 40).hexdigest()

    async def sent() -> bytes:
        async with ways.place().program(["python3", "-c", HASH]) as program:
            for _ in range(40):
                await program.write(block)
            await program.close_stdin()
            return b"".join([data async for channel, data in program.output() if channel == STDOUT])

    assert run(sent()).split() == [str(40 * MEBIBYTE).encode(), digest.encode()]


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
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdin.write(told)
            process.stdin.flush()
            assert eventually(lambda: processes_of(bed, "os._exit(9)"))
            process.kill()
        assert eventually(lambda: not processes_of(bed, "os._exit(9)"))


@pytest.mark.long
def test_a_host_that_vanishes_breaks_the_connection(bed: BedHosts, ways: Ways) -> None:
    async def vanished() -> None:
        async with ways.place(2).program(["sh", "-c", "echo up; sleep 1000"]) as program:
            assert await program.read() == b"up\n"
            bed_hosts.power_off(bed.host(2))
            async for _ in program.output():
                pass

    with pytest.raises(Broken, match="the connection to host bed2 broke"):
        run(vanished())
    with pytest.raises(
        HostUnreachable, match=r"host bed2 can't be reached: it doesn't answer\. Check its power, its cable and its address"
    ):
        run(output_of(ways.place(2), ["true"]))
    bed_hosts.power_on(bed.host(2))
    assert run(output_of(ways.place(2), ["echo", "again"])) == b"again\n"


def test_a_host_that_hangs_while_one_logs_in_is_told(bed: BedHosts, ways: Ways) -> None:
    bed_hosts.freeze(bed.host(1), frozen=True)
    with pytest.raises(HostUnreachable, match="it doesn't answer"):
        run(output_of(ways.place(1), ["true"]))


def test_many_programs_at_once_on_three_hosts(ways: Ways) -> None:
    """More than sshd's MaxSessions on the first one's connection: those that it refuses get a connection of their own."""
    counts = (13, 2, 2)

    async def all_of_them() -> list[bytes]:
        places = [place for number, count in enumerate(counts) for place in [ways.place(number)] * count]
        words = [["sh", "-c", "sleep 0.5; echo $0", str(turn)] for turn in range(len(places))]
        return await asyncio.gather(*map(output_of, places, words))

    assert run(all_of_them()) == [f"{turn}\n".encode() for turn in range(sum(counts))]


def test_two_processes_that_open_at_once_share_one_connection(bed: BedHosts, ways: Ways) -> None:
    login = ways.place().shared.login
    script = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom lockstep.platforms.hosts.ssh import Login, Shared\n"
        f"asyncio.run(Shared({login!r}, Path({str(ways.folder)!r})).open())"
    )
    openers = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(4)]
    assert [opener.wait() for opener in openers] == [0, 0, 0, 0]
    masters = subprocess.run(
        ["pgrep", "-f", f"ControlPath={ways.folder}/{login.key}"], capture_output=True, text=True, check=False
    ).stdout.split()
    assert len(masters) == 1


def test_a_connection_that_somebody_killed_is_made_again(ways: Ways) -> None:
    place = ways.place()
    assert run(output_of(place, ["echo", "1"])) == b"1\n"
    _, message = run(place.shared.control("check"))
    os.kill(int(message.partition("pid=")[2].partition(")")[0]), signal.SIGKILL)
    assert run(output_of(place, ["echo", "2"])) == b"2\n"


@pytest.fixture
def laptop(bed: BedHosts, tmp_path: Path) -> Iterator[BedJobs]:
    laptop = BedJobs(bed, tmp_path)
    laptop.leave()  # a connection keeps the login shell with which it began
    yield laptop
    laptop.leave()
    laptop.clear()


LOUD = "echo Welcome to the cluster\nsh -c 'echo and to stderr >&2'\n"
RC_FILES = (".bashrc", ".profile", ".zshenv", ".config/fish/config.fish", ".tcshrc")
LONG_HOME = "/srv/" + "a-department-with-a-long-name/" * 4 + "ada"


def planted(laptop: BedJobs, number: int, path: str, text: str) -> None:
    """Write a file in ada's home on the host."""
    script = 'cd /home/ada; mkdir -p "$(dirname "$1")"; cat > "$1"; chown -R ada:ada "${1%%/*}"'
    laptop.bed.console(number, "sh", "-ec", script, "sh", path, stdin=text.encode())


def root(laptop: BedJobs, number: int, script: str) -> None:
    laptop.bed.console(number, "sh", "-ec", script)


@contextlib.contextmanager
def shells_of(laptop: BedJobs, shells: tuple[str, ...], rc: str) -> Iterator[None]:
    """Ada's login shell on each host, each of whose rc files has this text."""
    for number, shell in enumerate(shells):
        root(laptop, number, f"usermod --shell $(command -v {shell}) ada")
        for name in RC_FILES:
            planted(laptop, number, name, rc)
    try:
        yield
    finally:
        for number in range(len(shells)):
            root(laptop, number, f"usermod --shell /bin/bash ada; cd /home/ada; rm -f {' '.join(RC_FILES)}")


def whole_job(laptop: BedJobs, name: str) -> None:
    """Run a job from its start to its end, read its log, and delete it: it leaves nothing."""
    done = laptop.run(laptop.job(name, steps=15))
    assert f"{name}: Running: all ranks run" in done.stdout
    laptop.type("wait", name, "--cluster", str(laptop.cluster), "--for", "Complete")
    assert "[rank 1] from step 0" in laptop.about("logs", name, "--node", "1").stdout
    assert "is deleted" in laptop.about("delete", name).stdout
    assert laptop.traces(0, name) == laptop.traces(1, name) == ""
    assert [laptop.count(number, number) for number in (0, 1)] == [15, 15]
    laptop.forget(name)


@pytest.mark.parametrize(
    ("shells", "rc"),
    [
        (("dash", "zsh"), LOUD),
        pytest.param(("fish", "tcsh"), LOUD, marks=pytest.mark.long),
        pytest.param(
            ("bash", "bash"), f'set -e\n{LOUD}[ -n "$ONCE" ] || ONCE=1 exec dash -c "$BASH_EXECUTION_STRING"\n', marks=pytest.mark.long
        ),
    ],
    ids=["dash zsh", "fish tcsh", "bash that execs another"],
)
def test_a_whole_job_runs_whatever_the_login_shells_are_and_print(laptop: BedJobs, shells: tuple[str, ...], rc: str) -> None:
    with shells_of(laptop, shells, rc):
        whole_job(laptop, "shells")


@pytest.mark.long
def test_a_whole_job_runs_in_a_home_whose_path_is_longer_than_a_sockets_may_be(laptop: BedJobs) -> None:
    assert len(LONG_HOME) > 108
    for number in (0, 1):
        root(
            laptop,
            number,
            f"mkdir -p {Path(LONG_HOME).parent}; ln -sfn /home/ada {LONG_HOME}; sed -i 's#:/home/ada:#:{LONG_HOME}:#' /etc/passwd",
        )
        root(laptop, number, "systemctl restart user@$(id -u ada)")
    try:
        whole_job(laptop, "deep")
    finally:
        for number in (0, 1):
            root(laptop, number, f"sed -i 's#:{LONG_HOME}:#:/home/ada:#' /etc/passwd; systemctl restart user@$(id -u ada)")


def shell_that_refuses(laptop: BedJobs) -> Callable[[], None]:
    root(laptop, 1, "usermod --shell /usr/sbin/nologin ada")
    return lambda: root(laptop, 1, "usermod --shell /bin/bash ada")


def rc_that_fails(laptop: BedJobs) -> Callable[[], None]:
    planted(laptop, 1, ".bashrc", "set -e\nls /nonesuch\n")
    return lambda: root(laptop, 1, "rm /home/ada/.bashrc")


def rc_that_becomes_another(laptop: BedJobs) -> Callable[[], None]:
    planted(laptop, 1, ".bashrc", "exec zsh\n")
    return lambda: root(laptop, 1, "rm /home/ada/.bashrc")


def old(laptop: BedJobs, path: str) -> Callable[[], None]:
    """Put a Python that says it is 3.9 there."""
    laptop.bed.console(1, "sh", "-ec", f"cat > {path}; chmod 755 {path}", stdin=OLD_PYTHON.encode())
    return lambda: root(laptop, 1, f"rm {path}")


def old_python(laptop: BedJobs) -> Callable[[], None]:
    laptop.cluster.write_text(laptop.cluster.read_text().replace("  python: /opt/env/bin/python\n", ""))
    return old(laptop, "/usr/local/bin/python3")


def old_python_beside_a_new_one(laptop: BedJobs) -> Callable[[], None]:
    text = laptop.cluster.read_text()
    laptop.cluster.write_text(text.replace("- name: bed1\n", "- name: bed1\n    python: /usr/local/bin/python3.9\n"))
    return old(laptop, "/usr/local/bin/python3.9")


def python_that_is_not_there(laptop: BedJobs) -> Callable[[], None]:
    text = laptop.cluster.read_text()
    laptop.cluster.write_text(text.replace("- name: bed1\n", "- name: bed1\n    python: ~/env/bin/python\n"))
    return lambda: None


def mounted(laptop: BedJobs, folder: str, *, full: bool) -> Callable[[], None]:
    """A disk of its own for a folder of ada, which is full, or can't be written."""
    root(
        laptop,
        1,
        f"setpriv --reuid=ada --regid=ada --clear-groups mkdir -p {folder}; mount -t tmpfs -o size=8m,uid=2001,gid=2001 tmpfs {folder}",
    )
    if folder == WORKSPACE:
        laptop.put(1, "rank.py", RANK.encode())
    root(laptop, 1, f"dd if=/dev/zero of={folder}/fill bs=64k 2>/dev/null || true" if full else f"mount -o remount,ro {folder}")
    return lambda: root(laptop, 1, f"umount {folder}")


STATE = "/home/ada/.local/state"
WORKSPACE = "/home/ada/lockstep/workspace"


def home_full(laptop: BedJobs) -> Callable[[], None]:
    return mounted(laptop, STATE, full=True)


def home_read_only(laptop: BedJobs) -> Callable[[], None]:
    return mounted(laptop, STATE, full=False)


def workspace_full(laptop: BedJobs) -> Callable[[], None]:
    return mounted(laptop, WORKSPACE, full=True)


def workspace_read_only(laptop: BedJobs) -> Callable[[], None]:
    return mounted(laptop, WORKSPACE, full=False)


REFUSED = {
    shell_that_refuses: r"host bed1: its login shell says: This account is currently not available\.",
    old_python: r"host bed1: its Python 3\.9 is too old: 3\.10 or newer is needed: lockstep hosts setup \S+ brings one",
    old_python_beside_a_new_one: (
        r"host bed1: its hosts\[\]\.python /usr/local/bin/python3\.9 is Python 3\.9, and 3\.10 or newer is needed: state another one, or"
        r" leave it out"
    ),
    python_that_is_not_there: r"host bed1: its hosts\[\]\.python ~/env/bin/python can't be run: No such file or directory: state another",
    home_full: r"host bed1: /home/ada/\.local/state.*: No space left on device: make room on its file system",
    workspace_read_only: rf"host bed1: its workspace {WORKSPACE}: .* is on a read-only file system: state another",
}
MORE_REFUSED = {
    rc_that_fails: r"host bed1: its login shell says: ls: cannot access '/nonesuch'",
    rc_that_becomes_another: r"host bed1: its login shell says: zsh: .* \(ssh -i \S+ ada@bed1 python3 --version must print a version\)$",
    home_read_only: r"host bed1: /home/ada/\.local/state.*: Read-only file system: its file system must be mounted writable",
    workspace_full: rf"host bed1: its workspace {WORKSPACE} has 0 B free: free some",
}
CASES = [*REFUSED.items(), *(pytest.param(*case, marks=pytest.mark.long) for case in MORE_REFUSED.items())]


@pytest.mark.parametrize(("plant", "sentence"), CASES, ids=[plant.__name__ for plant in (*REFUSED, *MORE_REFUSED)])
def test_a_host_that_no_job_can_run_on_is_named_with_the_reason_and_nothing_is_left(
    laptop: BedJobs, plant: Callable[[BedJobs], Callable[[], None]], sentence: str
) -> None:
    path = laptop.job("odd", steps=10)
    undo = plant(laptop)
    try:
        refused = laptop.run(path, check=False)
    finally:
        undo()
    assert refused.returncode in (1, 2) and re.search(sentence, refused.stderr), refused.stderr
    assert laptop.traces(0, "odd") == laptop.traces(1, "odd") == ""
