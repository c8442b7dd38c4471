"""The system's ssh: one shared connection a host, host keys always checked, and a remote command line that is the same for everything.

sshd hands the command line to the login shell, whatever that is. So no user data is ever in it: it reads one line of Python from standard
input, and that reads what to run. What was printed before the mark is the shell's noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import pwd
import random
import re
import socket
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from lockstep.api.errors import Failed
from lockstep.api.hosts import login_words
from lockstep.plan.hosts.keys import KEY
from lockstep.platforms.jobs.processes import ended
from lockstep.programs import NotStarted
from lockstep_spec.files import expanded, write_durably
from lockstep_spec.words import any_of

CONNECT_SECONDS = 10
OPEN_SECONDS = 60.0
"""Limit of a connection's beginning, jump hosts and all. ssh's own limit ends before the login does."""
HINT_SECONDS = 5.0
"""Seconds without a login after which you are told what ssh may be waiting for: in BatchMode it says nothing itself while a key wants a
touch.
"""
SHARED_SECONDS, LOGIN_SECONDS = 60, 8 * 3600
"""Seconds for which a shared connection outlives its last use: one that opened by itself, and one for which somebody answered questions."""
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Longest seconds between tries of a connection that is turned away; the shortest are half of them, so that many don't come back at once.
"""
POLL_SECONDS = 0.05
SURE_SECONDS = 10.0
"""Seconds for which a connection that was open is taken to be open: should it end before, ssh connects for the next program alone."""
SOCKET_BYTES_MAX = 107
NAME_BYTES = 16
"""Length of the name of a shared connection's socket; while it connects, ssh adds 17 bytes to it."""
OWN_FAILURE = 255
"""Exit code of ssh itself: no connection, or it was lost."""
T = TypeVar("T")
WORDS_MAX = 1000
_ALIAS = "lockstep-"
"""Beginning of the name that a host with a stated key has in its file of known hosts."""


class HostUnreachable(NotStarted):
    """A host that doesn't answer, or doesn't let you in. The message has ssh's own words, and what to do about them."""


class TurnedAway(HostUnreachable):
    """A host whose sshd, or that of a jump host, closed the connection before any login: it lets only so many begin at once
    (MaxStartups).
    """


@dataclass(frozen=True)
class Login:
    """Way to a host. What is None stands in ssh's own configuration."""

    name: str
    """Name that `ssh NAME` takes."""
    user: str | None = None
    port: int | None = None
    jump: str | None = None
    identity: str | None = None
    host_key: str | None = None
    """The only key that it may have, as in known_hosts: type and base64. None: the user's known_hosts say it."""
    address: str | None = None
    """Address to take when neither ssh's configuration nor this machine's resolver knows the name."""
    config: str | None = None
    """File to read in place of ~/.ssh/config."""

    @property
    def words(self) -> str:
        """Words after `ssh` by which a person logs in the same way."""
        return login_words(self.name, user=self.user, port=self.port, jump=self.jump, identity=self.identity)

    @property
    def key(self) -> str:
        """Short name of the connection: another one for every other way to the host, and for every other key of it."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:NAME_BYTES]


def control_folder() -> Path:
    """Folder of shared connections: yours alone, and with a path that leaves room for a socket's name. Raises Failed when it is somebody
    else's.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and len(os.fsencode(runtime)) + len("/lockstep/ssh/") + NAME_BYTES + 17 <= SOCKET_BYTES_MAX and _is_private(Path(runtime)):
        folder = Path(runtime, "lockstep", "ssh")
    else:
        folder = Path(f"/tmp/lockstep-{os.getuid()}", "ssh")  # noqa: S108 (checked below)
    for part in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            part.mkdir(mode=0o700)
        if not _is_private(part):
            raise Failed(f"{part} must be a folder of yours alone (mode 0700), since ssh's connections are shared through it: remove it")
    return folder


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


