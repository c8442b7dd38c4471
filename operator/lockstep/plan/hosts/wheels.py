"""Pinned packages of a lock, and which of their files a host's Python can use (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.api.errors import ConfigError
from lockstep_spec.words import clauses

LEGACY = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
"""Older names of platforms by their version of glibc."""
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==([A-Za-z0-9.!+_-]+)\s*(;.*)?")
_HASH = re.compile(r"\s--hash=sha256:([0-9a-f]{64})(?=\s|$)")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,250}")
_WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(?:-\d[^-]*)?-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl")
_SOURCE = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)\.(?:tar\.gz|zip)")


@dataclass(frozen=True)
class Pin:
    """A package of a lock."""

    name: str
    """Normalized: small letters, and a hyphen between words."""
    version: str
    hashes: frozenset[str]
    """SHA-256 of every file that may stand for it."""
    conditional: bool = False
    """True if the lock wants it only for some Pythons or platforms."""

    def expects(self) -> str:
        """Digests of it, for a message."""
        return clauses(sorted(self.hashes))


@dataclass(frozen=True)
class HostTarget:
    """A Python on a host."""

    python: tuple[int, int]
    machine: str
    glibc: tuple[int, int]

    def __str__(self) -> str:
        return f"Python {self.python[0]}.{self.python[1]} on {self.machine} with glibc {self.glibc[0]}.{self.glibc[1]}"


def normalized(name: str) -> str:
    """Return a package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str, path: str) -> list[Pin]:
    """Return the packages of a lock. Raises ConfigError naming each line that pins nothing, or pins it without a hash."""
    pins, problems = [], []
    for number, line in _lines(text):
        hashes, match = frozenset(_HASH.findall(line)), _pin(line)
        if match is None:
            problems.append(f"{path}:{number}: {line[:80]!r} pins no package: a lock has lines such as NAME==VERSION --hash=sha256:…")
        elif not hashes:
            problems.append(f"{path}:{number}: {match[1]} has no --hash=sha256:…: make the lock with `uv pip compile --generate-hashes`")
        else:
            pins.append(Pin(normalized(match[1]), match[2], hashes, bool(match[3])))
    if problems:
        raise ConfigError(*problems)
    if not pins:
        raise ConfigError(f"{path} pins no package")
    return pins


def _pin(line: str) -> re.Match[str] | None:
    return _PIN.fullmatch(_HASH.sub("", line.partition(" #")[0]).strip())


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


def without(text: str, names: Iterable[str]) -> str:
    """Return a lock without these packages."""
    return "".join(f"{line}\n" for _, line in _lines(text) if not _names(line, names))


def only(text: str, names: Iterable[str]) -> str:
    """Return of a lock only these packages."""
    return "".join(f"{line}\n" for _, line in _lines(text) if _names(line, names))


def _names(line: str, names: Iterable[str]) -> bool:
    match = _pin(line)
    return match is not None and normalized(match[1]) in set(names)


def is_of(file: str, pin: Pin) -> bool:
    """Return True if a file's name is that of a wheel or source archive of this package and version."""
    match = _WHEEL.fullmatch(file) or _SOURCE.fullmatch(file)
    return (
        match is not None
        and bool(FILE_NAME.fullmatch(file))
        and normalized(match["name"]) == pin.name
        and match["version"].replace("_", "-").lower() == pin.version.replace("_", "-").lower()
    )


def is_source(file: str) -> bool:
    return not file.endswith(".whl")


def rank(file: str, target: HostTarget) -> tuple[int, ...] | None:
    """Order of a package's file for a Python, the best one highest; None: that Python can't use it. A source archive comes last."""
    if is_source(file):
        return (0,) if _SOURCE.fullmatch(file) else None
    match = _WHEEL.fullmatch(file)
    if match is None:
        return None
    platforms = [version for tag in match["platform"].split(".") if (version := _platform(tag, target)) is not None]
    kinds = [
        kind
        for python in match["python"].split(".")
        for abi in match["abi"].split(".")
        if (kind := _kind(python, abi, target.python)) is not None
    ]
    return (1, max(kinds), *max(platforms)) if platforms and kinds else None


def _kind(python: str, abi: str, version: tuple[int, int]) -> int | None:
    """Order of a wheel's tags for a version of CPython; None: it is not for that."""
    major, minor = version
    if python == f"cp{major}{minor}" and abi in (f"cp{major}{minor}", "none"):
        return 100
    match = re.fullmatch(r"cp3(\d{1,2})", python)
    if abi == "abi3" and match and int(match[1]) <= minor:
        return 10 + int(match[1])
    match = re.fullmatch(r"py3(\d{0,2})", python)
    return 1 if abi == "none" and match and int(match[1] or 0) <= minor else None


def _platform(tag: str, target: HostTarget) -> tuple[int, int] | None:
    """Version of glibc that a wheel's platform needs; None: it is for another machine."""
    if tag == "any":
        return (0, 0)
    if not tag.endswith(f"_{target.machine}"):
        return None
    system = tag.removesuffix(f"_{target.machine}")
    match = re.fullmatch(r"manylinux_(\d+)_(\d+)", system)
    version = (int(match[1]), int(match[2])) if match else LEGACY.get(system)
    return version if version is not None and version <= target.glibc else None


def best(files: Iterable[str], pin: Pin, target: HostTarget) -> str | None:
    """Return the file of a package that a Python takes; None: there is none for it."""
    ranked = [(order, file) for file in files if is_of(file, pin) and (order := rank(file, target)) is not None]
    return max(ranked)[1] if ranked else None
