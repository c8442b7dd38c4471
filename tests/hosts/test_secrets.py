"""Secrets that go to a host by standard input: no process, here or there, ever has them in its arguments or its environment."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.devcluster import needs
from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_ssh import Ways

PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from lockstep.platforms.hosts.place import HostPlace
from lockstep.platforms.hosts.ssh import Login, Shared
from lockstep.programs import output_of

async def main():
    shared = Shared({login!r}, Path({folder!r}), shares={shares})
    place = HostPlace(shared, environment=(("TOKEN_FILE", "token"),))
    store = "import os, sys; os.umask(0o077); open('token', 'w').write(sys.stdin.read({length})); print(os.stat('token').st_mode & 0o777)"
    print(await output_of(place, ["python3", "-c", store], stdin=sys.stdin.buffer.read()))
    await shared.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def strace() -> str:
    if shutil.which("strace") is None:
        needs.install(["strace"], print)
    return "strace"


def test_a_secret_is_in_no_arguments_and_in_no_environment(bed: BedHosts, ways: Ways, strace: str, tmp_path: Path) -> None:
    secret = secrets.token_hex(32)
    place = ways.place()
    program = PROGRAM.format(login=place.shared.login, folder=str(ways.folder), shares=ways.shares, length=len(secret))
    calls = [strace, "-f", "-v", "-s", "200000", "-e", "trace=execve"]
    sshd = bed.console(0, "cat", "/run/sshd.pid").strip()
    outside = next(
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/status")
        if any(
            line.split()[1:] and line.split()[0] == "NSpid:" and line.split()[-1] == sshd and len(line.split()) > 2
            for line in path.read_text().splitlines()
        )
        and (path.parent / "ns/pid").readlink() == Path(f"/proc/{_first(bed)}/ns/pid").readlink()
    )
    there = tmp_path / "there"
    with subprocess.Popen([*calls, "-o", str(there), "-p", outside], stderr=subprocess.PIPE) as tracing:
        assert tracing.stderr is not None and b"attached" in tracing.stderr.readline()
        here = tmp_path / "here"
        done = subprocess.run(
            [*calls, "-o", str(here), sys.executable, "-c", program], input=secret.encode(), capture_output=True, timeout=120, check=False
        )  # fmt: skip
        assert done.stdout.strip() == b"b'384\\n'", done.stderr.decode()
        assert eventually(lambda: "TOKEN_FILE" in there.read_text())
        tracing.terminate()
    assert bed.console(0, "cat", "/home/ada/token") == secret
    assert "ssh" in here.read_text() and "os._exit(9)" in there.read_text()  # both were really seen
    for trace in (here, there):
        assert secret not in trace.read_text(), trace.name
    assert secret not in bed.console(0, "journalctl", "--no-pager")


def _first(bed: BedHosts) -> int:
    from lockstep.devcluster.hosts.bed import first_process

    pid = first_process(bed.host(0))
    assert pid is not None
    return pid
