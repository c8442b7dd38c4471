"""Secrets that go to a host by standard input: no process, here or there, ever has them in its arguments or its environment."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.devcluster.hosts import needs
from lockstep.devcluster.hosts.bed import first_process
from support.checkout import ROOT
from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_jobs import BedJobs
from support.clusters.bed_ssh import Ways

PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from lockstep.platforms.hosts.place import HostPlace
from lockstep.platforms.hosts.ssh import Login, Shared
from lockstep.programs import output_of

async def main():
    shared = Shared({login!r}, Path({folder!r}))
    place = HostPlace(shared, environment=(("TOKEN_FILE", "token"),))
    store = "import os, sys; os.umask(0o077); open('token', 'w').write(sys.stdin.read({length})); print(os.stat('token').st_mode & 0o777)"
    print(await output_of(place, ["python3", "-c", store], stdin=sys.stdin.buffer.read()))
    await shared.close()

asyncio.run(main())
"""

CALLS = ("strace", "-f", "-v", "-s", "200000", "-e", "trace=execve")


@pytest.fixture(scope="module")
def strace() -> str:
    if shutil.which("strace") is None:
        needs.install(["strace"], print)
    return "strace"


def test_a_secret_is_in_no_arguments_and_in_no_environment(bed: BedHosts, ways: Ways, strace: str, tmp_path: Path) -> None:
    secret = secrets.token_hex(32)
    place = ways.place()
    program = PROGRAM.format(login=place.shared.login, folder=str(ways.folder), length=len(secret))
    there = tmp_path / "there"
    with traced(bed, 0, there):
        here = tmp_path / "here"
        done = subprocess.run(
            [*CALLS, "-o", str(here), sys.executable, "-c", program], input=secret.encode(), capture_output=True, timeout=120, check=False
        )  # fmt: skip
        assert done.stdout.strip() == b"b'384\\n'", done.stderr.decode()
        assert eventually(lambda: "TOKEN_FILE" in there.read_text())
    assert bed.console(0, "cat", "/home/ada/token") == secret
    assert "ssh" in here.read_text() and "os._exit(9)" in there.read_text()  # both were really seen
    for trace in (here, there):
        assert secret not in trace.read_text(), trace.name
    assert secret not in bed.console(0, "journalctl", "--no-pager")


@pytest.mark.long
def test_no_process_of_a_whole_job_has_its_key_in_arguments_or_environment(bed: BedHosts, strace: str, tmp_path: Path) -> None:
    laptop = BedJobs(bed, tmp_path)
    traces = [tmp_path / f"trace{number}" for number in range(4)]
    start = ["run", "-f", str(laptop.job("kept")), "--cluster", str(laptop.cluster), "--detach"]
    try:
        with traced(bed, 0, traces[0]), traced(bed, 1, traces[1]):
            for trace, words in ((traces[2], start), (traces[3], ["stop", "kept", "--cluster", str(laptop.cluster)])):
                command = [*CALLS, "-o", str(trace), sys.executable, "-m", "lockstep.cli.main", *words]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
                assert done.returncode == 0, done.stderr
                if words is start:
                    key = bed.console(1, "cat", "/home/ada/.local/state/lockstep/jobs/kept/key").strip()
        assert len(key) >= 32
        assert all("rank.py" in trace.read_text() for trace in traces[:2]) and all("ssh" in trace.read_text() for trace in traces[2:])
        log = bed.console(0, "cat", "/home/ada/.local/state/lockstep/jobs/kept/agent.log")
        journals = [bed.console(number, "journalctl", "--no-pager") for number in (0, 1)]
        assert not [text for text in (*(trace.read_text() for trace in traces), *journals, log, done.stdout, done.stderr) if key in text]
    finally:
        laptop.clear()


@contextmanager
def traced(bed: BedHosts, number: int, output: Path) -> Iterator[None]:
    """Write every program's arguments and environment that starts on the host meanwhile."""
    first = first_process(bed.host(number))
    assert first is not None
    space = Path(f"/proc/{first}/ns/pid").readlink()
    here = [path.parent.parent.name for path in Path("/proc").glob("[0-9]*/ns/pid") if _is_in(path, space)]
    with subprocess.Popen([*CALLS, "-o", str(output), *(word for pid in here for word in ("-p", pid))], stderr=subprocess.PIPE) as tracing:
        for _ in here:
            assert b"attached" in tracing.stderr.readline()
        try:
            yield
        finally:
            tracing.terminate()


def _is_in(space_of_process: Path, space: Path) -> bool:
    try:
        return space_of_process.readlink() == space
    except OSError:  # it has ended just now
        return False
