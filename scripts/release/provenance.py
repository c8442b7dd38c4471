"""Which files a release has, their digests, and what they were made from: an in-toto statement with SLSA's predicate, and SHA256SUMS.

https://slsa.dev/spec/v1.0/provenance and https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep.api.errors import ConfigError
from release.layouts import Layout
from setup import ROOT

BUILD_TYPE = "https://lockstep.dev/make-release/v1"
BUILDER = "https://lockstep.dev/make-release"
"""Says that a person or a CI ran `make release`: nothing but its signature says who."""


@dataclass(frozen=True)
class Source:
    """The commit that a release is made of, and its time in seconds, which everything in the release has."""

    commit: str
    epoch: int


def source() -> Source:
    """Return the commit of the checkout. Raises ConfigError where there is none, or files differ from it."""
    changed = _git("status", "--porcelain")
    if changed:
        raise ConfigError(
            f"a release is made of a commit, and {len(changed.splitlines())} files of this checkout are in none ({changed.split()[1]}, …): "
            "commit them, or put them aside with git stash --include-untracked"
        )
    commit, epoch = _git("log", "-1", "--format=%H %ct").split()
    return Source(commit, int(epoch))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError("a release is made in a clone of the repository, and git is not installed: apt-get install git") from None
    if done.returncode:
        raise ConfigError(f"a release is made in a clone of the repository, and {ROOT} is none: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


def sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def digests(dist: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of every file by its path in dist/, sorted; of a folder, of all files in it."""
    every = {file for path in files for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()}
    return {str(path.relative_to(dist)): sha256(path) for path in sorted(every)}


def sums(files: Mapping[str, str]) -> str:
    """Return the lines that `sha256sum --check` reads."""
    return "".join(f"{digest}  {name}\n" for name, digest in files.items())


def statement(
    files: Mapping[str, str], commit: str, layouts: Iterable[Layout], parameters: Mapping[str, Any], times: tuple[datetime, datetime]
) -> str:
    """Return the statement on one line."""
    locks = sorted((ROOT / "requirements").glob("*.lock"))
    materials = [
        {"name": "commit", "digest": {"gitCommit": commit}},
        *({"name": layout.base, "digest": {"sha256": layout.base_digest.removeprefix("sha256:")}} for layout in layouts),
        *({"name": str(lock.relative_to(ROOT)), "digest": {"sha256": sha256(lock)}} for lock in locks),
    ]
    started, finished = (f"{time:%Y-%m-%dT%H:%M:%SZ}" for time in times)
    content = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in files.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {"buildType": BUILD_TYPE, "externalParameters": dict(parameters), "resolvedDependencies": materials},
            "runDetails": {"builder": {"id": BUILDER}, "metadata": {"startedOn": started, "finishedOn": finished}},
        },
    }
    return json.dumps(content) + "\n"
