"""Options of ssh, the folder of its sockets, and the sentences for what it says."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.api.errors import Failed
from lockstep.platforms.hosts import ssh
from lockstep.platforms.hosts.ssh import HostUnreachable, Login, Shared, TurnedAway, control_folder, explained, ssh_options, unreachable
from support.checkout import ROOT
from unit.virtual_time import VirtualClock

NAME_BYTES = 16
SOCKET_BYTES_MAX = 107

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIC3nlgPlj7PBMGmKolCORfjQPM73k6wMNaQ1krEJHx9v"
NEVER = (
    "StrictHostKeyChecking" + "=no",
    "StrictHostKeyChecking" + "=accept-new",
    "StrictHostKeyChecking" + " no",
    "StrictHostKeyChecking" + " off",
)


def options(login: Login, *, shares: bool = True, opens: bool = False) -> dict[str, str]:
    words = ssh_options(login, Path("/run/x"), shares=shares, opens=opens)
    return dict(word.split("=", 1) for flag, word in pairwise(words) if flag == "-o")


def test_host_keys_are_always_checked_and_nothing_of_this_machine_is_forwarded() -> None:
    for login in (Login("lab0"), Login("lab0", host_key=KEY)):
        for shares in (True, False):
            stated = options(login, shares=shares)
            assert (stated["StrictHostKeyChecking"], stated["BatchMode"]) == ("yes", "yes")
            assert {stated[name] for name in ("ForwardAgent", "ForwardX11", "Tunnel", "PermitLocalCommand")} == {"no"}


def test_a_jump_host_is_held_to_the_same_rules_before_all_that_you_have_configured_for_it(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("Host bastion\n  User ada\n  ForwardAgent yes\n  BatchMode no\nHost *\n  StrictHostKeyChecking " + "accept-new\n")
    for login in (Login("lab0", jump="bastion", config=str(own)), Login("lab0", host_key=KEY, config=str(own))):
        own.write_text(own.read_text() + ("" if login.jump else "Host lab0\n  ProxyJump bastion\n"))
        shared = Shared(login, tmp_path, shares=False)
        asyncio.run(shared.prepare())
        for asks in (False, True):
            command = shared.command(asks=asks)
            file = command[command.index("-F") + 1]  # (all that ssh passes on to a jump host)
            printed = subprocess.run(["ssh", "-G", "-F", file, "bastion"], capture_output=True, text=True, check=True).stdout
            settings = dict(line.split(" ", 1) for line in printed.splitlines())
            assert settings["stricthostkeychecking"] in ("true", "yes") and settings["batchmode"] == ("no" if asks else "yes")
            assert (settings["forwardagent"], settings["user"]) == ("no", "ada"), "and the rest is as you have configured it"


def test_the_way_without_jump_hosts_is_by_your_own_configuration_alone(tmp_path: Path) -> None:
    shared = Shared(Login("localhost"), tmp_path, shares=False)
    asyncio.run(shared.prepare())
    assert "-F" not in shared.command() and list(tmp_path.iterdir()) == []


def test_a_stated_key_is_the_only_one_that_counts() -> None:
    stated = options(Login("lab0", host_key=KEY))
    assert stated["GlobalKnownHostsFile"] == "/dev/null"
    assert stated["UserKnownHostsFile"].startswith("/run/x/") and stated["HostKeyAlias"] in stated["UserKnownHostsFile"].replace(
        "/run/x/", "lockstep-"
    )
    assert "UserKnownHostsFile" not in options(Login("lab0"))


def test_only_the_shared_connection_itself_is_a_master() -> None:
    assert options(Login("lab0"))["ControlMaster"] == "no"
    assert (options(Login("lab0"), opens=True)["ControlMaster"], options(Login("lab0"), opens=True)["ControlPersist"]) == ("yes", "60")
    assert options(Login("lab0"), shares=False)["ControlPath"] == "none"


def test_every_way_to_a_host_has_a_connection_of_its_own() -> None:
    ways = [
        Login("a"),
        Login("b"),
        Login("a", user="x"),
        Login("a", port=23),
        Login("a", jump="b"),
        Login("a", identity="~/k"),
        Login("a", host_key=KEY),
    ]
    assert len({way.key for way in ways}) == len(ways)
    assert all(len(way.key) == NAME_BYTES for way in ways)


def test_what_a_file_states_becomes_arguments_of_their_own() -> None:
    words = ssh_options(Login("a", user="u", port=23, jump="b,c", identity="~/k"), Path("/run/x"), shares=True)
    assert words[-10:] == ["-l", "u", "-p", "23", "-J", "b,c", "-i", str(Path.home() / "k"), "-o", "IdentitiesOnly=yes"]


def test_the_name_of_a_host_is_never_an_option() -> None:
    shared = Shared(Login("-oProxyCommand=touch x"), Path("/run/x"))
    command = shared.command("-T", "--", shared.login.name, "true")
    assert command[command.index("--") + 1] == "-oProxyCommand=touch x"
    with pytest.raises(ssh.HostUnreachable, match="host -oProxyCommand=touch x can't be reached"):
        asyncio.run(shared.open())


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder that $XDG_RUNTIME_DIR names, with a short path."""
    with tempfile.TemporaryDirectory(prefix="ls") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


