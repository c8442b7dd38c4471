"""Token of a launch: whoever has it may join. It is in no argument, variable or log: a file of its owner's, a terminal, or standard input
has it.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import hashlib
import hmac
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.platforms.output import tell
from lockstep_spec.files import expanded, write_durably

TOKEN_BYTES = 20
_TOKEN = re.compile(r"[a-z2-7]{4}(-[a-z2-7]{4}){7}")
FILE_BYTES_MAX = 4096
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class LaunchToken:
    """A token of 160 bits, so that nothing that is said on the wire helps to guess it."""

    text: str = field(repr=False)

    def __post_init__(self) -> None:
        if not _TOKEN.fullmatch(self.text):
            raise ConfigError("this is no token: lockstep launch makes one, eight groups of four letters and digits with - in between")

    @property
    def key(self) -> bytes:
        """Key of the connections, 32 bytes."""
        return hashlib.sha256(b"lockstep launch, token\n" + self.text.encode()).digest()

    def job_key(self, uid: str) -> str:
        """The job's key as its agents read it, 64 hexadecimal digits: both sides compute it, so that it is never sent."""
        return hmac.new(self.key, b"the job's key\n" + uid.encode(), hashlib.sha256).hexdigest()


def new_token() -> LaunchToken:
    letters = base64.b32encode(secrets.token_bytes(TOKEN_BYTES)).decode().lower()
    return LaunchToken("-".join(letters[start : start + 4] for start in range(0, len(letters), 4)))


def default_file(job: str, port: int) -> Path:
    """Return the file of the token of a job that is launched without --token-file. Raises ConfigError without a home."""
    state = expanded(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    if str(state).startswith("~"):
        raise ConfigError("this user has no home folder for the token's file: name a file by --token-file")
    return state / "lockstep" / "launch" / f"{job}-{port}.token"


def read_file(path: Path) -> LaunchToken:
    """Read the token of a file that nobody else may read. Raises ConfigError, FileNotFoundError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _require_private(path, os.fstat(descriptor))
            text = os.read(descriptor, FILE_BYTES_MAX).decode("utf-8", "replace").strip()
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"the token's file {path} can't be read ({error.strerror})") from None
    try:
        return LaunchToken(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _require_private(path: Path, facts: os.stat_result) -> None:
    """Raise ConfigError unless it is a regular file that its owner, this user, alone may read and write."""
    if not stat.S_ISREG(facts.st_mode):
        raise ConfigError(f"{path} is no regular file: name the file that lockstep launch wrote")
    if facts.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to another user: the token's file must be yours")
    if facts.st_mode & 0o077:
        mode = f"{stat.S_IMODE(facts.st_mode):04o}"
        raise ConfigError(f"others may read or write {path} (mode {mode}), which has the token: chmod 600 {path}")


def token_of_launch(path: Path) -> tuple[LaunchToken, bool]:
    """The token in this file, and True if it was made for this launch. One that an earlier launch left is used again: its joiners still
    have it.

    Raises ConfigError.
    """
    with contextlib.suppress(FileNotFoundError):
        return read_file(path), False
    token = new_token()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(path, f"{token.text}\n".encode(), 0o600)  # whoever waits for it reads it whole
    except OSError as error:
        raise ConfigError(f"the token's file {path} can't be written ({error.strerror}): name another one with --token-file") from None
    return token, True


def show(token: LaunchToken) -> bool:
    """Show the token on the terminal itself, which no `| tee` of the output reaches. False: this process has no terminal."""
    try:
        with open("/dev/tty", "w", encoding="ascii") as terminal:  # noqa: PTH123 (a device)
            terminal.write(f"\n    token: {token.text}\n\n")
    except OSError:
        return False
    return True


def token_to_join(path: Path | None, wait_seconds: float = 0.0, *, say: Callable[[str], None] = tell) -> LaunchToken:
    """The token out of the file, else of the terminal, else of standard input. A file that is not there yet is waited for.

    Raises ConfigError when there is none.
    """
    if path is not None:
        return _waited_for(path, wait_seconds, say)
    try:
        text = getpass.getpass("Token that lockstep launch has shown: ") if sys.stdin.isatty() else sys.stdin.readline(FILE_BYTES_MAX)
    except EOFError:
        text = ""
    if not text.strip():
        raise ConfigError("no token was given: type it on the terminal, pipe it in, or name its file with --token-file")
    return LaunchToken(text.strip())


def _waited_for(path: Path, wait_seconds: float, say: Callable[[str], None]) -> LaunchToken:
    give_up, is_said = time.monotonic() + wait_seconds, False
    while True:
        try:
            return read_file(path)
        except FileNotFoundError:
            if time.monotonic() >= give_up:
                raise ConfigError(f"there is no file {path}, which has the token: copy it from the machine of lockstep launch") from None
        if not is_said:
            say(f"lockstep: waiting for {path}, which lockstep launch writes")
            is_said = True
        time.sleep(LOOK_SECONDS)