FOR_ALL: Mapping[str, object] = {
    "CheckHostIP": "no",
    "ConnectTimeout": CONNECT_SECONDS,
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ServerAliveCountMax": 3,
    "ServerAliveInterval": 5,
    "StrictHostKeyChecking": "yes",
    "Tunnel": "no",
}
"""Settings of each connection, to a host and to the jump hosts before it."""


def ssh_options(
    login: Login, folder: Path, *, shares: bool, opens: bool = False, asks: bool = False, config: Path | None = None
) -> list[str]:
    """Options of ssh for this host. `shares`: use the shared connection, if there is one. `opens`: be that connection. `asks`: ask in the
    terminal. `config`: file to read in place of that of the login.
    """
    stated: dict[str, object] = {
        "BatchMode": "no" if asks else "yes",
        "ControlMaster": "yes" if opens else "no",
        "ControlPath": folder / login.key if shares else "none",
        "ControlPersist": (LOGIN_SECONDS if asks else SHARED_SECONDS) if opens else "no",
        **FOR_ALL,
    }
    if login.host_key is not None:
        stated |= {
            "GlobalKnownHostsFile": "/dev/null",
            "HostKeyAlias": _alias(login),
            "UpdateHostKeys": "no",
            "UserKnownHostsFile": _known_hosts(login, folder),
            "VerifyHostKeyDNS": "no",
        }
    read = config or (login.config and expanded(login.config))
    options = ["-F", str(read)] if read else []
    options += [part for name, value in stated.items() for part in ("-o", f"{name}={value}")]
    for flag, value in (("-l", login.user), ("-p", login.port), ("-J", login.jump)):
        options += [flag, str(value)] if value is not None else []
    return [*options, *(["-i", str(expanded(login.identity)), "-o", "IdentitiesOnly=yes"] if login.identity else [])]


def jump_config(login: Login, *, asks: bool) -> str:
    """Text of a configuration by which jump hosts are held to the rules of the host itself, before all that you have configured for them.

    ssh passes a jump host the name of its file and none of its options.
    """
    own = [login.config] if login.config else [str(Path(pwd.getpwuid(os.getuid()).pw_dir, ".ssh", "config")), "/etc/ssh/ssh_config"]
    stated = {"BatchMode": "no" if asks else "yes", **FOR_ALL}
    return "\n".join(
        ["Host *", *(f"  {name} {value}" for name, value in stated.items()), *(f'Include "{expanded(path)}"' for path in own), ""]
    )


def _alias(login: Login) -> str:
    return f"{_ALIAS}{login.key}"


def _known_hosts(login: Login, folder: Path) -> Path:
    return folder / f"{login.key}.known"