FALLBACK = Path(tempfile.gettempdir(), f"lockstep-{os.getuid()}", "ssh")


def test_sockets_lie_in_a_folder_of_yours_alone(runtime: Path) -> None:
    folder = control_folder()
    assert folder == runtime / "lockstep/ssh" and folder.stat().st_mode & 0o777 == 0o700
    assert len(os.fsencode(folder)) + 1 + NAME_BYTES + 17 <= SOCKET_BYTES_MAX
    folder.chmod(0o755)
    with pytest.raises(Failed, match=r"must be a folder of yours alone \(mode 0700\)"):
        control_folder()


def test_a_link_in_place_of_the_folder_is_refused(runtime: Path, tmp_path: Path) -> None:
    (runtime / "lockstep").symlink_to(tmp_path)
    with pytest.raises(Failed, match="must be a folder of yours alone"):
        control_folder()


def test_a_runtime_folder_that_is_too_long_open_to_others_or_not_there_is_not_taken(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long, public = runtime / ("d" * 60), runtime / "public"
    long.mkdir(mode=0o700)
    public.mkdir(mode=0o755)
    for folder in (long, public, runtime / "none"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        assert control_folder() == FALLBACK
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert control_folder() == FALLBACK


@pytest.mark.parametrize(
    ("errors", "sentence"),
    [
        ("lab0: Permission denied (publickey).",
            "it doesn't let you in. `ssh lab0` must work in your terminal without a question; where it asks for a code or a passphrase,"
            " `lockstep hosts setup` answers once for all later commands (ssh: lab0: Permission denied (publickey).)"),
        ("ssh: connect to host 10.0.0.1 port 22: Connection refused", "nothing listens on its ssh port"),
        ("ssh: connect to host 10.0.0.1 port 22: No route to host", "it doesn't answer. Check its power"),
        ("ssh: Could not resolve hostname lab0: Name or service not known", "its name is not known here"),
        ("No ED25519 host key is known for lockstep-0123456789abcdef and you have requested strict checking.\n"
            "Host key verification failed.", "its host key is not known"),
        ("@@@@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n@@@@@@\nHost key for lab0 has changed",
            "its host key is not the expected one"),
        ("No ED25519 host key is known for bastion and you have requested strict checking.\nHost key verification"
         " failed.\nkex_exchange_identification: Connection closed by remote host",
             "the key of a jump host on the way there is not known, or not the expected one, and nothing was sent. Type `ssh JUMP-HOST` in"
             " your terminal, and compare what it shows with the fingerprint that the machine has (ssh: No ED25519 host key is known for"
             " bastion and you have requested strict checking. | Host key verification failed.)"),
        ("kex_exchange_identification: Connection closed by remote host",
            "its sshd, or that of a jump host on the way, closes connections before any login"),
        ("Connection closed by UNKNOWN port 65535", "raise MaxStartups in sshd_config (ssh: Connection closed by UNKNOWN port 65535)"),
        ("", "host lab0 can't be reached (ssh: ssh gave no reason)"),
        pytest.param("x" * 5000, f"(ssh: {'x' * 1000})", id="long"),
    ],
)  # fmt: skip
def test_what_ssh_says_becomes_a_sentence_with_what_to_do(errors: str, sentence: str) -> None:
    message = explained(Login("lab0"), errors)
    assert message.startswith("host lab0 can't be reached") and sentence in message
    assert "lockstep-0" not in message and "@" not in message


@pytest.mark.parametrize(
    ("errors", "again"),
    [
        ("kex_exchange_identification: read: Connection reset by peer\nConnection reset by 10.0.0.1 port 22", True),
        ("kex_exchange_identification: Connection closed by remote host\nConnection closed by UNKNOWN port 65535", True),
        ("lab0: Permission denied (publickey).\nConnection closed by UNKNOWN port 65535", False),
        ("Host key verification failed.\nConnection closed by UNKNOWN port 65535", False),
        ("ssh: connect to host 10.0.0.1 port 22: Connection refused", False),
        (
            "ssh: connect to host bastion port 22: Connection timed out\nkex_exchange_identification: Connection closed by remote host",
            False,
        ),
        ("channel 0: open failed: administratively prohibited: open failed\nConnection closed by UNKNOWN port 65535", False),
    ],
)
def test_only_a_host_that_turns_away_before_any_login_is_asked_again(errors: str, again: bool) -> None:
    assert isinstance(unreachable(Login("lab0"), errors), TurnedAway) == again


def test_a_host_that_always_turns_away_is_asked_a_few_times_and_that_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "PAUSES", (0.0,) * 4)
    lines: list[str] = []
    tries: list[int] = []

    async def connect() -> None:
        tries.append(1)
        raise TurnedAway("no")

    with pytest.raises(TurnedAway):
        asyncio.run(Shared(Login("lab0"), tmp_path, tell=lines.append).patiently(connect))
    assert len(tries) == 5
    assert lines == ["host lab0, or a jump host on the way, turns connections away that begin at once: trying again"]


def test_a_machine_without_ssh_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Failed, match=r"there is no `ssh` on this machine: install OpenSSH's client"):
        asyncio.run(Shared(Login("lab0"), tmp_path).open())


