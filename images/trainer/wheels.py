"""Print what an image still has to install of some locks: python3 wheels.py [--only NAME | --without NAME] [--keep NAME]... LOCK...

A base that brings its own torch, as NVIDIA's do, was built around it: `--keep torch` leaves that torch alone, and with it what is compiled
against it or belongs to it. A package that two locks name is printed once; two versions of one are an error.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)")
TORCH = re.compile(r"torch|triton|numpy|nvidia-.*|cuda-.*")
"""Packages that belong to torch: CUDA's libraries come as wheels beside it, and numpy's ABI is the one that it was compiled for."""


def requirements(text: str) -> dict[str, str]:
    """Each package of a lock and the lines that pin it, hashes included."""
    packages: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        match = REQUIREMENT.match(line)
        name = match[1] if match else name
        if name and not line.startswith("#"):
            packages[name] = packages.get(name, "") + line + "\n"
    return packages


def merged(locks: list[str]) -> dict[str, str]:
    """One lock of several.

    Raises:
        ValueError: they pin two versions of one package.
    """
    packages: dict[str, str] = {}
    for lock in locks:
        for name, lines in requirements(lock).items():
            if name in packages and _version(packages[name]) != _version(lines):
                raise ValueError(f"{name} is pinned twice: {_version(packages[name])} and {_version(lines)}; make lock")
            packages[name] = lines
    return packages


def _version(lines: str) -> str:
    match = REQUIREMENT.match(lines)
    return match[2] if match else ""


def to_install(locks: list[str], *, only: str = "", without: str = "", keep: str = "") -> str:
    """The lines to install. `keep` is torch or nothing."""
    chosen = {
        name: lines
        for name, lines in merged(locks).items()
        if only in ("", name) and name != without and not (keep == "torch" and TORCH.fullmatch(name))
    }
    return "".join(chosen[name] for name in sorted(chosen))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--without", default="")
    parser.add_argument("--keep", default="", choices=["", "torch"])
    parser.add_argument("locks", nargs="+", type=Path)
    options = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in options.locks]
    print(to_install(texts, only=options.only, without=options.without, keep=options.keep), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
