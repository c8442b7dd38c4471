"""Remotes, which are hubs and object stores: a listing that is pinned, and files that are read from any byte on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lockstep_train.base.cache import file_digest


class MayPass(Exception):
    """Error of a network, a server or a store that fails now and may not fail later. The message is one sentence without its remedy.

    `wait_seconds`: how long the server asks to be left alone.
    """

    def __init__(self, message: str, wait_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


class Cancelled(Exception):
    """Error of a transfer that another file's failure ends."""


class ByteSink(Protocol):
    """Target of a file's bytes: a file opened to append."""

    def write(self, data: bytes, /) -> int: ...

    def restart(self) -> None:
        """Begin the file anew."""


@dataclass(frozen=True)
class RemoteFile:
    path: str
    """Path below the repository's root."""
    size: int
    """Size in bytes."""
    digest: str
    """`sha256:…`, `git:…` (SHA-1 of a git blob), `etag:…` (of an object store), or empty where the remote has none."""


class Remote(Protocol):
    """A repository of a hub, or a folder of an object store."""

    @property
    def name(self) -> str:
        """Name as people write it."""

    @property
    def kind(self) -> str:
        """`models` or `datasets`: also the folder of the cache that it goes to."""

    def is_pin(self, revision: str | None) -> bool:
        """Return True if the revision names one content for ever, so that nothing needs to be asked."""

    def resolve(self, revision: str | None) -> str:
        """Resolve the pin of a revision, now. Raises ConfigError for a name, a revision or a token that can't be right, else MayPass."""

    def files(self, pin: str) -> Sequence[RemoteFile]:
        """All files at a pin. Raises as `resolve`."""

    def read(self, file: RemoteFile, pin: str, sink: ByteSink, start: int) -> None:
        """Append the file's bytes from `start` on. Raises as `resolve`, and OSError of the sink."""

    def is_intact(self, file: RemoteFile, path: Path) -> bool:
        """Return True if the file on the volume is the remote's, by its digest."""


Choose = Callable[[Sequence[RemoteFile], Callable[[str], bytes]], Sequence[RemoteFile]]
"""(all files, reader of a small one) → those to fetch. Raises ConfigError for a repository that can't be used."""


def everything(files: Sequence[RemoteFile], read: Callable[[str], bytes]) -> Sequence[RemoteFile]:
    return files


def git_digest(path: Path) -> str:
    """SHA-1 of a file as a git blob: over `blob <size>`, a zero byte and its content."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest()


def matches(digest: str, path: Path) -> bool:
    """Return True if a file has a digest of the forms `sha256:…` and `git:…`."""
    kind, _, value = digest.partition(":")
    if kind == "git":
        return git_digest(path) == value
    return file_digest(path) == value
