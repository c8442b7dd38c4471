"""Refuse secrets in files that git tracks, by the forms that detect-secrets knows: scripts/leaks.py

What looks like one and is none stands in leaks.yaml: by its reason and its file, the text that was found.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import yaml

from lockstep.platforms.jobs.bundle import scanner
from setup import ROOT

ALLOWED = Path("scripts/leaks.yaml")
ADDRESSES = ("IPPublicDetector",)
"""Addresses are no secrets; all other detectors count."""
SHOWN = 6
"""Characters of a secret that a message repeats."""
Allowed = Mapping[str, Mapping[str, list[str]]]


def leaks(texts: Iterable[tuple[str, str]], allowed: Allowed, scan: Callable[[str], Iterator[str]]) -> list[str]:
    """Return a sentence for each text that looks like a secret, and for each exception that nothing needs any more."""
    found = {(name, secret) for name, text in texts for secret in scan(text)}
    excepted = {(name, secret) for files in allowed.values() for name, secrets in files.items() for secret in secrets}
    new = [
        f"{name}: {secret[:SHOWN]}… looks like a secret: revoke it and take it out, or, if it is none, give it a reason in {ALLOWED}"
        for name, secret in sorted(found - excepted)
    ]
    return [*new, *(f"{ALLOWED}: {name} has no {secret!r} any more: take out its line" for name, secret in sorted(excepted - found))]


def tracked() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file of text that git tracks, but of the list of exceptions."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        path = ROOT / name
        if path.is_file() and name != str(ALLOWED):
            yield name, path.read_text(encoding="utf-8", errors="replace")


def main() -> int:
    messages = leaks(tracked(), yaml.safe_load((ROOT / ALLOWED).read_text(encoding="utf-8")), scanner(ADDRESSES))
    for message in messages:
        print(message, file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