class Shared:
    """The shared connection of one host: made when it is first needed, kept for a minute after its last use."""

    def __init__(self, login: Login, folder: Path, *, shares: bool = True, tell: Callable[[str], None] = lambda _: None) -> None:
        """`shares`: False for commands that make a connection of their own. `tell`: hears that a login may wait for you."""
        self.login, self.folder, self.shares, self._tell = login, folder, shares, tell
        self._host_name: str | None = None
        self._open_at = -SURE_SECONDS
        self._jumps = False
        """True once it is known that the way leads through jump hosts."""

    def command(self, *words: str, opens: bool = False, asks: bool = False, forwards: bool = False) -> list[str]:
        """Command of ssh: `words` are what follows the options, the host's name among them. `forwards`: it is about ports, else it has
        none.
        """
        config = self._jump_config(asks=asks) if self._jumps else None
        options = ssh_options(self.login, self.folder, shares=self.shares, opens=opens, asks=asks, config=config)
        if self._host_name:
            options += ["-o", f"HostName={self._host_name}"]
        return ["ssh", *options, *([] if forwards else ["-o", "ClearAllForwardings=yes"]), *words]

    async def be_open(self) -> None:
        """Open it, unless it was open a moment ago. Raises as `open`."""
        if time.monotonic() - self._open_at > SURE_SECONDS:
            await self.open()

    async def open(self) -> None:
        """Open it, if it isn't open. Raises HostUnreachable, and Failed when there is no ssh on this machine."""
        await self.prepare()
        async with alone_at(self.folder / f"{self.login.key}.lock"):  # (a second ssh would open one that nobody uses and nobody ends)
            if not await self._is_open():
                try:
                    await self.patiently(self._connect)
                except HostUnreachable:
                    self._host_name = None  # (the network may be another one by now: the next try asks anew)
                    raise
        self._open_at = time.monotonic()

    async def patiently(self, connect: Callable[[], Awaitable[T]]) -> T:
        """Connect, and again after a pause where the host turns the connection away. Raises HostUnreachable."""
        for number, pause in enumerate(PAUSES):
            try:
                return await connect()
            except TurnedAway:
                if number == 1:
                    self._tell(
                        f"host {self.login.name}, or a jump host on the way, turns connections away that begin at once: trying again"
                    )
                await asyncio.sleep(random.uniform(pause / 2, pause))  # noqa: S311 (no secret)
        return await connect()

    async def log_in(self) -> None:
        """Open it in this terminal, where ssh may ask for a password, a code or a touch, and keep it for eight hours.

        Raises HostUnreachable.
        """
        await self.prepare()
        async with alone_at(self.folder / f"{self.login.key}.lock"):
            if not await self._is_open():
                code, errors = await self._run(self.command("-N", "-f", "--", self.login.name, opens=True, asks=True), in_terminal=True)
                if code != 0:
                    raise HostUnreachable(explained(self.login, errors))

    async def control(self, word: str, *words: str) -> tuple[int, str]:
        """Exit code and errors of a request to the shared connection, as `ssh -O WORD` makes it."""
        return await self._run(self.command("-O", word, *words, "--", self.login.name, forwards=True))

    async def close(self) -> None:
        """End it and all that runs over it."""
        self._open_at = -SURE_SECONDS
        await self.control("exit")

    async def _is_open(self) -> bool:
        return (await self.control("check"))[0] == 0

    async def _connect(self) -> None:
        name = self.login.name
        hint = (
            f"host {name} has not let you in after {HINT_SECONDS:.0f} s: if your key wants a touch, or your agent a confirmation, give"
            " it now"
        )
        told = asyncio.get_running_loop().call_later(HINT_SECONDS, self._tell, hint)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                code, errors = await self._run(self.command("-N", "-f", "--", name, opens=True))
        except TimeoutError:
            raise HostUnreachable(explained(self.login, f"no login in {OPEN_SECONDS:.0f} s")) from None
        finally:
            told.cancel()
        if code != 0:
            if self._jumps and _JUMP_CLOSED.search(errors):
                errors = await self._jump_errors() or errors
            raise unreachable(self.login, errors)

    async def _jump_errors(self) -> str:
        """Return the errors of one more try, which shares nothing: for a shared connection ssh prints nothing of what a jump host's
        says.
        """
        alone = Shared(self.login, self.folder, shares=False)
        alone._jumps = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_SECONDS):
                return (await self._run(alone.command("-T", "--", self.login.name, "exit")))[1]
        return ""

    async def _run(self, command: Sequence[str], *, in_terminal: bool = False) -> tuple[int, str]:
        code, _, errors = await self.output(command, in_terminal=in_terminal)
        return code, errors

    async def output(self, command: Sequence[str], *, in_terminal: bool = False) -> tuple[int, str, str]:
        """Exit code, output and errors of ssh, which has ended even where this is interrupted."""
        # They are files: a connection stays in the background and would hold a pipe open, and a pipe that Ctrl-C leaves open outlives its
        # loop.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=not in_terminal
            )
            try:
                code = await process.wait()
            finally:
                await ended(process)
            output.seek(0)
            errors.seek(0)
            return code, output.read().decode(errors="replace"), errors.read().decode(errors="replace")

    async def prepare(self) -> None:
        """Write the key that the host must have, find out once whether its name is known, and write what counts for jump hosts."""
        if self.login.host_key is not None:
            write_durably(_known_hosts(self.login, self.folder), f"{_alias(self.login)} {self.login.host_key}\n".encode())
        if self._host_name is None:
            self._host_name = await self._unknown_name()
        if self._jumps:
            for asks in (False, True):
                write_durably(self._jump_config(asks=asks), jump_config(self.login, asks=asks).encode())

    def _jump_config(self, *, asks: bool) -> Path:
        return self.folder / f"{self.login.key}.{'asks' if asks else 'batch'}"

    async def _unknown_name(self) -> str:
        """Address to connect to in place of the name; "" where ssh is to find the way by itself."""
        login = self.login
        try:
            code, output, errors = await self.output(self.command("-G", "--", login.name))
        except FileNotFoundError:
            raise Failed("there is no `ssh` on this machine: install OpenSSH's client (openssh-client)") from None
        if code != 0:
            raise HostUnreachable(explained(login, errors))
        settings = dict(line.split(" ", 1) for line in output.splitlines() if " " in line)
        jumps = settings.get("proxyjump", "none") != "none"
        if login.address is None or jumps or settings.get("proxycommand", "none") != "none":
            self._jumps = jumps
            return ""
        try:
            await asyncio.get_running_loop().getaddrinfo(settings.get("hostname", login.name), None, type=socket.SOCK_STREAM)
        except OSError:
            return login.address
        return ""