def test_an_address_counts_only_where_the_name_is_not_known(tmp_path: Path) -> None:
    async def host_name(login: Login) -> list[str]:
        shared = Shared(login, tmp_path, shares=False)
        await shared.prepare()
        return [word for word in shared.command() if word.startswith("HostName=")]

    config = tmp_path / "config"
    config.write_text("Host aliased\n  HostName 127.0.0.1\nHost jumped\n  ProxyJump other\n")
    here = {"address": "192.0.2.1", "config": str(config)}
    assert asyncio.run(host_name(Login("nowhere.invalid", **here))) == ["HostName=192.0.2.1"]  # type: ignore[arg-type]
    for name in ("localhost", "aliased", "jumped"):
        assert asyncio.run(host_name(Login(name, **here))) == []  # type: ignore[arg-type]


def test_nothing_in_the_repository_switches_host_keys_off() -> None:
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True).stdout.split("\0")
    wrong = {}
    for name in filter(None, tracked):
        path = ROOT / name
        if path.suffix in (".sum", ".lock", ".svg") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        switches = [word for word in NEVER if word.lower() in text.lower()]
        if switches or re.search(r"AutoAdd" + r"Policy|known_hosts\s*=\s*None", text):
            wrong[name] = switches
    # A person's own configuration in a test, which Lockstep must overrule.
    assert wrong == {}


