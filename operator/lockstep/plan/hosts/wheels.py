"""Pinned packages of a lock, and those of their files that a host's Python takes (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from lockstep.api.errors import ConfigError, Failed
from lockstep_spec.words import clauses, listed

GLIBCS = (17, 28, *range(31, 41))
"""Minor versions of glibc that uv takes as a platform."""
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([A-Za-z0-9.!+_-]+)\s*(?:;.*)?")
_HASH = re.compile(r"\s--hash=sha256:([0-9a-f]{64})(?=\s|$)")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,250}")


@dataclass(frozen=True)
class Pin:
    """A package of a lock."""

    name: str
    """Normalized: small letters, and a hyphen between words."""
    version: str
    hashes: frozenset[str]
    """SHA-256 of every file that may stand for it."""
    line: str = field(default="", compare=False)
    """All that the lock says of it."""


@dataclass(frozen=True)
class HostTarget:
    """A Python on a host."""

    python: tuple[int, int]
    machine: str
    glibc: tuple[int, int]

    def __str__(self) -> str:
        return f"Python {self.python[0]}.{self.python[1]} on {self.machine} with glibc {self.glibc[0]}.{self.glibc[1]}"

    @property
    def options(self) -> tuple[str, ...]:
        """Options that make uv choose for it."""
        minor = max((minor for minor in GLIBCS if (2, minor) <= self.glibc), default=GLIBCS[0])
        platform = f"{self.machine}-manylinux_2_{minor}"
        return ("--python-version", f"{self.python[0]}.{self.python[1]}", "--python-platform", platform)


@dataclass(frozen=True)
class Offer:
    """A file of a package."""

    name: str
    url: str
    sha256: str
    size: int

    @property
    def is_here(self) -> bool:
        """True if it is in the folder of wheels, and not of an index."""
        return self.url.startswith("file:")


def normalized(name: str) -> str:
    """Return a package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str, path: str) -> list[Pin]:
    """Return the packages of a lock. Raises ConfigError naming each line that pins nothing, or pins it without a hash."""
    pins, problems = [], []
    for number, line in _lines(text):
        hashes, match = frozenset(_HASH.findall(line)), _PIN.fullmatch(_HASH.sub("", line.partition(" #")[0]).strip())
        if match is None:
            problems.append(f"{path}:{number}: {line[:80]!r} pins no package: a lock has lines such as NAME==VERSION --hash=sha256:…")
        elif not hashes:
            problems.append(f"{path}:{number}: {match[1]} has no --hash=sha256:…: make the lock with `uv pip compile --generate-hashes`")
        else:
            pins.append(Pin(normalized(match[1]), match[2], hashes, line))
    if problems:
        raise ConfigError(*problems)
    if not pins:
        raise ConfigError(f"{path} pins no package")
    return pins


def _lines(text: str) -> Iterable[tuple[int, str]]:
    """Lines of a lock with those that they go on in, and the number of their first."""
    whole, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if whole else number
        if line.rstrip().endswith("\\"):
            whole += line.rstrip()[:-1] + " "
            continue
        whole = (whole + line).strip()
        if whole and not whole.startswith("#"):
            yield first, whole
        whole = ""
    if whole.strip():
        yield first, whole.strip()


def lock_of(pins: Iterable[Pin]) -> str:
    """Return the lock of these packages."""
    return "".join(f"{pin.line}\n" for pin in pins)


def is_source(file: str) -> bool:
    return not file.endswith(".whl")


def offers_of(listing: Mapping[str, Any], pins: Iterable[Pin], target: HostTarget) -> list[Offer]:
    """Return a file of every package in a pylock.toml that uv made for a Python, which fits it and is the lock's. Raises Failed."""
    by_name, offers, problems = {pin.name: pin for pin in pins}, [], []
    for package in listing.get("packages", ()):
        pin, files = by_name[package["name"]], files_of(package)
        fitting = [file for file in files if file.sha256 in pin.hashes]
        for file in files:
            if file.is_here and file not in fitting:
                path, digests = unquote(urlsplit(file.url).path), clauses(sorted(pin.hashes))
                raise Failed(
                    f"{path} has the SHA-256 {file.sha256}, but the lock has {digests} for {pin.name} {pin.version}: nothing of it was"
                    " sent; remove the file"
                )
        if fitting:
            offers.append(max(fitting, key=preference))
        else:
            problems.append(f"{pin.name} {pin.version}")
    if problems:
        raise Failed(f"the index has no file with a digest of the lock for {listed(problems)} for {target}")
    return offers


def files_of(package: Mapping[str, Any]) -> Sequence[Offer]:
    """Return the files of an entry of a pylock.toml: its wheels, and its source."""
    return [
        Offer(name, file["url"], file["hashes"]["sha256"], file.get("size", 0))
        for file in (*package.get("wheels", ()), *filter(None, [package.get("sdist")]))
        if _FILE_NAME.fullmatch(name := unquote(urlsplit(file["url"]).path.rpartition("/")[2])) and "sha256" in file.get("hashes", ())
    ]


def preference(file: Offer) -> tuple[bool, bool, bool, list[int]]:
    """Order of a package's files which fit a Python, the best one highest: what is here, and then what is for this kind of machine, and
    for the newest Python and glibc.
    """
    numbers = [int(number) for number in re.findall(r"\d+", file.name)]
    return file.is_here, not is_source(file.name), not file.name.endswith("-any.whl"), numbers