@asynccontextmanager
async def alone_at(path: Path) -> AsyncIterator[None]:
    """Hold a lock, which one of all of your processes has at a time."""
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(POLL_SECONDS)
        yield


_JUMP_CLOSED = re.compile(r"kex_exchange_identification|UNKNOWN port 65535")
"""Words of a connection that ended before the host itself said anything, as when a jump host's ssh has ended."""
_JUMP_REFUSED = re.compile(rf"Host key verification failed\.(?=.*(?:{_JUMP_CLOSED.pattern}))", re.DOTALL)
"""Words of a refused key before those: a jump host's, since the host's own would come over that connection."""
_JUMP_ADVICE = (
    "the key of a jump host on the way there is not known, or not the expected one, and nothing was sent. "
    "Type `ssh JUMP-HOST` in your terminal, and compare what it shows with the fingerprint that the machine has"
)
_TURNED_AWAY = any_of(
    r"kex_exchange_identification|Connection (?:closed|reset) by \S+ port", r"Exceeded MaxStartups|Not allowed at this time"
)
_ADVICE = (
    (any_of(r"REMOTE HOST IDENTIFICATION HAS CHANGED", r"Host key for .* has changed"),
        "its host key is not the expected one, and nothing was sent. If the host was set up anew, `lockstep hosts setup` pins its new key; "
        "else another machine may answer in its place"),
    (any_of(r"No .* host key is known", r"Host key verification failed"),
        "its host key is not known, and nothing was sent. `lockstep hosts setup` shows its fingerprint, "
        "and pins the key once you have compared it"),
    (any_of(r"Permission denied"),
        "it doesn't let you in. `ssh {words}` must work in your terminal without a question; where it asks for a code or a passphrase, "
        "`lockstep hosts setup` answers once for all later commands"),
    (any_of(r"no login in"),
        "it answers, but the login does not end: your key may want a touch, or your agent a confirmation. "
        "`lockstep hosts setup` shows what it asks for, and answers once for all later commands; else the host is stuck: look at its load"),
    (any_of(r"timed out", r"No route to host", r"Network is unreachable"), "it doesn't answer. Check its power, its cable and its address"),
    (any_of(r"Connection refused"), "nothing listens on its ssh port. Check sshd and the port"),
    (any_of(r"Could not resolve hostname"), "its name is not known here. State its address, or add it to ~/.ssh/config"),
    (any_of(r"administratively prohibited"),
        "the jump host on the way passes no connections on: its sshd_config must have AllowTcpForwarding yes"),
    (_TURNED_AWAY,
        "its sshd, or that of a jump host on the way, closes connections before any login: too many begin there at once, "
        "or it blocks this machine. Type the command again, or let its administrator raise MaxStartups in sshd_config"),
)  # fmt: skip