class Stub:
    """Stub of ssh: it records whether it was called with -G, with -O or to connect, and its connections fail if a test asks for that."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._log, self._fails = folder / "asked", folder / "fails"
        path = folder / "ssh"
        path.write_text(
            f'#!/bin/sh\nfor word; do case $word in -G|-O|-N) echo "$word" >> {self._log}; break;; esac; done\n'
            f"case $word in -O) [ ! -e {self._fails} ];; -N) echo Connection refused >&2; [ ! -e {self._fails} ];; esac\n"
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def asked(self) -> list[str]:
        """Words since the last time."""
        words = self._log.read_text().split() if self._log.exists() else []
        self._log.write_text("")
        return words

    def fail(self) -> None:
        self._fails.touch()


def test_a_connection_that_was_open_a_moment_ago_is_not_asked_whether_it_still_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(tmp_path, monkeypatch)
    now = [1000.0]
    monkeypatch.setattr(ssh, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shared = Shared(Login("lab0"), tmp_path)
    asyncio.run(shared.be_open())
    assert stub.asked() == ["-G", "-O"]
    now[0] += 10.0
    asyncio.run(shared.be_open())
    assert stub.asked() == []
    now[0] += 0.1
    asyncio.run(shared.be_open())
    assert stub.asked() == ["-O"]
    asyncio.run(shared.open())
    assert stub.asked() == ["-O"], "`open` asks ssh itself"


def test_after_a_connection_that_failed_the_way_to_the_host_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(tmp_path, monkeypatch)
    stub.fail()
    shared = Shared(Login("lab0"), tmp_path)
    for _ in range(2):
        with pytest.raises(HostUnreachable, match="nothing listens on its ssh port"):
            asyncio.run(shared.be_open())
        assert stub.asked() == ["-G", "-O", "-N"]


@pytest.mark.parametrize(
    ("login", "words"),
    [
        (Login("lab0", user="ada"), "`ssh ada@lab0` must work"),
        (Login("lab0", port=2222, jump="bastion", identity="~/.ssh/lab"), "`ssh -p 2222 -J bastion -i ~/.ssh/lab lab0` must work"),
        (Login("lab0", user="ada", identity="/my keys/lab"), "`ssh -i '/my keys/lab' ada@lab0` must work"),
    ],
)
def test_the_login_to_try_is_the_one_that_the_file_states(login: Login, words: str) -> None:
    assert words in explained(login, "lab0: Permission denied (publickey).")


def test_a_host_that_is_off_has_ten_seconds_and_an_idle_connection_a_minute_or_after_a_question_a_working_day() -> None:
    stated = options(Login("lab0"))
    assert stated["ConnectTimeout"] == "10" and int(stated["ServerAliveInterval"]) * int(stated["ServerAliveCountMax"]) == 15
    asked = ssh_options(Login("lab0"), Path("/run/x"), shares=True, opens=True, asks=True)
    assert (options(Login("lab0"), opens=True)["ControlPersist"], "ControlPersist=28800" in asked) == ("60", True)


def test_a_login_that_waits_for_a_touch_is_told_after_five_seconds_and_given_up_after_a_minute(tmp_path: Path) -> None:
    clock, told = VirtualClock(0.0), list[tuple[float, str]]()

    class Waiting(Shared):
        async def _run(self, *_: object, **__: object) -> tuple[int, str]:
            return await asyncio.get_running_loop().create_future()

    shared = Waiting(Login("lab0"), tmp_path, tell=lambda line: told.append((clock.now, line[:39])))
    with pytest.raises(HostUnreachable, match="no login in 60 s"):
        clock.run(shared._connect())
    assert (told, clock.now) == ([(5.0, "host lab0 has not let you in after 5 s:")], 60.0)


def test_a_connection_that_another_command_opens_is_looked_for_twenty_times_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, pauses = Shared(Login("lab0"), tmp_path), list[float]()
    Stub(tmp_path, monkeypatch)
    with (tmp_path / f"{shared.login.key}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        async def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 20:
                fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(ssh.asyncio, "sleep", pause)
        asyncio.run(shared.open())
    assert sum(pauses) == pytest.approx(1.0)
