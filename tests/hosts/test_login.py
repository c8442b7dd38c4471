"""Logins that ask: one answer in the terminal, and all later commands ride on the connection."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.platforms.hosts.ssh import HostUnreachable, Login
from lockstep.programs import output_of
from support.clusters.bed_hosts import BedHosts
from support.clusters.bed_ssh import Ways, login_to

PASSPHRASE = "open sesame"
PROGRAM = """
import asyncio
from pathlib import Path
from lockstep.api.errors import Failed
from lockstep.platforms.hosts.ssh import Login, Shared
try:
    asyncio.run(Shared({login!r}, Path({folder!r})).log_in())
    print("logged" + " in")
except Failed as error:
    print(error)
"""


@pytest.fixture
def locked(bed: BedHosts, tmp_path: Path) -> Login:
    """Way to a host by a key that has a passphrase."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", PASSPHRASE, "-f", str(key)], check=True)
    bed.console(0, "sh", "-c", "cat >> /home/ada/.ssh/authorized_keys", stdin=key.with_suffix(".pub").read_bytes())
    return login_to(bed, 0, identity=str(key))


def typed(login: Login, folder: Path, answer: str) -> str:
    """Everything that a terminal shows while somebody logs in in it, and answers the first question."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.pop("SSH_ASKPASS", None)
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM.format(login=login, folder=str(folder))])  # noqa: S606
    shown, answered = b"", False
    while True:
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError:  # the terminal's last program has ended
            break
        if b"passphrase" in shown and not answered:
            answered = True
            os.write(terminal, f"{answer}\n".encode())
        elif answered and shown.count(b"passphrase") > 1:
            os.write(terminal, b"\x03")
            answered = False
            break
        if re.search(rb"logged in|can't be reached", shown):
            break
    os.close(terminal)
    os.waitpid(pid, 0)
    return shown.decode()


def test_one_answer_serves_all_later_commands(ways: Ways, locked: Login) -> None:
    place = ways.place(identity=locked.identity)
    with pytest.raises(HostUnreachable, match="it doesn't let you in"):
        asyncio.run(output_of(place, ["true"]))
    shown = typed(locked, ways.folder, PASSPHRASE)
    assert "logged in" in shown and PASSPHRASE not in shown
    assert asyncio.run(output_of(place, ["hostname"])) == b"bed0\n"


def test_a_wrong_answer_opens_nothing(ways: Ways, locked: Login) -> None:
    assert "logged in" not in typed(locked, ways.folder, "wrong")
    with pytest.raises(HostUnreachable):
        asyncio.run(output_of(ways.place(identity=locked.identity), ["true"]))