def unreachable(login: Login, errors: str) -> HostUnreachable:
    """Return the error for ssh's words when it could not connect."""
    reason = next((pattern for pattern, _ in _ADVICE if pattern.search(errors)), None)
    return (TurnedAway if reason is _TURNED_AWAY else HostUnreachable)(explained(login, errors))


def explained(login: Login, errors: str) -> str:
    """Sentence for ssh's errors when it could not connect: what to do, and ssh's own words."""
    name = login.name
    plain = re.sub(rf"{_ALIAS}[0-9a-f]{{{NAME_BYTES}}}", name, errors)
    lines = [line.strip() for line in plain.splitlines() if line.strip() and not line.startswith("@")]
    words = " | ".join(lines[-2:])[-WORDS_MAX:] or "ssh gave no reason"
    if refusal := _JUMP_REFUSED.search(plain):
        words = " | ".join(line for line in lines if line in plain[: refusal.end()])[-WORDS_MAX:]
        return f"host {name} can't be reached: {_JUMP_ADVICE} (ssh: {words})"
    advice = next((text.format(words=login.words) for pattern, text in _ADVICE if pattern.search(errors)), "")
    return f"host {name} can't be reached: {advice} (ssh: {words})" if advice else f"host {name} can't be reached (ssh: {words})"


KEY_MARK = "lockstep-host-key "
KEY_SHOW = f"import sys;a=sys.argv;a[1]=='HOSTNAME' and sys.stderr.write('{KEY_MARK}'+a[2]+' '+a[3]+chr(10))"
"""Program that ssh runs with what for, type and base64 of the key."""
KINDS = "ssh-ed25519,ecdsa-sha2-nistp256,ecdsa-sha2-nistp384,ecdsa-sha2-nistp521,rsa-sha2-512,rsa-sha2-256"


async def offered_key(login: Login, folder: Path) -> str:
    """Return type and base64 of the key that the host has, before anybody trusts it: nothing is sent, and no login is tried.

    ssh-keyscan would ask the name alone. This asks by ssh itself, as every other verb does: through jump hosts, with the port and the name
    of ssh's own configuration. ssh hands the key to a command of ours, finds it in no file of known hosts, and refuses it.

    Raises HostUnreachable, and Failed where this machine's ssh can't tell it.
    """
    shared = Shared(replace(login, host_key=None), folder, shares=False)
    await shared.prepare()
    nobody = folder / "nobody.known"
    nobody.write_text("", encoding="ascii")
    show = " ".join([_quoted(sys.executable), "-I", "-S", "-c", f'"{KEY_SHOW}"', "%I", "%t", "%K"])
    options = {
        "GlobalKnownHostsFile": nobody, "HostKeyAlgorithms": KINDS, "KnownHostsCommand": show, "UpdateHostKeys": "no",
        "UserKnownHostsFile": nobody, "VerifyHostKeyDNS": "no",
    }  # fmt: skip
    command = shared.command(
        "-T", *(part for name, value in options.items() for part in ("-o", f"{name}={value}")), "--", login.name, "true"
    )
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            _, _, errors = await shared.output(command)
    except TimeoutError:
        raise HostUnreachable(explained(login, f"no login in {OPEN_SECONDS:.0f} s")) from None
    keys = [line.removeprefix(KEY_MARK).strip() for line in errors.splitlines() if line.startswith(KEY_MARK)]
    if keys and KEY.fullmatch(keys[-1]):
        return keys[-1]
    if "knownhostscommand" in errors.lower():
        raise Failed(
            f"host {login.name}: this machine's ssh is too old to tell its key (OpenSSH 8.5 or newer can): write the line of ssh-keyscan"
            f" {login.name} into host_key"
        )
    raise HostUnreachable(explained(login, errors))


def _quoted(word: str) -> str:
    """A word of ssh's own configuration, which has quotes, and %% for a percent sign."""
    return '"' + word.replace("%", "%%") + '"'
